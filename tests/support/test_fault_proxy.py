"""Each fault of the proxy, seen from both ends of real connections to a real server."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import pytest

from tests.support.fault_proxy import (
    FaultProxy,
    FaultProxyThread,
    Link,
    Moment,
    Passage,
    Trap,
    Way,
    lose_answer,
)

pytestmark = pytest.mark.anyio

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class EchoServer:
    """Says back what it hears; remembers it, and how each connection ended."""

    def __init__(self) -> None:
        self.heard = b""
        self.ends: list[str] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                self.heard += data
                writer.write(data)
                await writer.drain()
            self.ends.append("fin")
        except ConnectionError:
            self.ends.append("rst")
        finally:
            writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[EchoServer]:
    async with EchoServer() as server:
        yield server


@pytest.fixture
async def proxy(echo: EchoServer) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", echo.port) as proxy:
        yield proxy
    left = [task for task in asyncio.all_tasks() if "fault" in repr(task.get_coro())]
    assert left == []


@asynccontextmanager
async def a_client(proxy: FaultProxy) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def said(client: Client, data: bytes = b"hello") -> bytes:
    """What comes back, in full."""
    reader, writer = client
    writer.write(data)
    return await reader.readexactly(len(data))


async def time_of(client: Client, data: bytes = b"hello") -> float:
    began = asyncio.get_running_loop().time()
    assert await said(client, data) == data
    return asyncio.get_running_loop().time() - began


async def nothing_comes(client: Client, within_s: float = 0.1) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(within_s):
            await client[0].read(1)


async def end_of(client: Client) -> str:
    try:
        rest = await client[0].read()
    except ConnectionResetError:
        return "rst"
    assert rest == b""
    return "fin"


async def until(condition) -> None:
    async with asyncio.timeout(3):
        while not condition():  # noqa: ASYNC110 - the other end has no event
            await asyncio.sleep(0.001)


async def test_without_a_fault_everything_passes_and_is_counted(proxy, echo):
    data = bytes(range(256)) * 20_000
    async with a_client(proxy) as one, a_client(proxy) as two:
        assert await asyncio.gather(said(one, data), said(two)) == [data, b"hello"]
        assert proxy.accepted == 2
        assert sorted(link.bytes_passed(Way.TO_SERVER) for link in proxy.links) == [5, len(data)]
    assert proxy.bytes_passed(Way.TO_SERVER) == proxy.bytes_passed(Way.TO_CLIENT) == len(data) + 5


async def test_an_end_passes_as_what_it_was(proxy, echo):
    async with a_client(proxy) as client:
        await said(client)
        client[1].write_eof()
        assert await end_of(client) == "fin"
    async with a_client(proxy) as client:
        await said(client)
        proxy_side = proxy.links[0]
        sock = client[1].get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await until(lambda: len(echo.ends) == 2)
    assert echo.ends == ["fin", "rst"]
    assert proxy_side.ended


async def test_latency_holds_for_its_direction_and_does_not_add_up(proxy):
    async with a_client(proxy) as client:
        await said(client)
        proxy.set(to_client=Passage(latency_s=0.1))
        assert 0.1 <= await time_of(client) < 1
        proxy.set(to_server=Passage(latency_s=0.1))
        assert 0.2 <= await time_of(client) < 1
        proxy.set(to_server=Passage())
        began = asyncio.get_running_loop().time()
        for _ in range(10):  # sent one after another, delayed side by side
            client[1].write(b"x")
            await asyncio.sleep(0.005)
        await client[0].readexactly(10)
        assert asyncio.get_running_loop().time() - began < 0.8


async def test_jitter_spreads_the_latency(proxy):
    async with a_client(proxy) as client:
        await said(client)
        proxy.set(to_server=Passage(latency_s=0.02, jitter_s=0.02))
        times = [await time_of(client) for _ in range(12)]
    assert min(times) < 0.02
    assert 0.02 < max(times) < 1


async def test_a_healed_latency_lets_go_at_once(proxy):
    proxy.set(to_client=Passage(latency_s=30))
    async with a_client(proxy) as client:
        waiting = asyncio.create_task(said(client))
        await until(lambda: proxy.bytes_passed(Way.TO_SERVER) == 5)
        proxy.heal()
        assert await asyncio.wait_for(waiting, 1) == b"hello"


async def test_bandwidth_is_limited_each_way(proxy):
    async with a_client(proxy) as client:
        await said(client)
        proxy.set(to_server=Passage(bytes_per_s=100_000))
        assert 0.19 <= await time_of(client, b"x" * 20_000) < 1


async def test_what_is_stalled_comes_through_later_and_unharmed(proxy, echo):
    async with a_client(proxy) as client:
        await said(client)
        proxy.black_hole()
        client[1].write(b"more")
        await nothing_comes(client)
        assert echo.heard == b"hello"
        async with a_client(proxy) as late:  # is let in, and hears nothing
            late[1].write(b"late")
            await nothing_comes(late)
            proxy.heal()
            assert await late[0].readexactly(4) == b"late"
        assert await client[0].readexactly(4) == b"more"


async def test_a_stalled_direction_takes_only_so_much(proxy):
    proxy.set(to_server=Passage(stalled=True))
    async with a_client(proxy) as client:
        writer = client[1]
        writer.write(b"x" * 50_000_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.2)


async def test_what_is_swallowed_is_gone_and_healing_ends_its_link(proxy, echo):
    async with a_client(proxy) as client, a_client(proxy) as other:
        await asyncio.gather(said(client), said(other))
        proxy.set(to_server=Passage(swallowed=True))
        client[1].write(b"gone")
        await nothing_comes(client)
        proxy.heal()
        assert await end_of(client) == "rst"
        assert await said(other) == b"hello"
    assert b"gone" not in echo.heard


@pytest.mark.parametrize("how", ["reset", "close_links"])
async def test_links_are_ended_at_both_ends(proxy, echo, how):
    async with a_client(proxy) as client:
        await said(client)
        getattr(proxy, how)()
        assert await end_of(client) == ("rst" if how == "reset" else "fin")
    await until(lambda: echo.ends)
    assert echo.ends == ["rst" if how == "reset" else "fin"]
    async with a_client(proxy) as client:
        assert await said(client) == b"hello"


@pytest.mark.parametrize("way", Way)
async def test_a_cut_after_n_bytes_lets_exactly_those_pass(proxy, echo, way):
    for n in range(6):
        echo.heard = b""
        trap = proxy.trap(way, Moment(after_bytes=n), Link.close)
        async with a_client(proxy) as client:
            client[1].write(b"hello, world")
            got = await client[0].read()
            await until(lambda: not proxy.links)
        assert trap.sprung.is_set()
        assert len(echo.heard if way is Way.TO_SERVER else got) == n
    async with a_client(proxy) as client:  # a trap springs once
        assert await said(client) == b"hello"


async def test_bytes_are_counted_from_when_the_trap_was_set(proxy):
    async with a_client(proxy) as client:
        await said(client)
        trap = proxy.links[0].trap(Way.TO_CLIENT, Moment(after_bytes=7), Link.reset)
        assert await said(client) == b"hello"
        assert not trap.sprung.is_set()
        client[1].write(b"hello")
        assert await client[0].readexactly(2) == b"he"
        assert await end_of(client) == "rst"


async def test_a_pattern_is_found_across_reads(proxy, echo):
    trap = proxy.trap(Way.TO_SERVER, Moment(after=b"COMMIT"), Link.close)
    async with a_client(proxy) as client:
        for piece in (b"BEGIN; COM", b"M", b"IT; SELECT 1"):
            client[1].write(piece)
            await asyncio.sleep(0.02)
        await asyncio.wait_for(trap.sprung.wait(), 1)
        await until(lambda: not proxy.links)
    assert echo.heard == b"BEGIN; COMMIT"


async def test_a_cut_before_a_pattern_keeps_its_end_back(proxy, echo):
    proxy.trap(Way.TO_CLIENT, Moment(before=b"READY"), Link.close)
    async with a_client(proxy) as client:
        client[1].write(b"done, READY, next")
        assert await client[0].read() == b"done, "
    proxy.trap(Way.TO_CLIENT, Moment(before=b"READY"), Link.close)
    async with a_client(proxy) as client:
        assert await said(client, b"RE") == b"RE"
        client[1].write(b"ADY")
        assert await client[0].read() == b""


async def test_an_answer_is_lost_after_its_question_was_done(proxy, echo):
    trap = proxy.trap(Way.TO_SERVER, Moment(after=b"COMMIT"), lose_answer)
    async with a_client(proxy) as client:
        assert await said(client, b"SELECT") == b"SELECT"
        client[1].write(b"COMMIT")
        assert await end_of(client) == "rst"
        assert trap.sprung.is_set()
    assert echo.heard == b"SELECTCOMMIT"


async def test_a_trap_may_stall_its_own_direction(proxy, echo):
    def stall(link: Link) -> None:
        link.set(to_server=Passage(stalled=True))

    proxy.trap(Way.TO_SERVER, Moment(after_bytes=4), stall)
    async with a_client(proxy) as client:
        client[1].write(b"hello")
        assert await client[0].readexactly(4) == b"hell"
        await nothing_comes(client)
        proxy.heal()
        assert await client[0].readexactly(1) == b"o"


async def test_one_link_may_differ_from_the_others(proxy):
    async with a_client(proxy) as one, a_client(proxy) as two:
        await asyncio.gather(said(one), said(two))
        slow = one[1].get_extra_info("sockname")
        for link in proxy.links:
            if link._wires[0].writer.get_extra_info("peername") == slow:
                link.set(to_client=Passage(latency_s=0.3))
        assert await time_of(two) < 0.3
        assert await time_of(one) >= 0.3


@pytest.mark.parametrize("closer", ["client", "server"])
async def test_a_slow_close_passes_late(proxy, echo, closer):
    async with a_client(proxy) as client:
        await said(client)
        proxy.set(
            **{"to_server" if closer == "client" else "to_client": Passage(close_delay_s=0.15)}
        )
        began = asyncio.get_running_loop().time()
        client[1].write_eof()
        if closer == "client":
            await until(lambda: echo.ends)
        else:
            assert await end_of(client) == "fin"
        assert 0.15 <= asyncio.get_running_loop().time() - began < 1


async def test_refused_connections_are_refused_and_links_stay(proxy):
    port = proxy.port
    async with a_client(proxy) as client:
        await said(client)
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert await said(client) == b"hello"
    proxy.heal()
    assert proxy.port == port
    async with a_client(proxy) as client:
        assert await said(client) == b"hello"


async def test_an_upstream_that_is_not_there_resets_its_clients(proxy, echo):
    proxy.upstream = ("127.0.0.1", 1)
    async with a_client(proxy) as client:
        assert await end_of(client) == "rst"
    proxy.upstream = ("127.0.0.1", echo.port)
    async with a_client(proxy) as client:
        assert await said(client) == b"hello"


async def test_closing_in_the_middle_of_everything_leaves_nothing(echo):
    async with FaultProxy("127.0.0.1", echo.port) as proxy:
        proxy.set(to_client=Passage(latency_s=30), to_server=Passage(bytes_per_s=10))
        async with a_client(proxy) as client, a_client(proxy):
            client[1].write(b"x" * 1_000_000)
            await until(lambda: len(proxy.links) == 2)
            await proxy.__aexit__()
            assert await end_of(client) in ("fin", "rst")
            assert proxy.links == []
            await proxy.__aenter__()


def test_a_url_is_sent_through_with_everything_else_kept():
    async def via(url: str) -> tuple[str, int]:
        async with FaultProxy("127.0.0.1", 1) as proxy:
            return proxy.via(url), proxy.port

    url, port = asyncio.run(via("postgresql://me:p%40ss@db.example:5432/name?sslmode=disable"))
    assert url == f"postgresql://me:p%40ss@127.0.0.1:{port}/name?sslmode=disable"


def test_a_synchronous_test_drives_it_from_a_thread():
    listening = socket.create_server(("127.0.0.1", 0))
    threads = threading.active_count()
    with listening, FaultProxyThread("127.0.0.1", listening.getsockname()[1]) as faults:
        trap: Trap = faults.do(
            lambda proxy: proxy.trap(Way.TO_SERVER, Moment(after=b"now"), Link.reset)
        )
        port = faults.do(lambda proxy: proxy.port)
        with socket.create_connection(("127.0.0.1", port), 5) as client:
            server, _ = listening.accept()
            with server:
                client.sendall(b"not yet")
                assert server.recv(100) == b"not yet"
                client.sendall(b"now")
                faults.wait(trap)
                with pytest.raises(ConnectionResetError):
                    client.recv(100)
        faults.do(FaultProxy.refuse)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
    assert threading.active_count() == threads
