"""The process itself: what stops its start, what it logs, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.control_plane import ADMIN_TOKEN, PEPPER, SECRET
from tests.support.services import free_port

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[3]


def environ(postgres_url, valkey_url, port):
    return {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": postgres_url,
        "REDIS_URL": valkey_url,
        "HEADWORKS_INTERNAL_SECRET": SECRET,
        "HEADWORKS_KEY_PEPPER": PEPPER,
        "HEADWORKS_ADMIN_TOKEN": ADMIN_TOKEN,
        "HEADWORKS_CONTROL_PLANE_PORT": str(port),
    }


def start(env):
    return subprocess.Popen(
        [sys.executable, "-m", "control_plane"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_live(port, child):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert child.poll() is None, child.communicate()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health/live").raise_for_status()
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("it did not come up")


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
