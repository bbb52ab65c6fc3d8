"""A connection that asks the same few statements again and again, at the least cost.

    run ─► prepared, once ─► sent ─► socket readable ─► the rows, as bytes

Past psycopg's cursors, on the connection that psycopg made: everything else about it (errors,
`cut`, what a cursor does) is as ever. One caller at a time. Invariant: a caller that leaves
while an answer is on its way costs the connection, for the next would take it for its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from store.postgres import BoundedConnection

_DONE = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


class Statement(NamedTuple):
    """`sql` has $1, $2 and so on for its parameters."""

    name: bytes
    sql: bytes


class LaneConnection(BoundedConnection):
    """`run` beside all that a connection of psycopg's does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = asyncio.get_running_loop()
        self._known: set[bytes] = set()  # statements that the server has
        self._waiter: asyncio.Future[None] | None = None
        self._read_fd = -1  # the socket, while it is watched

    async def run(self, statement: Statement, values: Sequence[bytes | None]) -> PGresult:
        """The rows in binary; values are in text. One transaction.

        Raises psycopg.Error.
        """
        try:
            if statement.name not in self._known:
                self.pgconn.send_prepare(statement.name, statement.sql)
                await self._answer()
                self._known.add(statement.name)
            self.pgconn.send_query_prepared(statement.name, values, result_format=Format.BINARY)
            return await self._answer()
        except asyncio.CancelledError:
            await self.close()
            raise

    async def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Psycopg's own way of waiting, which watches the socket itself."""
        self._unwatch()
        return await super().wait(*args, **kwargs)

    async def close(self) -> None:
        """The socket's number will be another's."""
        self._unwatch()
        await super().close()

    async def _answer(self) -> PGresult:
        try:
            return await self._result()
        finally:
            if self.closed:  # and the socket with it
                self._unwatch()

    async def _result(self) -> PGresult:
        pgconn = self.pgconn
        while pgconn.flush():  # more than the socket takes at once
            await self._wait_until_writable()
        answer = await self._next()
        while await self._next() is not None:
            pass  # there is one answer; but the end of it is to be read as well
        if answer is None or self.closed:
            raise psycopg.OperationalError(pgconn.get_error_message())
        if answer.status not in _DONE:
            raise psycopg.errors.error_from_result(answer)
        return answer

    async def _next(self) -> PGresult | None:
        self._watch()
        while self.pgconn.is_busy():
            await self._wait()
            self.pgconn.consume_input()
        return self.pgconn.get_result()

    # The socket is watched from one statement to the next: to begin and to end that costs two
    # system calls. Who wants to hear of it waits; nobody does while nothing is asked.

    def _watch(self) -> None:
        if self._read_fd < 0:
            self._read_fd = self.pgconn.socket
            self._loop.add_reader(self._read_fd, self._readable)

    def _unwatch(self) -> None:
        if self._read_fd >= 0:
            self._loop.remove_reader(self._read_fd)
            self._read_fd = -1

    def _readable(self) -> None:
        if self._waiter is None:
            self._unwatch()  # said unasked, hardly ever but goodbye: the next statement hears it
        else:
            self._wake()

    async def _wait_until_writable(self) -> None:
        """Or until the server speaks: it may want to be heard before it goes on reading."""
        fd = self.pgconn.socket
        self._watch()
        self._loop.add_writer(fd, self._wake)
        try:
            await self._wait()
        finally:
            self._loop.remove_writer(fd)
        self.pgconn.consume_input()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def text_array(texts: Sequence[str]) -> bytes:
    """A value for a `text[]`."""
    quoted = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return "".join(("{", ",".join(f'"{text}"' for text in quoted), "}")).encode()


def read_text(value: bytes | None) -> str | None:
    """A `text` of a row."""
    return None if value is None else value.decode()


def read_int(value: bytes | None) -> int | None:
    """An integer of a row, of any width."""
    return None if value is None else int.from_bytes(value, "big", signed=True)


Read = Callable[[bytes | None], Any]


def rows(result: PGresult, columns: Sequence[Read]) -> list[list[Any]]:
    """All of them, each column read by its function."""
    get = result.get_value
    numbered = tuple(enumerate(columns))
    return [[read(get(row, at)) for at, read in numbered] for row in range(result.ntuples)]
