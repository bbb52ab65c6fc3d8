"""Real Postgres and Valkey for tests, started as the product starts them.

`Running` holds one child that a test may stop, kill and start again.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import redis

from local.postgres import EmbeddedPostgres
from local.process import ProcessSpec
from local.valkey import EmbeddedValkey

START_TIMEOUT_S = 60.0
PORTS = range(10_000, 32_000)  # below those of outgoing connections
SPAN = 20

# A test's database need not survive the machine losing power, only its own kill -9.
FAST = {"fsync": "off", "max_connections": "300"}


@contextmanager
def open_directory(name: str) -> Iterator[Path]:
    """A directory that Postgres, running as `nobody`, can reach.

    Not pytest's: every session closes that to others at its start, running ones included.
    """
    path = Path(tempfile.mkdtemp(prefix=f"headworks-{name}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free_port() -> int:
    """One that nobody listens on, and the system gives to no outgoing connection meanwhile.

    Ports up to 20 above it are free too, now: a stack takes several from one number on.
    """
    while True:
        port = secrets.randbelow(PORTS.stop - PORTS.start - SPAN) + PORTS.start
        if all(_is_free(port + offset) for offset in range(SPAN)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Running:
    """A child process and how to tell that it answers."""

    def __init__(self, spec: ProcessSpec, log: Path, ready: Callable[[], bool]) -> None:
        self.spec = spec
        self._log = log
        self._ready = ready
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self.spec.argv,
                cwd=self.spec.cwd,
                env=dict(self.spec.env),
                user=self.spec.user,
                group=self.spec.group,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready():
            assert self._child.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < deadline, f"{self.spec.name} did not become ready"
            time.sleep(0.02)

    def stop(self) -> None:
        self._end(self.spec.stop_signal)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._child is None:
            return
        if self._child.poll() is None:
            # Postgres's children notice a killed parent by themselves; a group kill is quicker.
            if how == signal.SIGKILL:
                os.killpg(self.pid, how)
            else:
                self._child.send_signal(how)
        self._child.wait(START_TIMEOUT_S)
        self._child = None


class PostgresServer:
    """A running cluster that hands out databases. `options` are settings of the server."""

    def __init__(self, directory: Path, **options: str) -> None:
        self.embedded = EmbeddedPostgres(
            directory=directory, port=free_port(), options=FAST | options
        )
        self.embedded.prepare()
        self.running = Running(self.embedded.spec(), directory / "log", self._answers)

    def create_database(self, name: str, template: str = "template1") -> str:
        with psycopg.connect(self.embedded.maintenance_url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.embedded.url.rsplit("/", 1)[0] + f"/{name}"

    def drop_database(self, name: str) -> None:
        with psycopg.connect(self.embedded.maintenance_url, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.embedded.maintenance_url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


class ValkeyServer:
    """A running Valkey."""

    def __init__(self, directory: Path) -> None:
        self.embedded = EmbeddedValkey(directory=directory, port=free_port())
        self.embedded.prepare()
        self.running = Running(self.embedded.spec(), directory / "log", self._answers)

    def flush(self) -> None:
        with redis.Redis.from_url(self.embedded.url) as client:
            client.flushall()

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.embedded.url) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False
