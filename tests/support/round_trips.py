"""How often a client of ours waits for a server: turns of the talk on a connection, counted.

    client ── question ──► counter ──► server
           ◄── answer ───         ◄──

A round trip is what the client says after the server has spoken, in however many pieces. It is
counted between the two, so that no driver's own account of itself is believed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

HOST = "127.0.0.1"
PIECE_BYTES = 65_536


class RoundTrips:
    """`count` is of all connections, since it was last set to nothing."""

    def __init__(self) -> None:
        self.count = 0

    async def serve(
        self, near: tuple[asyncio.StreamReader, asyncio.StreamWriter], host: str, port: int
    ) -> None:
        far = await asyncio.open_connection(host, port)
        heard = [True]

        async def pass_on(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool
        ) -> None:
            with suppress(ConnectionError):
                while piece := await reader.read(PIECE_BYTES):
                    self.count += asks and heard[0]
                    heard[0] = not asks
                    writer.write(piece)
                    await writer.drain()
            writer.close()

        try:
            await asyncio.gather(
                pass_on(near[0], far[1], asks=True), pass_on(far[0], near[1], asks=False)
            )
        finally:
            for _, writer in (near, far):
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()


@asynccontextmanager
async def counting(url: str) -> AsyncIterator[tuple[RoundTrips, str]]:
    """The counter, and the URL that leads through it."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    host, port = parts.hostname, parts.port
    trips = RoundTrips()
    links: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.add(asyncio.create_task(trips.serve((reader, writer), host, port)))

    server = await asyncio.start_server(accept, HOST, 0)
    mine = f"{HOST}:{server.sockets[0].getsockname()[1]}"
    user, _, _ = parts.netloc.rpartition("@")
    netloc = f"{user}@{mine}" if user else mine
    try:
        yield trips, urlunsplit(parts._replace(netloc=netloc))
    finally:
        server.close()
        async with asyncio.timeout(20):  # each ends with its client's connection
            await asyncio.gather(*links)
