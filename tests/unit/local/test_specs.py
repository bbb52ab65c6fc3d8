"""What our own processes are told: the environment may tune them, never break the stack."""

import pytest

from gateway.settings import GatewaySettings
from local.options import Options
from local.secrets import Secrets
from local.specs import STOP_TIMEOUT_S, Specs
from worker.settings import WorkerSettings


@pytest.fixture
def specs(tmp_path):
    def make(environ=None, **options):
        return Specs(
            Options(data=tmp_path, **options),
            Secrets(internal_secret="s" * 16, key_pepper="p", admin_token="t"),
            environ or {},
            database_url="postgresql://d",
            redis_url="redis://r",
        )

    return make


def everyone(made):
    return [
        made.gateway(0).env,
        made.control_plane().env,
        made.worker(0, deployment="d", version="v").env,
    ]


def test_what_the_stack_relies_on_is_not_the_environments(specs, tmp_path):
    made = specs({"HEADWORKS_REGION": "mars", "HEADWORKS_MODELS_DIR": "/nowhere"})
    for env in everyone(made):
        assert env["HEADWORKS_REGION"] == "local"
        assert env["HEADWORKS_MODELS_DIR"] == str(tmp_path / "models")


@pytest.mark.parametrize(
    ("environ", "option", "expected"),
    [
        ({}, None, None),
        ({"HEADWORKS_LEASE_MS": "9000"}, None, "9000"),
        ({"HEADWORKS_LEASE_MS": "9000"}, 3000, "3000"),
        ({}, 3000, "3000"),
    ],
)
def test_the_option_comes_before_the_environment(specs, environ, option, expected):
    for env in everyone(specs(environ, lease_ms=option)):
        assert env.get("HEADWORKS_LEASE_MS") == expected


def test_the_environment_tunes_how_long_is_drained(specs):
    env = specs({"HEADWORKS_DRAIN_MS": "1"}).gateway(0).env
    assert (env["HEADWORKS_DRAIN_MS"], env["HEADWORKS_SETTLE_MS"]) == ("1", "5000")


def test_nobody_is_killed_while_it_drains(specs):
    made = specs()
    gateway = made.gateway(0)
    assert {"drain_ms", "settle_ms"} <= set(GatewaySettings.__struct_fields__)
    assert "drain_timeout_s" in WorkerSettings.__struct_fields__
    drain, settle = (int(gateway.env[f"HEADWORKS_{name}_MS"]) for name in ("DRAIN", "SETTLE"))
    assert (drain + 4 * settle) / 1000 < gateway.stop_timeout_s == STOP_TIMEOUT_S
    worker = made.worker(0, deployment="d", version="v")
    assert int(worker.env["HEADWORKS_DRAIN_TIMEOUT_S"]) + 15 < worker.stop_timeout_s
