"""Clients that leave, at every stage: one end cause, the engine stopped, everything settled."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from core.money import EndCause
from core.protocol import Tokens
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.client import Reply, ask
from tests.support.gateway_requests import CHAT, MESSAGES, PATHS, a_body
from tests.support.gateway_world import POOL, Caller, World, a_capacity, a_world, until
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.raw_server import reset
from tests.support.scripted_worker import Behaviour, Run, answers, hangs, refuses

pytestmark = [pytest.mark.anyio, pytest.mark.services]


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path, slow_reader_ms=700) as made:
        yield made


async def leaves(world: World, caller: Caller, path: str, *, after_s: float, stream: bool) -> Reply:
    body = a_body(path, stream=stream, max_tokens=300)
    return await ask(
        world.url, path, caller.key, body, leave_after_s=after_s, anthropic=path == MESSAGES
    )


async def test_leaving_mid_answer_stops_the_engine(world: World) -> None:
    world.worker.default = answers(300, gap_s=0.01)
    kinds = [(path, stream) for path in PATHS for stream in (True, False)]
    callers = [await world.add_caller() for _ in kinds]
    replies = await asyncio.gather(
        *(
            leaves(world, caller, path, after_s=0.5, stream=stream)
            for caller, (path, stream) in zip(callers, kinds, strict=True)
        )
    )
    for caller, (path, stream), reply in zip(callers, kinds, replies, strict=True):
        assert reply.left
        (row,) = await world.settled(caller, 1)
        assert row.cause is EndCause.CLIENT_CANCELLED
        assert f"{row.request_id}:1" in world.worker.aborts
        produced = world.worker.journal[row.request_id, 1]
        assert row.metered_output_tokens == produced.output_tokens < 100
        assert row.delivered_tokens <= row.metered_output_tokens
        assert (row.delivered_tokens > 0) == stream
        assert await world.balance(caller) == (row.billed_micro, 0)
        if stream and path == CHAT:
            check_openai_chat_stream(reply.body, include_usage=False, cut=True)
        if stream and path == MESSAGES:
            check_anthropic_stream(reply.body, cut=True)
    await world.dispatcher_is_empty()


async def test_leaving_before_the_engine_starts(world: World, caller: Caller) -> None:
    world.worker.default = answers(5, delay_s=5)
    for reply in await asyncio.gather(
        leaves(world, caller, CHAT, after_s=0.3, stream=True),
        leaves(world, caller, CHAT, after_s=0.3, stream=False),
    ):
        assert (reply.left, reply.status) == (True, 0)
    rows = await world.settled(caller, 2)
    assert {row.cause for row in rows} == {EndCause.CLIENT_CANCELLED}
    assert {(row.metered_output_tokens, row.billed_micro) for row in rows} == {(0, 0)}
    assert set(world.worker.aborts) == {f"{row.request_id}:1" for row in rows}
    await world.dispatcher_is_empty()


async def test_leaving_the_queue(world: World, caller: Caller) -> None:
    await world.register(world.worker, capacity=a_capacity(sequences=1))
    await until(lambda: world.gateway.routes.replicas(POOL)[0].sequences == 1)
    await asyncio.sleep(0.2)  # for the dispatcher to hear of it
    world.worker.default = answers(150, gap_s=0.01)
    first = asyncio.create_task(leaves(world, caller, CHAT, after_s=8, stream=True))
    await until(lambda: world.worker.requests)
    second = await world.add_caller()
    for reply in await asyncio.gather(
        leaves(world, second, CHAT, after_s=0.4, stream=True),
        leaves(world, second, CHAT, after_s=0.4, stream=False),
    ):
        assert reply.left
    assert len(world.worker.requests) == 1
    assert (await first).status == 200
    for row in await world.settled(second, 2):
        assert (row.cause, row.billed_micro) == (EndCause.CLIENT_CANCELLED, 0)
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.COMPLETE
    await world.dispatcher_is_empty()


async def test_leaving_between_refusals(world: World, caller: Caller) -> None:
    world.worker.default = refuses("full")
    assert (await leaves(world, caller, CHAT, after_s=0.5, stream=True)).left
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.CLIENT_CANCELLED
    assert row.billed_micro == 0
    await world.dispatcher_is_empty()


async def test_leaving_after_the_last_byte_is_complete(world: World, caller: Caller) -> None:
    reply = await leaves(world, caller, CHAT, after_s=5, stream=True)
    assert not reply.left
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.COMPLETE
    assert row.delivered_tokens == 5
    assert world.worker.aborts == []


async def test_an_engine_deaf_to_aborts_is_waited_for_a_second_at_most(
    world: World, caller: Caller
) -> None:
    world.worker.default = hangs(after=10)
    began_s = asyncio.get_running_loop().time()
    assert (await leaves(world, caller, CHAT, after_s=0.3, stream=True)).left
    (row,) = await world.settled(caller, 1)
    assert asyncio.get_running_loop().time() - began_s < 4
    assert row.cause is EndCause.CLIENT_CANCELLED
    assert row.metered_output_tokens == 10  # the gateway's own witness
    await world.dispatcher_is_empty()


async def test_a_client_that_does_not_read_is_cut(world: World, caller: Caller) -> None:
    world.worker.default = _floods()
    reader, writer = await _send_raw(world, caller, a_body(CHAT, stream=True))
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.CLIENT_CANCELLED
    assert row.delivered_tokens < row.metered_output_tokens
    assert world.worker.aborts == [f"{row.request_id}:1"]
    await world.dispatcher_is_empty()
    assert not reader.at_eof()
    writer.close()


def _floods() -> Behaviour:
    async def behaviour(run: Run) -> None:
        """Tokens as long as lines, until it is told to stop."""
        await run.start()
        while not run.abort.is_set():
            run.produced += 1
            await run.send(Tokens(choice=0, ids=(7,), text="x" * 100_000))
            await asyncio.sleep(0)
        await run.finish("aborted")

    return behaviour


async def _send_raw(
    world: World, caller: Caller, body: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(world.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
    payload = json.dumps(body).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        + caller.key.encode()
        + b"\r\ncontent-length: %d\r\n\r\n" % len(payload)
        + payload
    )
    await writer.drain()
    return reader, writer


async def test_a_reset_is_a_leaving_too(world: World, caller: Caller) -> None:
    world.worker.default = answers(300, gap_s=0.01)
    _, writer = await _send_raw(world, caller, a_body(CHAT, stream=True, max_tokens=300))
    await until(lambda: world.worker.requests)
    await asyncio.sleep(0.1)
    reset(writer)
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.CLIENT_CANCELLED
    await world.dispatcher_is_empty()


async def test_a_third_of_many_leave_at_random_moments(world: World, caller: Caller) -> None:
    world.worker.default = answers(60, gap_s=0.01)
    leave_after = [None if i % 3 else 0.05 * (i % 15) for i in range(60)]
    replies = await asyncio.gather(
        *(
            leaves(world, caller, PATHS[i % 3], after_s=after or 30, stream=i % 2 == 0)
            for i, after in enumerate(leave_after)
        )
    )
    rows = await world.settled(caller, len(replies))
    by_id = {row.request_id: row for row in rows}
    for (request_id, _), usage in world.worker.journal.items():
        assert by_id[request_id].metered_output_tokens == usage.output_tokens
    assert {row.cause for row in rows} <= {EndCause.COMPLETE, EndCause.CLIENT_CANCELLED}
    assert (await world.balance(caller))[1] == 0
    await world.dispatcher_is_empty()
