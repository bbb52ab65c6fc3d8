"""A whole running system for end-to-end tests, started and stopped by its own command."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

from cli.status import describe
from local.layout import Layout
from local.state import read_state
from tests.support.services import free_port

ROOT = Path(__file__).parents[2]
MODELS = ROOT / ".local" / "test-models"
MODEL = "smollm2-135m-instruct"
LEASE_S = 3.0
WAIT_S = 90.0


class Stack:
    """The command line, the addresses and the keys of one stack."""

    def __init__(self, data: Path, **options: int) -> None:
        self.data = data
        base = {"gateway_port": free_port(), "control_plane_port": free_port()}
        self._options = {**base, "worker_port": free_port(), "lease_ms": 3000, **options}
        self.status: dict[str, Any] = {}

    def command(self, *words: str, environ: Mapping[str, str] | None = None, timeout: float = 240):
        """Run `headworks …` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "cli", *words, "--data", str(self.data)],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def up(self, environ: Mapping[str, str] | None = None) -> None:
        options = [f"--{k.replace('_', '-')}={v}" for k, v in self._options.items()]
        # In one type on every machine: in bfloat16 near-ties fall as the company has it.
        named = ("--detach", f"--models={MODELS}", "--dtype=float32")
        done = self.command("up", *named, *options, environ=environ)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        self.refresh()

    def down(self) -> None:
        done = self.command("down")
        assert done.returncode == 0, done.stderr

    def refresh(self) -> dict[str, Any]:
        """What `headworks status --json` says, without starting a command for it."""
        layout = Layout(self.data)
        state = read_state(layout)
        self.status = describe(layout, state) if state else {"ready": False, "phase": "stopped"}
        return self.status

    @property
    def key(self) -> str:
        return (self.data / "demo_key").read_text()

    @property
    def gateway_urls(self) -> list[str]:
        return list(self.status["gateway_urls"])

    @property
    def gateway_url(self) -> str:
        """Any of them: a test may not care which."""
        return random.choice(self.gateway_urls)

    def admin(self) -> httpx.Client:
        token = (self.data / "admin_token").read_text()
        return httpx.Client(
            base_url=self.status["control_plane_url"],
            headers={"authorization": f"Bearer {token}"},
            timeout=30,
        )

    def check(self, *, quiescent: bool = True) -> dict[str, Any]:
        """What `headworks check --json` says."""
        with self.admin() as admin:
            answer = admin.get("/admin/check", params={"quiescent": str(quiescent).lower()})
            if answer.status_code != 200:
                return {
                    "ok": False,
                    "items": [{"name": "check", "ok": False, "detail": answer.text}],
                }
            return answer.json()

    def settles(self, within_s: float = WAIT_S) -> None:
        """Wait until `check --quiescent` is clean, or fail with what is off."""
        deadline = time.monotonic() + within_s
        while not (report := self.check())["ok"]:
            off = [item for item in report["items"] if not item["ok"]]
            assert time.monotonic() < deadline, json.dumps(off, indent=1)
            time.sleep(0.5)

    def usage(self, **query: Any) -> list[dict[str, Any]]:
        with self.admin() as admin:
            answer = admin.get("/admin/usage", params={"limit": 1000, **query})
            assert answer.status_code == 200, answer.text
            return list(answer.json()["usage"])

    def journalled(self) -> dict[str, int]:
        """Output tokens of each request by the workers' journals alone, from Postgres."""
        with psycopg.connect(self.status["database_url"]) as connection:
            rows = connection.execute(
                "SELECT request_id, sum(output_tokens)::bigint FROM witnesses"
                " WHERE source = 'journal' GROUP BY request_id"
            )
            return dict(rows.fetchall())

    def pid(self, process: str) -> int:
        return int(self.refresh()["processes"][process]["pid"])

    def kill(self, process: str, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(process), how)

    def wait_ready(self, within_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + within_s
        while not self.refresh().get("ready"):
            assert time.monotonic() < deadline, json.dumps(self.status, indent=1)
            time.sleep(0.2)

    @contextmanager
    def away(self, process: str, seconds: float) -> Iterator[None]:
        """Stop the process's clock for the body, at least `seconds`: nothing answers."""
        victim = psutil.Process(self.pid(process))
        family = [victim, *victim.children(recursive=True)]
        started = time.monotonic()
        for member in family:
            member.send_signal(signal.SIGSTOP)
        try:
            yield
            time.sleep(max(0.0, seconds - (time.monotonic() - started)))
        finally:
            for member in family:
                member.send_signal(signal.SIGCONT)
