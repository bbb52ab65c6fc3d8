"""Workers that refuse, fail, die or fall silent: another attempt, or an error that says so."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import redis

from core.fleet import ReplicaState
from core.money import EndCause
from store.keys import POOL_PARTS, pool_keys
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.gateway_requests import CHAT, MESSAGES, PATHS, error_of, post, text_of
from tests.support.gateway_world import POOL, Caller, World, a_capacity, a_world, until
from tests.support.openai_grammar import (
    check_openai_chat_stream,
    check_openai_completion_stream,
)
from tests.support.scripted_worker import (
    answers,
    dies,
    fails,
    hangs,
    refuses,
    whole_text,
)

pytestmark = [pytest.mark.anyio, pytest.mark.services]


# What is waited for here comes, however slow the machine.
PATIENT = {
    "worker_idle_ms": 60_000,
    "worker_first_frame_ms": 60_000,
    "unsent_ms": 60_000,
    "no_replica_ms": 60_000,
}


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(
        postgres_url,
        valkey_url,
        tmp_path,
        worker_idle_ms=600,
        worker_first_frame_ms=600,
        unsent_ms=1_500,
        no_replica_ms=500,
    ) as made:
        yield made


async def test_a_refused_attempt_is_made_again(world: World, caller: Caller) -> None:
    reasons = ["full", "draining", "wrong_version", "duplicate"]
    for reason in reasons:
        world.worker.script = [refuses(reason), refuses(reason)]
        response = await post(world, caller)
        assert text_of(CHAT, response) == whole_text(5)
    attempts = [request.attempt for request in world.worker.requests]
    assert attempts == [1, 2, 3] * len(reasons)
    for row in await world.settled(caller, len(reasons)):
        assert (row.cause, row.metered_output_tokens) == (EndCause.COMPLETE, 5)
        assert row.metered_prompt_tokens == row.prompt_tokens
    await world.dispatcher_is_empty()


async def test_what_fits_no_replica_is_refused_by_the_worker(world: World, caller: Caller) -> None:
    for stream in (True, False):
        world.worker.script = [refuses("fits_never", fits_never=True)]
        response = await post(world, caller, stream=stream)
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
    for row in await world.settled(caller, 2):
        assert (row.cause, row.billed_micro) == (EndCause.NOT_STARTED, 0)
    await world.dispatcher_is_empty()


def dispatchers_blocks(world: World) -> list[int]:
    """What the dispatcher takes each replica's KV pool to be."""
    key = dict(zip(POOL_PARTS, pool_keys(POOL), strict=True))["replicas"]
    with redis.Redis.from_url(world.settings.redis_url) as valkey:
        return [msgspec.msgpack.decode(packed)["total"] for packed in valkey.hvals(key)]


async def test_what_fits_no_replica_is_refused_before_it_is_sent(
    world: World, caller: Caller
) -> None:
    async with world.postgres.transaction() as conn:
        # An earlier test's might yet come back, and what fits it would wait for it.
        await conn.execute("UPDATE replicas SET kv_blocks = 3")
    await world.register(world.worker, capacity=a_capacity(kv_blocks=3))
    await until(lambda: world.gateway.routes.replicas(POOL)[0].kv_blocks == 3)
    await until(lambda: set(dispatchers_blocks(world)) == {3})  # it hears with a half-second renew
    world.worker.script = [refuses("sent all the same", fits_never=True)]
    response = await post(world, caller, max_tokens=100)
    assert response.status_code == 400, response.text
    assert world.worker.requests == []
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.NOT_STARTED
    await world.dispatcher_is_empty()


async def test_a_failure_before_the_first_token_is_an_http_error(
    world: World, caller: Caller
) -> None:
    for path in PATHS:
        for stream in (True, False):
            world.worker.script = [fails(retryable=False)]
            response = await post(world, caller, path, stream=stream)
            assert response.status_code == 500
            assert response.json()["error"]["type"] in {"server_error", "api_error"}
    for row in await world.settled(caller, 2 * len(PATHS)):
        assert (row.cause, row.billed_micro) == (EndCause.FAILED, 0)
    await world.dispatcher_is_empty()


async def test_a_failure_mid_stream_is_an_error_event(world: World, caller: Caller) -> None:
    world.worker.script = [fails(retryable=False, after=3), fails(retryable=False, after=3)]
    told = check_openai_chat_stream(
        (await post(world, caller, stream=True)).content, include_usage=False
    )
    assert told.error is not None
    assert (told.texts, told.done) == ([whole_text(3)], False)
    message = check_anthropic_stream((await post(world, caller, MESSAGES, stream=True)).content)
    assert message.error is not None
    assert message.error["type"] == "api_error"
    rows = await world.settled(caller, 2)
    assert [(row.cause, row.metered_output_tokens) for row in rows] == [(EndCause.FAILED, 3)] * 2
    assert await world.balance(caller) == (0, 0)
    await world.dispatcher_is_empty()


async def test_a_retryable_failure_is_tried_again(world: World, caller: Caller) -> None:
    world.worker.script = [fails(retryable=True)]
    assert text_of(CHAT, await post(world, caller)) == whole_text(5)


