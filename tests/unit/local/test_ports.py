"""Ports: taken ones are named, an embedded service keeps its own."""

import socket

import pytest

from local.options import Options
from local.ports import PortTakenError, is_free, kept_port, require_free


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_told_with_its_option(taken):
    assert not is_free(taken)
    with pytest.raises(PortTakenError, match=rf"port {taken} for the gateway.*--gateway-port"):
        require_free(taken, "gateway", "--gateway-port")


def test_a_service_keeps_its_port_while_it_is_free(tmp_path, taken):
    path = tmp_path / "postgres" / "port"
    port = kept_port(path)
    assert kept_port(path) == port
    path.write_text(str(taken))
    assert kept_port(path) != taken
    path.write_text("nonsense")
    assert kept_port(path) > 0


def test_every_process_of_a_kind_has_a_port_of_its_own(tmp_path):
    options = Options(data=tmp_path, gateways=3, workers=2)
    assert options.gateway_ports == [8000, 8010, 8020]
    assert options.worker_ports == [8100, 8101]
