"""Postgres behind a fault proxy, a standby to fail over to, and how long an answer took."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import psycopg

from local.postgres import EmbeddedPostgres, _open_path, _run, _unprivileged, binaries
from tests.support.fault_proxy import FaultProxy
from tests.support.services import PostgresServer, Running, free_port

Answer = TypeVar("Answer")

# The server's last message to a query, with no transaction open any more: what it did is done.
READY = b"Z\0\0\0\5I"


@asynccontextmanager
async def a_proxy(url: str) -> AsyncIterator[FaultProxy]:
    """In front of the server of that URL; `proxy.via(url)` goes through it."""
    host, port = address_of(url)
    async with FaultProxy(host, port) as proxy:
        yield proxy


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


async def timed(work: Awaitable[Answer]) -> tuple[Answer | Exception, float]:
    """What it came to, an error too, and after how many seconds."""
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        answer: Answer | Exception = await work
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        answer = error
    return answer, clock() - began


class Standby:
    """A streaming copy of a running server, with its options; read-only until promoted."""

    def __init__(self, primary: PostgresServer, directory: Path) -> None:
        self.embedded = EmbeddedPostgres(
            directory=directory, port=free_port(), options=primary.embedded.options
        )
        _copy(primary, directory)
        self.running = Running(self.embedded.spec(), directory / "log", self._answers)

    def promote(self) -> None:
        """Returns when it takes writes."""
        with psycopg.connect(self.embedded.maintenance_url, autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.embedded.maintenance_url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


def _copy(primary: PostgresServer, directory: Path) -> None:
    user = _unprivileged()
    data = directory / "data"
    data.mkdir(parents=True, mode=0o700)
    if user is not None:
        _open_path(directory)
        shutil.chown(data, user.pw_uid, user.pw_gid)
    password = primary.embedded.directory / "password"
    shutil.copy(password, directory / "password")
    done = _run(
        [
            *(str(binaries() / "pg_basebackup"), "-h", "127.0.0.1"),
            *("-p", str(primary.embedded.port), "-U", "headworks", "-D", str(data)),
            *("--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"),
        ],
        env={"PGPASSWORD": password.read_text().strip(), "LC_ALL": "C.UTF-8"},
        cwd="/",
        user=user.pw_uid if user else None,
        group=user.pw_gid if user else None,
    )
    assert done.returncode == 0, done.stderr
