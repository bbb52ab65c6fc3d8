"""Connections to Postgres: a pool, the one place that commits, and every bound on waiting.

`transaction()` is a read-write transaction that commits when its block ends. `connection()`
is for reads: sessions are read-only outside `transaction()`, so a stray write there fails in
the database. Whatever goes wrong in operation, rather than in our code, is StoreAwayError:
away, restarting, out of connections, too slow, deadlocked.
"""

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]

CANCEL_TIMEOUT_S = 1.0  # for the server to hear that nobody waits for its answer any more

# What happens in operation. The timeouts end a session by an error of another family.
OPERATIONAL = (
    psycopg.OperationalError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
)


class StoreAwayError(Exception):
    """Postgres could not be reached, or did not answer within its bound. Try again later."""


class ReadOnlyError(StoreAwayError):
    """The server takes no writes: a standby, or one that has lost its place to another."""


class PostgresConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where Postgres is, and how long anything may wait for it."""

    database_url: str
    application_name: str
    connections_max: int = 8
    connections_min: int = 1
    acquire_timeout_s: float = 5.0  # for a free connection
    connect_timeout_s: int = 3
    statement_timeout_ms: int = 5_000
    lock_timeout_ms: int = 2_000
    transaction_timeout_s: float = 15.0  # a whole `transaction()` or `connection()` block


class BoundedConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Leaves a server that does not answer: its caller may be cancelled and must not wait."""

    async def cancel_safe(self, *, timeout: float = CANCEL_TIMEOUT_S) -> None:  # noqa: ASYNC109 - psycopg's
        """Ask the server to stop; else cut the connection."""
        try:
            await super().cancel_safe(timeout=min(timeout, CANCEL_TIMEOUT_S))
        except psycopg.Error:
            cut(self)
            raise


AnyConnection = TypeVar("AnyConnection", bound=BoundedConnection)


class Postgres:
    """A pool. A connection that the server has closed is noticed when taken, at no round trip."""

    def __init__(self, config: PostgresConfig) -> None:
        self._config = config
        self.pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            conninfo(config, read_only=True),
            connection_class=BoundedConnection,
            kwargs={"autocommit": True},
            min_size=config.connections_min,
            max_size=config.connections_max,
            timeout=config.acquire_timeout_s,
            # The pool doubles its pauses until it gives up; giving up soon keeps them short.
            reconnect_timeout=config.acquire_timeout_s,
            configure=_write_in_transactions,
            open=False,
            name=config.application_name,
        )

    @classmethod
    async def open(cls, config: PostgresConfig) -> "Postgres":
        """Open without waiting for Postgres to be there: the first use waits, bounded."""
        postgres = cls(config)
        await postgres.pool.open()
        return postgres

    async def close(self) -> None:
        """Close every connection. Blocks still open fail with StoreAwayError."""
        await self.pool.close(timeout=self._config.connect_timeout_s)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Read and write; commits at the end of the block, rolls back when it raises.

        Raises:
            StoreAwayError: Whether the transaction committed is then unknown.
        """
        async with self.connection() as conn:
            try:
                await _require_primary(conn)
                async with conn.transaction():
                    yield conn
            except (ReadOnlyError, psycopg.errors.ReadOnlySqlTransaction) as error:
                await conn.close()  # the next one may lead to the server that took over
                raise ReadOnlyError(str(error)) from error

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Read only; each statement sees the database as it is when it starts.

        Raises:
            StoreAwayError: Nothing could be read.
        """
        try:
            async with self._taken() as conn:
                yield conn
        except OPERATIONAL as error:
            raise StoreAwayError(str(error)) from error

    @asynccontextmanager
    async def _taken(self) -> AsyncIterator[Connection]:
        # After a restart every idle connection is dead. The pool's own check pauses a second
        # between two of them.
        conn = await self.pool.getconn()
        while _is_hung_up(conn):
            await conn.close()
            await self.pool.putconn(conn)
            conn = await self.pool.getconn()
        loop = asyncio.get_running_loop()
        bound = loop.call_later(self._config.transaction_timeout_s, cut, conn)
        try:
            yield conn
        finally:
            bound.cancel()
            await self.pool.putconn(conn)


async def connect(config: PostgresConfig, *, options: dict[str, str] | None = None) -> Connection:
    """A read-write connection of its own, each statement one transaction; `options` are settings.

    Raises:
        StoreAwayError: There was none within `connect_timeout_s`.
    """
    return await connect_as(BoundedConnection, config, options=options)


async def connect_as(
    kind: type[AnyConnection], config: PostgresConfig, *, options: dict[str, str] | None = None
) -> AnyConnection:
    """The same, as a connection of this kind.

    Raises:
        StoreAwayError: There was none within `connect_timeout_s`.
    """
    try:
        async with asyncio.timeout(config.connect_timeout_s):
            return await kind.connect(
                # A standby is as good as nobody.
                make_conninfo(
                    conninfo(config, read_only=False, options=options or {}),
                    target_session_attrs="primary",
                ),
                autocommit=True,
            )
    except (TimeoutError, *OPERATIONAL) as error:
        raise StoreAwayError(str(error)) from error


def conninfo(
    config: PostgresConfig, *, read_only: bool, options: dict[str, str] | None = None
) -> str:
    """The connection string, with every bound set on the session itself."""
    settings = {
        "statement_timeout": str(config.statement_timeout_ms),
        "lock_timeout": str(config.lock_timeout_ms),
        "idle_in_transaction_session_timeout": str(int(config.transaction_timeout_s * 1000)),
        # A custom plan costs more than it saves on statements that all go by key.
        "plan_cache_mode": "force_generic_plan",
        "default_transaction_read_only": "on" if read_only else "off",
        # Whatever the database's own are: how a time is written, and read by the driver.
        "datestyle": "ISO",
        "timezone": "UTC",
        **(options or {}),
    }
    given = conninfo_to_dict(config.database_url).get("options") or ""
    ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
    return make_conninfo(
        config.database_url,
        application_name=config.application_name,
        connect_timeout=config.connect_timeout_s,
        options=f"{given} {ours}".strip(),
        # A peer that vanished without a word is noticed within about ten seconds.
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
    )


def cut(conn: Connection) -> None:
    """Fail whatever waits on the connection, now.

    Cancelling it would first ask the server, and wait for an answer: in vain when it is frozen
    or out of reach.
    """
    if not conn.closed:
        with socket.socket(fileno=os.dup(conn.fileno())) as wire, suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)  # the peer may have done so first


async def _require_primary(conn: Connection) -> None:
    """Raises ReadOnlyError.

    A standby says so when connected to; that it was promoted, it says with its next answer.
    """
    if _is_standby(conn):
        await conn.execute("SELECT")
        if _is_standby(conn):
            raise ReadOnlyError("this server is a standby")


def _is_standby(conn: Connection) -> bool:
    return conn.info.parameter_status("in_hot_standby") == "on"


def _is_hung_up(conn: Connection) -> bool:
    """Whether the server has said anything to an idle connection: hardly ever but goodbye."""
    if conn.closed:
        return True
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _write_in_transactions(conn: Connection) -> None:
    await conn.set_read_only(False)  # `BEGIN READ WRITE`: overrides the session's default
