"""A control plane over a socket that takes everything a worker says, and remembers it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from core.fleet import Beat, BeatReply, Journal, JournalReply, Register, Registered

WAIT_S = 20
TAKEN = {
    "/fleet/register": (Register, Registered(beat_interval_ms=50, journal_acked=0)),
    "/fleet/beat": (Beat, BeatReply(known=True)),
    "/fleet/journal": (Journal, JournalReply(acked=0)),
}


class FleetListener:
    """`said` is in the order of arrival."""

    def __init__(self):
        self.said = []
        self.url = ""

    def of(self, kind):
        return [message for message in self.said if isinstance(message, kind)]

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - bounded
                await asyncio.sleep(0.02)

    async def handle(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ")[1].decode()
                fields = (line.partition(b":") for line in head.lower().split(b"\r\n"))
                [length] = [int(value) for name, _, value in fields if name == b"content-length"]
                kind, reply = TAKEN[path]
                self.said.append(msgspec.json.decode(await reader.readexactly(length), type=kind))
                body = msgspec.json.encode(reply)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def a_fleet_listener() -> AsyncIterator[FleetListener]:
    listener = FleetListener()
    server = await asyncio.start_server(listener.handle, "127.0.0.1", 0)
    listener.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield listener
    finally:
        server.close()
