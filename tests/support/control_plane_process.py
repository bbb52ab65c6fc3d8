"""A control plane as a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.support.control_plane import ADMIN_TOKEN, PEPPER, SECRET

ROOT = Path(__file__).parents[2]


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
