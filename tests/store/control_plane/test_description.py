"""The API does what its description says, whatever it is sent (Schemathesis)."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.control_plane import ADMIN_TOKEN
from tests.support.control_plane_process import environ, start, wait_live
from tests.support.services import free_port

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

# Of each call. `make soak` sends more, of other kinds.
EXAMPLES = os.environ.get("SOAK_DESCRIPTION", "2")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


def test_no_call_is_answered_by_what_its_description_does_not_say(
    fresh_postgres_url, valkey_url, tmp_path
):
    port = free_port()
    child = start(environ(fresh_postgres_url, valkey_url, port))
    try:
        wait_live(port, child)
        tried = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run"),
                f"http://127.0.0.1:{port}/schema/openapi.json",
                *("--header", f"Authorization: Bearer {ADMIN_TOKEN}"),
                *("--include-path-regex", "^/admin"),
                # It would end the session of nobody, and speak to no provider.
                *("--exclude-path-regex", "/oidc/"),
                *("--phases", "fuzzing", "--max-examples", EXAMPLES, "--checks", CHECKS),
                *("--generation-deterministic", "--no-color", "--workers", "1"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
    finally:
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=30)
    assert tried.returncode == 0, tried.stdout[-6000:] + tried.stderr[-2000:]
    faults = [line for line in err.splitlines() if json.loads(line)["level"] == "error"]
    assert faults == []
