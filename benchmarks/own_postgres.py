"""A Postgres for one benchmark alone, set up as in production: everything is really on disk."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from local.postgres import EmbeddedPostgres

START_TIMEOUT_S = 60.0

# What a server of its own would be given, within this machine's means. Durability as it comes:
# fsync, full_page_writes and synchronous_commit are on unless a session says otherwise.
SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "min_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    "wal_buffers": "64MB",
    "autovacuum_naptime": "10s",
}


@contextmanager
def own_postgres() -> Iterator[str]:
    """The URL of an empty database, gone with its server at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="headworks-bench-", ignore_cleanup_errors=True) as at:
        server = EmbeddedPostgres(directory=Path(at), port=free_port(), options=SETTINGS)
        server.prepare()
        spec = server.spec()
        with (Path(at) / "log").open("wb") as log:
            child = subprocess.Popen(  # noqa: S603 - our own binaries and arguments
                spec.argv,
                cwd=spec.cwd,
                env=dict(spec.env),
                user=spec.user,
                group=spec.group,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            _await(server.maintenance_url, child)
            server.create_database()
            yield server.url
        finally:
            child.send_signal(spec.stop_signal)
            child.wait(START_TIMEOUT_S)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(url: str, child: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