async def test_a_death_before_the_first_token_is_retried(world: World, caller: Caller) -> None:
    await world.add_worker()
    for after in (None, 0):
        for worker in world.workers:
            worker.script = [dies(after=after)]
        response = await post(world, caller)
        assert text_of(CHAT, response) == whole_text(5)
    for row in await world.settled(caller, 2):
        assert (row.cause, row.metered_output_tokens) == (EndCause.COMPLETE, 5)
    await world.dispatcher_is_empty()


async def test_a_death_mid_answer_is_resumed_where_it_was(world: World, caller: Caller) -> None:
    await world.add_worker()
    for path in PATHS:
        for stream in (True, False):
            for worker in world.workers:
                worker.default = answers(30, gap_s=0.002)
                worker.script = [dies(after=11, tokens=30)]
            response = await post(world, caller, path, stream=stream)
            assert response.status_code == 200
            assert told_by(path, response) == whole_text(30)
            assert_resumed(world, response.headers["x-request-id"])
    for row in await world.settled(caller, 2 * len(PATHS)):
        assert row.cause is EndCause.COMPLETE
        assert row.metered_output_tokens == row.delivered_tokens == 30
        assert row.metered_prompt_tokens == row.prompt_tokens
    await world.dispatcher_is_empty()


def told_by(path: str, response: httpx.Response) -> str:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return text_of(path, response)
    if path == MESSAGES:
        return check_anthropic_stream(response.content).text
    check = check_openai_chat_stream if path == CHAT else check_openai_completion_stream
    return check(response.content, include_usage=False).texts[0]


def assert_resumed(world: World, request_id: str) -> None:
    asked = [
        request
        for worker in world.workers
        for request in worker.requests
        if request.request_id == request_id
    ]
    (choice,) = max(asked, key=lambda request: request.attempt).choices
    assert len(choice.output_ids) >= 11
    assert choice.released_chars == len(whole_text(len(choice.output_ids)))


async def test_a_killed_worker_that_comes_back_finishes_its_streams(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    async with a_world(postgres_url, valkey_url, tmp_path, **PATIENT) as world:
        caller = await world.add_caller()
        world.worker.script = [hangs(after=10)] * 5
        world.worker.default = answers(100)
        asking = [asyncio.create_task(post(world, caller, stream=True)) for _ in range(5)]
        await until(lambda: [run.produced for run in world.worker.runs.values()] == [10] * 5)
        await world.worker.kill()
        unsent = world.gateway.metrics.setbacks.labels("unsent")
        await until(lambda: unsent._value.get() >= 5)  # nobody has been listening
        await world.worker.start()
        await world.register(world.worker)
        for response in await asyncio.gather(*asking):
            told = check_openai_chat_stream(response.content, include_usage=False)
            assert told.texts == [whole_text(50)]
        rows = await world.settled(caller, 5)
        assert {row.cause for row in rows} == {EndCause.LENGTH}
        await world.dispatcher_is_empty()


async def test_a_killed_worker_that_stays_away_ends_its_streams_with_an_error(
    world: World, caller: Caller
) -> None:
    world.worker.default = answers(100, gap_s=0.01)
    asking = asyncio.create_task(post(world, caller, stream=True))
    await until(lambda: world.worker.requests)
    await asyncio.sleep(0.2)
    await world.worker.kill()
    told = check_openai_chat_stream((await asking).content, include_usage=False)
    assert told.error is not None
    (row,) = await world.settled(caller, 1)
    assert (row.cause, row.billed_micro) == (EndCause.FAILED, 0)
    assert row.metered_output_tokens > 0
    await world.dispatcher_is_empty()


async def test_a_replica_that_cannot_resume_is_not_asked_to(world: World, caller: Caller) -> None:
    await world.register(world.worker, can_resume=False)
    await until(lambda: not world.gateway.routes.can_resume(POOL, "rep-0"))
    world.worker.script = [dies(after=5)]
    told = check_openai_chat_stream(
        (await post(world, caller, stream=True)).content, include_usage=False
    )
    assert told.error is not None
    assert len(world.worker.requests) == 1
    await world.settled(caller, 1)
    await world.dispatcher_is_empty()


async def test_deaths_are_bounded(world: World, caller: Caller) -> None:
    world.worker.default = dies(after=None)
    response = await post(world, caller)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert len(world.worker.requests) == 4
    await world.settled(caller, 1)
    await world.dispatcher_is_empty()


@pytest.mark.parametrize("after", [None, 7])
async def test_a_silent_worker_is_given_up(world: World, caller: Caller, after: int | None) -> None:
    world.worker.default = answers(12)
    world.worker.script = [hangs(after=after)]
    response = await post(world, caller)
    assert text_of(CHAT, response) == whole_text(12)
    await world.settled(caller, 1)
    await world.dispatcher_is_empty()


async def test_nobody_ready_is_unavailable_not_a_hang(world: World, caller: Caller) -> None:
    world.worker.default = answers(5)
    await world.worker.kill()
    await world.register(world.worker, ReplicaState.LOST)
    await until(lambda: world.gateway.routes.deserted(POOL))
    response = await post(world, caller, MESSAGES)
    assert response.status_code == 529
    assert "retry-after" in response.headers
    assert await world.usage(caller) == []
    await world.dispatcher_is_empty()


async def test_the_version_asked_for_is_the_one_routed_to(world: World, caller: Caller) -> None:
    await post(world, caller)
    (row,) = await world.settled(caller, 1)
    assert row.version == world.manifest.version == world.worker.requests[0].version
