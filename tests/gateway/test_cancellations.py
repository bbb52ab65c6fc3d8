"""A client that leaves, at each stage of a request: no slot, no hold, no engine work is left.

Complaints about peers: a disconnect leaks the reservation (litellm #27639, #36926, #40050), the
upstream goes on for minutes and whole answers are never cancelled (litellm #13774, #37140,
bifrost #3164), tokens are free or unknown (litellm #14457, higress #4145), or the whole answer
is billed though it was never sent (sub2api #4408).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from core.money import EndCause
from tests.support.gateway_requests import CHAT, a_body, post
from tests.support.gateway_world import POOL, Caller, World, a_capacity, until
from tests.support.scripted_worker import answers, hangs

pytestmark = [pytest.mark.anyio, pytest.mark.services]


class Client:
    """On a raw socket, so that it can leave in the middle of anything."""

    def __init__(self, world: World, caller: Caller, **fields: Any) -> None:
        self._world = world
        self._body = json.dumps(a_body(CHAT, **fields)).encode()
        self._head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
            + caller.key.encode()
            + b"\r\ncontent-length: %d\r\n\r\n" % len(self._body)
        )
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, *, body_bytes: int | None = None) -> None:
        parts = urlsplit(self._world.url)
        _, self._writer = await asyncio.open_connection(parts.hostname, parts.port)
        self._writer.write(self._head + self._body[:body_bytes])
        await self._writer.drain()

    def leave(self) -> None:
        assert self._writer is not None
        self._writer.close()


async def nothing_is_left(world: World, caller: Caller, *, rows: int) -> None:
    await until(lambda: len(world.gateway.relay) == 0)
    await world.dispatcher_is_empty()
    for row in await world.settled(caller, rows):
        assert row.cause in {EndCause.CLIENT_CANCELLED, EndCause.NOT_STARTED}
        assert row.billed_micro == 0
    assert await world.balance(caller) == (0, 0)
    assert world.worker.runs == {}


async def test_while_it_sends_its_body(world: World, caller: Caller) -> None:
    client = Client(world, caller)
    await client.send(body_bytes=20)
    await asyncio.sleep(0.1)
    client.leave()
    await nothing_is_left(world, caller, rows=0)


@asynccontextmanager
async def a_slow_tokenizer(world: World) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Rendering waits until it is let go."""
    prompts, reached, go = world.gateway.prompts, asyncio.Event(), asyncio.Event()
    fast = prompts.prompt

    async def slow(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        await go.wait()
        return await fast(*args, **kwargs)

    async def is_reached() -> None:
        await reached.wait()

    prompts.prompt = slow
    try:
        yield is_reached
    finally:
        go.set()
        del prompts.prompt


async def test_while_its_prompt_is_rendered(world: World, caller: Caller) -> None:
    client = Client(world, caller)
    async with a_slow_tokenizer(world) as reached:
        await client.send()
        await reached()
        client.leave()
        await until(lambda: len(world.gateway.relay) == 0)
    await nothing_is_left(world, caller, rows=0)


@pytest.mark.parametrize("stream", ["", "streamed"])
async def test_while_its_money_is_reserved(world: World, caller: Caller, stream: str) -> None:
    """Somebody has the account locked; it is reserved after the client has left."""
    client = Client(world, caller, stream=bool(stream))
    async with world.postgres.transaction() as conn:
        await conn.execute(
            "SELECT FROM accounts WHERE tenant_id = %s FOR NO KEY UPDATE", (caller.tenant_id,)
        )
        await client.send()
        await until(lambda: len(world.gateway.relay) == 1)
        await asyncio.sleep(0.2)
        client.leave()
        await asyncio.sleep(0.2)
    await nothing_is_left(world, caller, rows=1)
    assert world.worker.requests == []


async def test_while_its_limits_are_asked(world: World, caller: Caller) -> None:
    """Valkey answers late: after the client has left."""
    dispatch = world.gateway._dispatch
    reached, go = asyncio.Event(), asyncio.Event()
    fast = dispatch.admit

    async def slow(asked: Any) -> Any:
        reached.set()
        await go.wait()
        return await fast(asked)

    dispatch.admit = slow
    client = Client(world, caller)
    await client.send()
    await reached.wait()
    client.leave()
    await until(lambda: len(world.gateway.relay) == 0)
    go.set()
    del dispatch.admit
    await nothing_is_left(world, caller, rows=1)


@pytest.mark.parametrize("stream", ["", "streamed"])
async def test_in_a_pause_between_tries(world: World, caller: Caller, stream: str) -> None:
    """The only replica cannot be reached, and is tried again and again."""
    await world.worker.kill()
    client = Client(world, caller, stream=bool(stream))
    await client.send()
    await until(lambda: len(world.gateway.relay) == 1)
    await asyncio.sleep(0.4)
    client.leave()
    await nothing_is_left(world, caller, rows=1)
    await world.worker.start()


# bifrost #3164: cancelled before the first byte, the upstream goes on. dynamo P14507: the next
# request then waits for the whole of an abandoned prefill.
@pytest.mark.parametrize("stream", ["", "streamed"])
async def test_before_the_first_byte(world: World, caller: Caller, stream: str) -> None:
    await world.register(world.worker, capacity=a_capacity(sequences=1))
    await until(lambda: world.gateway.routes.replicas(POOL)[0].sequences == 1)
    world.worker.default = answers(300, delay_s=20)
    client = Client(world, caller, stream=bool(stream))
    await client.send()
    await until(lambda: world.worker.requests)
    client.leave()
    await until(lambda: world.worker.aborts, within_s=1.0)
    await nothing_is_left(world, caller, rows=1)
    world.worker.default = answers(3)
    assert (await post(world, await world.add_caller())).status_code == 200


# litellm #27639: five cancelled reservations leave no room for a sixth request.
async def test_a_budget_is_whole_again_after_all_have_left(world: World) -> None:
    caller = await world.add_caller(hard_cap_micro=1_200)
    world.worker.default = hangs()
    clients = [Client(world, caller, max_tokens=50) for _ in range(4)]
    for client in clients:
        await client.send()
    await until(lambda: len(world.worker.requests) == len(clients))
    for client in clients:
        client.leave()
    await until(lambda: len(world.gateway.relay) == 0)
    await world.settled(caller, len(clients))
    assert (await world.balance(caller))[1] == 0
    await world.dispatcher_is_empty()
