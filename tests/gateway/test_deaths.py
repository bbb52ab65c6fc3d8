"""Replicas that die of a request, and deaths by the dozen: refused, budgeted, never a storm."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from core.fleet import ReplicaState
from core.money import EndCause
from store.keys import DEATH_KEYS, RETRY_KEYS
from tests.support.gateway_requests import CHAT, error_of, post, text_of
from tests.support.gateway_world import POOL, Caller, World, a_world, until
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import ScriptedWorker, answers, crashes, dies, whole_text

pytestmark = [pytest.mark.anyio, pytest.mark.services]

POISON = "the sun is a mass of incandescent gas"


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    with redis.Redis.from_url(valkey_url) as client:
        client.delete(*RETRY_KEYS, *DEATH_KEYS)
    async with a_world(
        postgres_url, valkey_url, tmp_path, workers=2, retry_permille=1, retry_floor=6
    ) as made:
        yield made


async def back(world: World, *workers: ScriptedWorker) -> None:
    """Crashed workers have started again, and the gateways know their new lives."""
    for worker in workers:
        assert worker.crashing is not None
        await worker.crashing
        await world.register(worker)
    boots = {worker.boot_id for worker in world.workers}
    routes = world.gateway.routes
    await until(lambda: {view.boot_id for view in routes.replicas(POOL)} == boots)


async def test_a_request_that_two_replicas_died_of_is_refused_fleet_wide(
    world: World, caller: Caller
) -> None:
    await world.start_gateway()
    for worker in world.workers:
        worker.script = [crashes(after=3, back_s=0.3)]
    reply = await post(world, caller, messages=[{"role": "user", "content": POISON}])
    assert reply.status_code == 422, reply.text
    assert "10 min" in error_of(reply)["message"]
    assert POISON not in reply.text
    await back(world, *world.workers)
    asked = [len(worker.requests) for worker in world.workers]
    assert sum(asked) == 2, "one retry, and no third replica"

    other = world.servers[1][0]._gateway
    await until(lambda: other._failures.has_suspects)
    for gateway in (0, 1):
        for stream in (True, False):
            again = await post(
                world,
                caller,
                gateway=gateway,
                stream=stream,
                messages=[{"role": "user", "content": POISON}],
                seed=7,
            )
            assert again.status_code == 422
        assert (await post(world, caller, gateway=gateway)).status_code == 200
    stranger = await world.add_caller()
    mine = await post(world, stranger, messages=[{"role": "user", "content": POISON}])
    assert mine.status_code == 200, "another tenant's same words are another request"
    with redis.Redis.from_url(world.settings.redis_url) as valkey:
        kept = valkey.hgetall(DEATH_KEYS[0])
    assert len(kept) == 1
    assert b"sun" not in b"".join((*kept, *kept.values()))
    rows = await world.usage(caller)
    assert [row.billed_micro for row in rows if row.cause is EndCause.NOT_STARTED] == [0] * 4
    await world.dispatcher_is_empty()


async def test_a_request_that_survives_is_cleared_of_the_death_it_was_near(
    world: World, caller: Caller
) -> None:
    failures = world.gateway._failures
    for _ in range(3):
        # Whichever it is placed on dies of something else; it is resumed, and answered.
        victim = world.workers[0]
        victim.script = [crashes(after=3, back_s=0.1)]
        victim.default = world.workers[1].default = answers(6)
        assert text_of(CHAT, await post(world, caller)) == whole_text(6)
        if victim.crashing is not None:
            await back(world, victim)
            victim.crashing = None
        victim.script = []
        await until(lambda: not failures.has_suspects)
    assert (await post(world, caller)).status_code == 200


async def test_a_network_that_cuts_and_a_boot_that_lives_convict_nobody(
    world: World, caller: Caller
) -> None:
    for _ in range(3):
        for worker in world.workers:
            worker.default = answers(9)
            worker.script = [dies(after=2, tokens=9)]
        await post(world, caller)
    failures = world.gateway._failures
    await failures.poll()
    assert not failures.has_suspects


async def test_a_replica_that_is_killed_while_it_leaves_convicts_nobody(
    world: World, caller: Caller
) -> None:
    for leaving in world.workers:
        stays = next(worker for worker in world.workers if worker is not leaving)
        leaving.default = answers(60, gap_s=0.05)
        stays.default = answers(60)
        await world.register(stays, ReplicaState.STARTING)
        await until(lambda who=leaving: ready(world) == {who.replica_id})
        asking = asyncio.create_task(post(world, caller, max_tokens=60))
        await until(lambda who=leaving: any(run.produced > 2 for run in who.runs.values()))
        await world.register(stays)
        await world.register(leaving, ReplicaState.DRAINING)
        await until(lambda who=stays: ready(world) == {who.replica_id})
        leaving.crash(0.1)
        assert text_of(CHAT, await asking) == whole_text(60)
        await back(world, leaving)
    await world.gateway._failures.poll()
    assert not world.gateway._failures.has_suspects


def ready(world: World) -> set[str]:
    return {view.replica for view in world.gateway.routes.replicas(POOL) if view.ready}


async def test_equal_requests_on_one_replica_that_dies_once_are_not_convicted_together(
    world: World, caller: Caller
) -> None:
    one, other = world.workers
    other.default = answers(40)
    one.default = answers(40, gap_s=0.05)
    await world.register(other, ReplicaState.STARTING)
    await until(lambda: ready(world) == {one.replica_id})
    asking = [asyncio.create_task(post(world, caller)) for _ in range(5)]
    await until(lambda: [run.produced > 2 for run in one.runs.values()] == [True] * 5)
    await world.register(other)
    one.crash(0.1)
    assert {reply.status_code for reply in await asyncio.gather(*asking)} == {200}
    await back(world, one)
    assert (await post(world, caller)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_many_deaths_at_once_are_no_retry_storm(
    world: World, caller: Caller, *, stream: bool
) -> None:
    for worker in world.workers:
        worker.default = dies(after=3)
        worker.requests.clear()
    replies = await asyncio.gather(*(post(world, caller, stream=stream) for _ in range(30)))
    sent = sum(len(worker.requests) for worker in world.workers)
    assert 30 <= sent <= 30 + 2 * 6, "a retry for each would be 30, and 90 with three"
    for reply in replies:
        if stream:
            told = check_openai_chat_stream(reply.content, include_usage=False)
            assert told.error is not None
            assert told.texts[0] == whole_text(told.texts[0].count(" "))
        else:
            assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
    assert world.gateway.metrics.retries_refused._value.get() > 0
    for row in await world.settled(caller, 30):
        assert (row.cause, row.billed_micro) == (EndCause.FAILED, 0)
    for worker in world.workers:
        worker.default = answers(5)
    assert (await post(world, caller)).status_code == 200, "and nothing is held against anyone"
    await world.dispatcher_is_empty()
