"""One connection through a fault proxy: how its bytes pass, and what happens at which of them.

Invariant: nothing is reordered or altered, and bytes that were swallowed are never followed by
later ones: healing resets such a link.
"""

import asyncio
import enum
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import msgspec

READ_BYTES = 65_536
PENDING_MAX = 16  # reads held by a stalled or slow direction; then its sender must wait
PIECES_PER_S = 50  # a bandwidth limit is kept in pieces of this fraction of a second


class Way(enum.Enum):
    """A direction."""

    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """How bytes pass in one direction."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # on top of the latency, uniform within this either way
    bytes_per_s: float | None = None
    stalled: bool = False  # nothing passes, nothing is lost: what a partition does to TCP
    swallowed: bool = False  # taken, and dropped
    close_delay_s: float = 0.0  # the end of the stream passes so much later


CLEAR = Passage()


class Wire:
    """One end's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        # `drain` then waits until the kernel has everything: what passed has really passed.
        writer.transport.set_write_buffer_limits(high=0)

    @classmethod
    async def over(cls, connection: socket.socket) -> "Wire":
        """A connection that is there."""
        try:
            return cls(*await asyncio.open_connection(sock=connection, limit=READ_BYTES))
        except BaseException:
            connection.close()
            raise

    @classmethod
    async def to(cls, host: str, port: int) -> "Wire":
        """A new connection. Raises OSError."""
        return cls(*await asyncio.open_connection(host, port, limit=READ_BYTES))

    def reset(self) -> None:
        """Close with RST."""
        with suppress(OSError):
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def closed(self) -> None:
        """Wait until the transport is gone."""
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A place in one direction of a link, looked for from now on. None given: at the next byte."""

    after_bytes: int = 0
    after: bytes = b""  # a pattern, the whole of which passes
    before: bytes = b""  # one whose end does not

    @property
    def pattern(self) -> bytes:
        """To be found, if any."""
        return self.after or self.before


class Trap:
    """Springs once: on the first link where its moment has come."""

    def __init__(self, moment: Moment, do: Callable[["Link"], object]) -> None:
        self.sprung = asyncio.Event()
        self._moment = moment
        self._do = do
        self._seen: dict[Link, int] = {}
        self._tails: dict[Link, bytes] = {}  # a pattern may come in pieces

    def where(self, link: "Link", data: bytes) -> int | None:
        """How much of `data`, the link's next bytes, passes before it springs."""
        moment = self._moment
        if not moment.pattern:
            at = moment.after_bytes - self._seen.get(link, 0)
            return at if at <= len(data) else None
        tail = self._tails.get(link, b"")
        at = (tail + data).find(moment.pattern)
        if at < 0:
            return None
        return max(0, at + len(moment.after) - len(tail))

    def note(self, link: "Link", data: bytes) -> None:
        """These passed."""
        self._seen[link] = self._seen.get(link, 0) + len(data)
        keep = len(self._moment.pattern) - 1
        if keep > 0:
            self._tails[link] = (self._tails.get(link, b"") + data)[-keep:]

    def spring(self, link: "Link") -> None:
        """Now."""
        self.sprung.set()
        self._do(link)


class Rules(msgspec.Struct, kw_only=True):
    """What holds for one direction: of one link, or of all of them."""

    passage: Passage | None = None
    traps: list[Trap] = msgspec.field(default_factory=list)
    bytes_passed: int = 0


class Link:
    """One client's connection, and ours to the upstream for it. `everyone` holds for all links."""

    def __init__(
        self, client: Wire, server: Wire, everyone: dict[Way, Rules], dice: random.Random
    ) -> None:
        self.ended = False
        self._wires = (client, server)
        self._streams = {
            Way.TO_SERVER: _Stream(self, client, server, everyone[Way.TO_SERVER], dice),
            Way.TO_CLIENT: _Stream(self, server, client, everyone[Way.TO_CLIENT], dice),
        }
        self._pumps: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Until both directions have ended, or the link is."""
        loop = asyncio.get_running_loop()
        for stream in self._streams.values():
            self._pumps += [loop.create_task(stream.receive()), loop.create_task(stream.send())]
        try:
            ends = await asyncio.gather(*self._pumps, return_exceptions=True)
        finally:
            self.close()
            for wire in self._wires:
                await wire.closed()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    def set(self, *, to_server: Passage | None = None, to_client: Passage | None = None) -> None:
        """For this link alone, whatever holds for all; None leaves a direction as it is."""
        for way, passage in ((Way.TO_SERVER, to_server), (Way.TO_CLIENT, to_client)):
            if passage is not None:
                self._streams[way].own.passage = passage
        self.look_again()

    def trap(self, way: Way, moment: Moment, do: Callable[["Link"], object]) -> Trap:
        """As the proxy's, for this link alone."""
        trap = Trap(moment, do)
        self._streams[way].own.traps.append(trap)
        return trap

    def bytes_passed(self, way: Way) -> int:
        """Handed on so far."""
        return self._streams[way].own.bytes_passed

    def look_again(self) -> None:
        """What holds has changed."""
        for stream in self._streams.values():
            stream.changed.set()

    def heal(self) -> None:
        """Its bytes pass unhindered; one that lost some cannot go on."""
        if any(stream.lost_bytes for stream in self._streams.values()):
            self.reset()
        for stream in self._streams.values():
            stream.own.passage = None
            stream.own.traps.clear()
        self.look_again()

    def reset(self) -> None:
        """RST to both ends, now; what waited here is lost."""
        self._end(Wire.reset)

    def close(self) -> None:
        """FIN to both ends, now; what waited here is lost."""
        self._end(lambda wire: wire.writer.close())

    def _end(self, how: Callable[[Wire], object]) -> None:
        if self.ended:
            return
        self.ended = True
        for wire in self._wires:
            how(wire)
        for pump in self._pumps:
            pump.cancel()


