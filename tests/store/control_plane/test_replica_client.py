"""Asking a replica: its word, or the reason why there is none, within the bound."""

import asyncio
import time

import pytest

from control_plane.replica_client import ReplicaClient, Unreachable
from tests.support.control_plane import SECRET
from tests.support.load_server import LoadServer
from tests.support.services import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client():
    client = ReplicaClient(secret=SECRET.encode(), timeout_ms=300, at_once=4)
    yield client
    await client.close()


async def test_a_replica_tells_its_load(client):
    async with LoadServer(SECRET) as replica:
        replica.load |= {"kv_blocks_free": 60, "running": 1, "waiting": 2, "journal_unacked": 5}
        load = await client.load(replica.url)
    assert (load.busy, load.kv_blocks_used, load.journal_unacked) == (3, 4, 5)
    assert load.integrity


async def test_no_answer_is_a_reason_in_bounded_time(client):
    async with LoadServer(SECRET) as replica:
        replica.silent = True
        began = time.monotonic()
        answers = await client.loads([replica.url] * 8)
        assert time.monotonic() - began < 5
    assert {answer.reason for answer in answers} == {"no answer within 0.3 s"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": 503}, "answered 503"),
        ({"garbage": b"<html>"}, "not a load report"),
        ({"garbage": b'{"boot_id": 7}'}, "not a load report"),
    ],
)
async def test_another_answer_is_a_reason(client, changes, reason):
    async with LoadServer(SECRET) as replica:
        for name, value in changes.items():
            setattr(replica, name, value)
        answer = await client.load(replica.url)
    assert isinstance(answer, Unreachable)
    assert reason in answer.reason


async def test_a_port_nobody_listens_on_and_an_address_that_is_none(client):
    for url in (f"http://127.0.0.1:{free_port()}", "http://no[t", "nonsense"):
        answer = await client.load(url)
        assert isinstance(answer, Unreachable)
        assert answer.reason


async def test_a_token_of_another_secret_is_not_taken():
    client = ReplicaClient(secret=b"quite another secret", timeout_ms=1000, at_once=1)
    async with LoadServer(SECRET) as replica:
        assert await client.load(replica.url) == Unreachable("answered 401")
    await client.close()


async def test_only_so_many_are_asked_at_once(client):
    async with LoadServer(SECRET) as replica:
        replica.silent = True
        asking = asyncio.create_task(client.loads([replica.url] * 20))
        await asyncio.sleep(0.1)
        assert replica.asked <= 4
        await asking


@pytest.mark.parametrize("word", ["wake", "sleep"])
async def test_a_replica_is_told_and_what_it_says_against_it_is_a_reason(client, word):
    told: list[bytes] = []
    answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"]
    answers.append(b"HTTP/1.1 409 Conflict\r\ncontent-length: 3\r\n\r\nnot")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0])
        writer.write(answers[len(told) - 1])
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        tell = getattr(client, word)
        assert await tell(f"http://127.0.0.1:{port}") == ""
        assert await tell(f"http://127.0.0.1:{port}") == "409: not"
    assert told == [f"POST /{word} HTTP/1.1".encode()] * 2
    assert await tell(f"http://127.0.0.1:{free_port()}")
