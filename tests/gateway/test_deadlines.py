"""Time that runs out: of the whole, of a first token, of the next one; at every stage."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from core.money import EndCause
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.client import ask
from tests.support.gateway_requests import CHAT, MESSAGES, PATHS, a_body, headers_of
from tests.support.gateway_world import MODEL, Caller, World, a_world
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import answers, hangs, refuses

pytestmark = [pytest.mark.anyio, pytest.mark.services]


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(
        postgres_url, valkey_url, tmp_path, ping_ms=100, headers_wait_ms=200
    ) as made:
        yield made


async def told(
    world: World, caller: Caller, path: str, headers: dict[str, str], **fields: Any
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=world.url, timeout=20) as client:
        return await client.post(
            path, json=a_body(path, **fields), headers=headers_of(caller, path) | headers
        )


async def ended(world: World, caller: Caller, *, output: int) -> None:
    """Expired, the engine stopped, what it had produced billed, nothing held."""
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.EXPIRED
    assert row.metered_output_tokens == output
    assert world.worker.aborts == [f"{row.request_id}:1"]
    assert await world.balance(caller) == (row.billed_micro, 0)
    await world.dispatcher_is_empty()


# litellm #38358, #19909: a first-byte timeout that never fires.
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_worker_that_accepts_and_says_nothing_is_a_504(world: World, path: str) -> None:
    caller = await world.add_caller()
    world.worker.default = hangs()
    answer = await told(world, caller, path, {"x-headworks-first-token-ms": "150"})
    assert answer.status_code == 504
    assert "within 150 ms" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    await ended(world, caller, output=0)


# litellm #19184: headers, then silence.
async def test_silence_after_the_headers_is_an_error_event(world: World, caller: Caller) -> None:
    world.worker.default = hangs()
    answer = await told(world, caller, CHAT, {"x-headworks-first-token-ms": "500"}, stream=True)
    assert answer.status_code == 200
    check_openai_chat_stream(answer.content, include_usage=False)
    assert b"within 500 ms" in answer.content
    await ended(world, caller, output=0)


# litellm #38358: an idle stream holds its connection for fifteen minutes.
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_silence_after_a_token_ends_the_stream(world: World, path: str) -> None:
    caller = await world.add_caller()
    world.worker.default = hangs(after=1)
    answer = await told(world, caller, path, {"x-headworks-idle-ms": "300"}, stream=True)
    if path == MESSAGES:
        check_anthropic_stream(answer.content)
    else:
        check_openai_chat_stream(answer.content, include_usage=False)
    assert b"nothing for 300 ms" in answer.content
    await ended(world, caller, output=1)


# litellm #34819, #31865: a load balancer cuts what is silent for long before its first token.
async def test_a_slow_first_token_keeps_the_connection_warm(world: World, caller: Caller) -> None:
    world.worker.default = answers(3, delay_s=1.0)
    answer = await told(world, caller, CHAT, {}, stream=True)
    assert answer.content.count(b": ping") >= 3
    check_openai_chat_stream(answer.content, include_usage=False)
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.COMPLETE


# litellm #38358: a timeout that kills a healthy stream.
async def test_a_stream_that_keeps_coming_outlives_its_idle_bound(
    world: World, caller: Caller
) -> None:
    world.worker.default = answers(30, gap_s=0.05)
    headers = {"x-headworks-idle-ms": "600", "x-headworks-first-token-ms": "600"}
    answer = await told(world, caller, CHAT, headers, stream=True)
    check_openai_chat_stream(answer.content, include_usage=False)
    (row,) = await world.settled(caller, 1)
    assert (row.cause, row.metered_output_tokens) == (EndCause.COMPLETE, 30)


async def test_a_timeout_in_the_body_is_the_deadline(world: World, caller: Caller) -> None:
    world.worker.default = answers(300, gap_s=0.01)
    answer = await told(world, caller, CHAT, {}, timeout=0.4, max_tokens=300)
    assert answer.status_code == 504
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.EXPIRED
    assert 0 < row.metered_output_tokens < 300
    assert world.worker.requests[0].deadline_ms == row.created_ms + 400


async def test_a_bad_timeout_is_refused_by_name(world: World, caller: Caller) -> None:
    for path, value in itertools.product(PATHS, (0, -1, "5", 1e9, True)):
        answer = await told(world, caller, path, {}, timeout=value)
        assert answer.status_code == 400
        assert "timeout" in answer.json()["error"]["message"]
    assert world.worker.requests == []


async def test_the_official_sdk_s_own_timeout_ends_the_engine_too(
    world: World, caller: Caller
) -> None:
    """Not only its connection, which a proxy between may hold open."""
    client = openai.AsyncOpenAI(
        api_key=caller.key, base_url=f"{world.url}/v1", timeout=7.0, max_retries=0
    )
    async with client:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=3
        )
    (row,) = await world.settled(caller, 1)
    assert world.worker.requests[0].deadline_ms == row.created_ms + 7_000


async def test_a_deadline_passes_while_the_body_is_on_its_way(world: World, caller: Caller) -> None:
    body = json.dumps(a_body(CHAT)).encode()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:10]
        await asyncio.sleep(0.6)
        yield body[10:]

    async with httpx.AsyncClient(base_url=world.url, timeout=20) as client:
        headers = headers_of(caller) | {"x-headworks-deadline-ms": "200"}
        answer = await client.post(CHAT, content=slowly(), headers=headers)
    assert answer.status_code == 504
    assert await world.usage(caller) == []


async def test_a_deadline_passes_between_tries_of_a_full_replica(
    world: World, caller: Caller
) -> None:
    world.worker.default = refuses("full")
    answer = await told(world, caller, CHAT, {"x-headworks-first-token-ms": "400"})
    assert answer.status_code == 504
    (row,) = await world.settled(caller, 1)
    assert (row.cause, row.billed_micro) == (EndCause.EXPIRED, 0)
    await world.dispatcher_is_empty()


async def test_a_client_that_takes_nothing_is_not_called_an_idle_model(
    world: World, caller: Caller
) -> None:
    """Its own bound ends it; here it leaves first."""
    world.worker.default = answers(50, gap_s=0.01)
    reply = await ask(world.url, CHAT, caller.key, a_body(CHAT, stream=True), leave_after_s=0.2)
    assert reply.left
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.CLIENT_CANCELLED