def lose_answer(link: Link) -> None:
    """For a trap on a question: the server gets to do it, and is cut off before it can say so."""
    link.trap(Way.TO_CLIENT, Moment(), Link.reset)


class _Stream:
    """One direction of a link."""

    def __init__(
        self, link: Link, source: Wire, target: Wire, everyone: Rules, dice: random.Random
    ) -> None:
        self.own = Rules()
        self.changed = asyncio.Event()
        self.lost_bytes = 0
        self._link = link
        self._source = source
        self._target = target
        self._everyone = everyone
        self._dice = dice
        self._clock_s = asyncio.get_running_loop().time
        # When each read came. b"" is the end of the stream, None a reset.
        self._pending: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(PENDING_MAX)

    @property
    def passage(self) -> Passage:
        return self.own.passage or self._everyone.passage or CLEAR

    async def receive(self) -> None:
        data: bytes | None = b"more"
        while data:
            try:
                data = await self._source.reader.read(READ_BYTES)
            except OSError:
                data = None
            await self._pending.put((self._clock_s(), data))

    async def send(self) -> None:
        try:
            while True:
                came_s, data = await self._pending.get()
                shake = self._dice.uniform(-1.0, 1.0)
                await self._wait(lambda p: came_s + p.latency_s + shake * p.jitter_s)  # noqa: B023 - awaited within the same turn
                if not data:
                    break
                await self._pass(data)
            await self._wait(lambda p: came_s + p.latency_s + p.close_delay_s)
        except OSError:
            data = None
        if data is None:
            self._link.reset()
        else:
            with suppress(OSError):
                self._target.writer.write_eof()

    async def _wait(self, due_s: Callable[[Passage], float]) -> None:
        """Until it is due by what holds then, and nothing is stalled."""
        while True:
            self.changed.clear()
            left_s = due_s(self.passage) - self._clock_s()
            if left_s <= 0 and not self.passage.stalled:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self.passage.stalled else left_s):
                    await self.changed.wait()

    async def _pass(self, data: bytes) -> None:
        while data:
            traps = [*self.own.traps, *self._everyone.traps]
            found = [
                (at, trap) for trap in traps if (at := trap.where(self._link, data)) is not None
            ]
            at, sprung = min(found, key=lambda pair: pair[0], default=(len(data), None))
            now, data = data[:at], data[at:]
            for trap in traps:
                trap.note(self._link, now)
            await self._write(now)
            if sprung is not None:
                self._disarm(sprung)
                sprung.spring(self._link)
                if self._link.ended:
                    return
                await self._wait(lambda _: 0.0)  # it may have stalled this very direction

    def _disarm(self, trap: Trap) -> None:
        for rules in (self.own, self._everyone):
            if trap in rules.traps:
                rules.traps.remove(trap)

    async def _write(self, data: bytes) -> None:
        while data:
            rate = self.passage.bytes_per_s
            size = len(data) if rate is None else max(1, int(rate / PIECES_PER_S))
            piece, data = data[:size], data[size:]
            if rate is not None:
                sent_s = self._clock_s() + len(piece) / rate
                await self._wait(lambda _: sent_s)  # noqa: B023 - awaited within the same turn
            if self.passage.swallowed:
                self.lost_bytes += len(piece)
                continue
            self._target.writer.write(piece)
            await self._target.writer.drain()
            self.own.bytes_passed += len(piece)
            self._everyone.bytes_passed += len(piece)
