"""One connection to Valkey on which all calls of an event-loop tick leave as one write.

A call is on its way before it is awaited, so calls arrive in the order they were made, even
those whose caller gave up. Every call is answered, or fails with RedisAwayError, within the
time-out, which counts only while this process gets to run; there is no queue while the server
is away: calls fail at once, and the connection is sought again with back-off.
"""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis
import msgspec

from store.scripts import Function, Library

Part = bytes | str | int

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 0.5  # within `PoolRules.reannounce_ms`, so that all are back before it ends

# Of a time-out. One that passes late counts once, however late: a process that was held up has
# neither sent nor read meanwhile, and must not take that for the server's silence.
TICKS = 10

# Answers of a server that is up but cannot serve now.
AWAY_CODES = frozenset({"LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY", "OOM", "MISCONF"})
FUNCTION_MISSING = "ERR Function not found"

_NOTHING = object()
_log = logging.getLogger(__name__)


class RedisAwayError(Exception):
    """Valkey cannot be reached, or did not answer in time: the call may or may not have run."""


class RedisReplyError(Exception):
    """Valkey refused a call: a bug in a function, or in how it was called."""


class RedisAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where and as whom to connect. `path` is a Unix socket's."""

    host: str = ""
    port: int = 0
    path: str = ""
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False


def parse_address(url: str) -> RedisAddress:
    """From `redis[s]://[user:password@]host[:port][/db]` or `unix://[…@]/path[?db=n]`.

    `valkey` and `valkey+unix` are taken too. Raises ValueError.
    """
    parts = urlsplit(url)
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme in {"unix", "redis+unix", "valkey+unix"}:
        database = int(parse_qs(parts.query).get("db", ["0"])[0])
        return RedisAddress(
            path=unquote(parts.path), username=username, password=password, database=database
        )
    if parts.scheme not in {"redis", "rediss", "valkey", "valkeys"}:
        raise ValueError(f"not a Redis URL: {parts.scheme}://…")
    return RedisAddress(
        host=parts.hostname or "127.0.0.1",
        port=parts.port or 6379,
        username=username,
        password=password,
        database=int(parts.path.strip("/") or 0),
        tls=parts.scheme in {"rediss", "valkeys"},
    )


