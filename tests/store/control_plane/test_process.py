"""The process itself: what stops its start, what it logs, and how it ends."""

import json
import signal
import time

import httpx
import pytest

from tests.support.control_plane import ADMIN_TOKEN, SECRET
from tests.support.control_plane_process import environ, start, wait_live
from tests.support.services import free_port

pytestmark = pytest.mark.services


def test_it_starts_serves_logs_json_and_ends_when_told(postgres_url, valkey_url):
    port = free_port()
    child = start(environ(postgres_url, valkey_url, port))
    try:
        wait_live(port, child)
        assert httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
        began = time.monotonic()
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert time.monotonic() - began < 15
    # uvicorn raises the signal again when it is done, as a shell expects.
    assert child.returncode in (0, -signal.SIGTERM)
    assert out == ""
    lines = [json.loads(line) for line in err.splitlines()]
    assert {line["process"] for line in lines} == {"control-plane"}
    worse = [line for line in lines if line["level"] in ("warning", "error")]
    assert not worse, json.dumps(worse, indent=1)
    assert ADMIN_TOKEN not in err
    assert SECRET not in err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DATABASE_URL", "", "HEADWORKS_DATABASE_URL is not set"),
        ("HEADWORKS_ADMIN_TOKEN", "short", "HEADWORKS_ADMIN_TOKEN is shorter than 16 bytes"),
        ("HEADWORKS_LEASE_MS", "soon", "HEADWORKS_LEASE_MS: Expected `int`"),
        ("HEADWORKS_LEASE_MS", "0", "HEADWORKS_LEASE_MS must be at least 1"),
        ("REDIS_URL", "http://x", "HEADWORKS_REDIS_URL"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(name, value, message):
    env = environ("postgresql://127.0.0.1/x", "redis://127.0.0.1", 1) | {name: value}
    child = start(env)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 1
    assert message in err
    assert "Traceback" not in err


def test_a_taken_port_stops_the_start_and_is_told(postgres_url, valkey_url):
    port = free_port()
    first = start(environ(postgres_url, valkey_url, port))
    try:
        wait_live(port, first)
        second = start(environ(postgres_url, valkey_url, port))
        _, err = second.communicate(timeout=30)
        assert second.returncode != 0
        assert "address already in use" in err
    finally:
        first.terminate()
        first.communicate(timeout=30)
