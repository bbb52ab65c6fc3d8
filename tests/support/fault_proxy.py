"""A TCP proxy that misbehaves on demand, between any client of ours and a real server.

    client ── TO_SERVER ──► proxy ──► upstream
           ◄── TO_CLIENT ──       ◄──

    async with FaultProxy("127.0.0.1", port) as proxy:
        connect(proxy.via(url))
        proxy.set(to_client=Passage(latency_s=0.2))                # all links, until `heal`
        proxy.links[0].set(to_server=Passage(stalled=True))        # one of them
        proxy.trap(Way.TO_SERVER, Moment(after=b"COMMIT"), lose_answer)  # once, at that byte
        proxy.refuse()                                             # new links, until `heal`

Tests without an event loop use `FaultProxyThread`.
"""

import asyncio
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self, TypeVar
from urllib.parse import urlsplit

from tests.support.fault_link import Link, Moment, Passage, Rules, Trap, Way, Wire, lose_answer

__all__ = [
    "FaultProxy",
    "FaultProxyThread",
    "Link",
    "Moment",
    "Passage",
    "Trap",
    "Way",
    "lose_answer",
]

Result = TypeVar("Result")

HOST = "127.0.0.1"
BACKLOG = 512
THREAD_TIMEOUT_S = 30.0


class FaultProxy:
    """Listens on a port of this machine. `upstream` may be changed, for links to come."""

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self.upstream = (host, port)
        self.links: list[Link] = []  # those open, oldest first
        self.accepted = 0
        self._everyone = {way: Rules() for way in Way}
        self._dice = random.Random(seed)
        self._serving: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._holder: socket.socket | None = None

    async def __aenter__(self) -> Self:
        # Bound and not listening: it keeps the port while connections are refused.
        self._holder = _bound(0)
        self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        for task in self._serving:
            task.cancel()
        ends = await asyncio.gather(*self._serving, return_exceptions=True)
        if self._accepting is not None:
            await asyncio.gather(self._accepting, return_exceptions=True)
        assert self._holder is not None
        self._holder.close()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    @property
    def port(self) -> int:
        """Where clients connect to, on 127.0.0.1."""
        assert self._holder is not None
        return int(self._holder.getsockname()[1])

    def via(self, url: str) -> str:
        """The same URL, through here."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}{HOST}:{self.port}").geturl()

    def bytes_passed(self, way: Way) -> int:
        """Handed on by all links there ever were."""
        return self._everyone[way].bytes_passed

    # Faults.

    def set(self, *, to_server: Passage | None = None, to_client: Passage | None = None) -> None:
        """All links but those with a passage of their own; None leaves a direction as it is."""
        for way, passage in ((Way.TO_SERVER, to_server), (Way.TO_CLIENT, to_client)):
            if passage is not None:
                self._everyone[way].passage = passage
        for link in self.links:
            link.look_again()

    def black_hole(self) -> None:
        """Both sides are out of each other's reach, and nobody tells them."""
        self.set(to_server=Passage(stalled=True), to_client=Passage(stalled=True))

    def trap(self, way: Way, moment: Moment, do: Callable[[Link], object]) -> Trap:
        """Once, on the first link to get there: `do`."""
        trap = Trap(moment, do)
        self._everyone[way].traps.append(trap)
        return trap

    def reset(self) -> None:
        """RST on every link."""
        for link in list(self.links):
            link.reset()

    def close_links(self) -> None:
        """FIN on every link."""
        for link in list(self.links):
            link.close()

    def refuse(self) -> None:
        """New connections get ECONNREFUSED; the links there are stay."""
        if self._listening is not None:
            self._listening.shutdown(socket.SHUT_RDWR)  # heard at once; closing is not
            self._listening = None

    def heal(self) -> None:
        """No fault holds any more, and no trap is set."""
        for rules in self._everyone.values():
            rules.passage = None
            rules.traps.clear()
        for link in list(self.links):
            link.heal()
        self.listen()

    def listen(self) -> None:
        """Take new connections."""
        if self._listening is None:
            self._listening = _bound(self.port)
            self._listening.listen(BACKLOG)
            self._listening.settimeout(0)
            loop = asyncio.get_running_loop()
            self._accepting = loop.create_task(self._accept(self._listening))

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError:
                    return  # it was shut down
                self.accepted += 1
                task = loop.create_task(self._serve(connection))
                self._serving.add(task)
                task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        # One that failed is kept, so that closing the proxy says so.
        if task.cancelled() or task.exception() is None:
            self._serving.discard(task)

    async def _serve(self, connection: socket.socket) -> None:
        client = await Wire.over(connection)
        try:
            server = await Wire.to(*self.upstream)
        except BaseException as error:
            client.reset()
            if isinstance(error, OSError):
                return
            raise
        link = Link(client, server, self._everyone, self._dice)
        self.links.append(link)
        try:
            await link.run()
        finally:
            self.links.remove(link)


class FaultProxyThread:
    """A fault proxy on a thread of its own."""

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self._proxy = FaultProxy(host, port, seed=seed)
        self._opened: Future[asyncio.AbstractEventLoop] = Future()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="faults")

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop = self._opened.result(THREAD_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(THREAD_TIMEOUT_S)
        assert not self._thread.is_alive()

    def via(self, url: str) -> str:
        """As the proxy's."""
        return self.do(lambda proxy: proxy.via(url))

    def do(self, act: Callable[[FaultProxy], Result]) -> Result:
        """Call it where the proxy lives; returns when it is done."""

        async def acting() -> Result:
            return act(self._proxy)

        return asyncio.run_coroutine_threadsafe(acting(), self._loop).result(THREAD_TIMEOUT_S)

    def wait(self, trap: Trap, within_s: float = THREAD_TIMEOUT_S) -> None:
        """Until it springs. Raises TimeoutError."""

        async def sprung() -> None:
            async with asyncio.timeout(within_s):
                await trap.sprung.wait()

        asyncio.run_coroutine_threadsafe(sprung(), self._loop).result(within_s + THREAD_TIMEOUT_S)

    async def _live(self) -> None:
        async with self._proxy:
            self._opened.set_result(asyncio.get_running_loop())
            await self._over.wait()


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((HOST, port))
    return sock