class RedisClient:
    """Calls, functions and wake-up messages over one connection that comes back by itself.

    `on_lost` runs when a connection ends, before any of its callers hears; `on_message` gets
    each message of the channels that `channels` names at the moment of connecting.
    """

    def __init__(
        self,
        url: str,
        *,
        libraries: Iterable[Library] = (),
        timeout_ms: int = 1_000,
        in_flight_max: int = 16_384,
        channels: Callable[[], tuple[bytes, ...]] = tuple,
        on_message: Callable[[bytes], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = parse_address(url)
        self._libraries = tuple(libraries)
        self._timeout_s = timeout_ms / 1000
        self._in_flight_max = in_flight_max
        self._channels = channels
        self._on_message = on_message
        self._on_lost = on_lost
        self._wire: _Wire | None = None
        self._last_wire: _Wire | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.connected = asyncio.Event()

    def start(self) -> None:
        """Begin to connect, and to reconnect for as long as it takes."""
        self._keeper = asyncio.create_task(self._keep_connected())

    async def close(self) -> None:
        """Drop the connection; calls under way fail."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self.drop("closed")
        if self._last_wire is not None:
            self._last_wire.abort("closed")
            await self._last_wire.closed

    def drop(self, reason: str) -> None:
        """End the connection because it is of no use; another is sought as ever."""
        if self._wire is not None:
            self._wire.abort(reason)

    def call(self, *parts: Part) -> "asyncio.Future[object]":
        """Send one command with this tick's write. Raises RedisAwayError, now or on await."""
        return self._sound_wire().send(parts)

    def run(
        self, function: Function, keys: tuple[bytes, ...], *args: Part
    ) -> "asyncio.Future[object]":
        """Call a function, like `call`; one the server has forgotten is loaded and called again."""
        parts = (b"FCALL", function.name, len(keys), *keys, *args)
        return self._sound_wire().send(parts, function.library)

    def _sound_wire(self) -> "_Wire":
        if self._wire is None:
            raise RedisAwayError("not connected")
        return self._wire

    async def _keep_connected(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while True:
            try:
                wire = await self._connect()
            except (OSError, RedisAwayError, RedisReplyError) as error:
                level = logging.WARNING if backoff_s == BACKOFF_FIRST_S else logging.DEBUG
                _log.log(level, "valkey is away", extra={"facts": {"error": str(error)}})
                await asyncio.sleep(backoff_s)
                backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
                continue
            backoff_s = BACKOFF_FIRST_S
            if not wire.lost.done():
                self._wire = wire
                self.connected.set()
                await asyncio.shield(wire.lost)
            await asyncio.sleep(BACKOFF_FIRST_S)

    async def _connect(self) -> "_Wire":
        """A connection that has said who it is, has the functions loaded, and listens."""
        loop = asyncio.get_running_loop()
        address = self._address

        def wire() -> _Wire:
            return _Wire(
                loop, self._timeout_s, self._in_flight_max, self._on_message, self._handle_lost
            )

        async with asyncio.timeout(self._timeout_s):
            if address.path:
                _, made = await loop.create_unix_connection(wire, address.path)
            else:
                context = ssl.create_default_context() if address.tls else None
                _, made = await loop.create_connection(
                    wire, address.host, address.port, ssl=context
                )
        self._last_wire = made
        try:
            await asyncio.gather(*(made.send(parts) for parts in self._greeting()))
            made.listen(self._channels())
        except BaseException:
            made.abort("greeting failed")
            raise
        return made

    def _greeting(self) -> list[tuple[Part, ...]]:
        address = self._address
        hello: tuple[Part, ...] = (b"HELLO", 3)
        if address.password:
            hello += (b"AUTH", address.username or b"default", address.password)
        greeting: list[tuple[Part, ...]] = [hello]
        if address.database:
            greeting.append((b"SELECT", address.database))
        return greeting + [_load(library) for library in self._libraries]

    def _handle_lost(self, wire: "_Wire") -> None:
        if wire is self._wire:
            self._wire = None
            self.connected.clear()
            self._on_lost()


class _Wire(asyncio.Protocol):
    """One connection: what is asked on it, in order, and what it answers, in the same order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        in_flight_max: int,
        on_message: Callable[[bytes], None],
        on_lost: Callable[["_Wire"], None],
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._ticks = 0
        self._in_flight_max = in_flight_max
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._waiting: deque[_Call] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._reason = "the connection was closed by the server"
        self.lost: asyncio.Future[None] = loop.create_future()  # of no use any more
        self.closed: asyncio.Future[None] = loop.create_future()  # the socket is gone

    def send(
        self, parts: tuple[Part, ...], library: Library | None = None
    ) -> "asyncio.Future[object]":
        """Queue a command for this tick's write; `library` is what it may find missing."""
        if self._transport is None or self.lost.done():
            raise RedisAwayError(self._reason)
        if len(self._waiting) >= self._in_flight_max:
            raise RedisAwayError(f"{self._in_flight_max} calls are unanswered")
        answer: asyncio.Future[object] = self._loop.create_future()
        self._queue(_Call(answer, self._due(), parts, library))
        return answer

    def listen(self, channels: tuple[bytes, ...]) -> None:
        """Subscribe. The acknowledgement is a message, not an answer."""
        if channels and self._transport is not None:
            self._transport.write(_pack((b"SUBSCRIBE", *channels)))

    def abort(self, reason: str) -> None:
        """End at once, whatever is under way."""
        if self._transport is not None and not self.lost.done():
            self._reason = reason
            self._transport.abort()
            self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop: answers in the order of the calls, and messages in between."""
        self._reader.feed(data)
        while not self.lost.done() and (reply := self._reader.gets()) is not _NOTHING:
            if isinstance(reply, hiredis.PushNotification):
                if reply[0] == b"message":
                    self._on_message(reply[2])
                continue
            call = self._waiting.popleft()
            if isinstance(reply, hiredis.ReplyError):
                self._refuse(call, str(reply))
            elif not call.answer.done():
                call.answer.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if exc is not None:
            self._reason = str(exc)
        self._end()
        self.closed.set_result(None)

    def _due(self) -> int:
        """A whole time-out from now: where a tick has begun, after it."""
        return self._ticks + TICKS + (self._watch is not None)

    def _queue(self, call: "_Call") -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(_pack(call.parts))
        self._waiting.append(call)
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s / TICKS, self._check)

    def _refuse(self, call: "_Call", message: str) -> None:
        if message == FUNCTION_MISSING and call.library is not None:
            loaded: asyncio.Future[object] = self._loop.create_future()
            self._queue(_Call(loaded, self._due(), _load(call.library), None))
            self._queue(_Call(call.answer, self._due(), call.parts, None))
        elif message.partition(" ")[0] in AWAY_CODES:
            _fail(call.answer, RedisAwayError(message))
            self.abort(message)
        else:
            _fail(call.answer, RedisReplyError(message))

    def _flush(self) -> None:
        if self._transport is not None and not self.lost.done():
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def _check(self) -> None:
        """One timer for all calls: the oldest is due first."""
        self._watch = None
        self._ticks += 1
        if not self._waiting:
            return
        if self._waiting[0].due <= self._ticks:
            self.abort(f"no answer for {self._timeout_s:g} s")
        else:
            self._watch = self._loop.call_later(self._timeout_s / TICKS, self._check)

    def _end(self) -> None:
        if self.lost.done():
            return
        self.lost.set_result(None)
        if self._watch is not None:
            self._watch.cancel()
        self._on_lost(self)
        while self._waiting:
            _fail(self._waiting.popleft().answer, RedisAwayError(self._reason))


class _Call(NamedTuple):
    """One command under way."""

    answer: "asyncio.Future[object]"
    due: int  # at which tick of the wire's
    parts: tuple[Part, ...]
    library: Library | None


def _load(library: Library) -> tuple[Part, ...]:
    return (b"FUNCTION", b"LOAD", b"REPLACE", library.text)


def _pack(parts: tuple[Part, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(cast("Any", parts))
    return packed


def _fail(answer: "asyncio.Future[object]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        # A caller that gave up will not look, and that is no mistake to warn of.
        answer.exception()
