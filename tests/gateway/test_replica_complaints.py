"""What others' users saw when replicas failed, tried on us. Numbers are theirs: # issue, P request.

Each test is named after the symptom; that it is absent is what is asserted.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from core.fleet import ReplicaState
from core.money import EndCause
from core.tickets import ReplicaView
from store.postgres import StoreAwayError
from tests.support.client import ask
from tests.support.gateway_requests import CHAT, COMPLETIONS, PATHS, a_body, error_of, post, text_of
from tests.support.gateway_world import POOL, Caller, World, a_world, until
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import answers, dies, fails, hangs, refuses, whole_text

pytestmark = [pytest.mark.anyio, pytest.mark.services]

SECONDS_S = 20.0  # "within seconds"


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(
        postgres_url,
        valkey_url,
        tmp_path,
        worker_connect_ms=300,
        worker_idle_ms=2_000,
        no_replica_ms=500,
        unsent_ms=2_000,
        breaker_open_ms=200,
    ) as made:
        yield made


async def statuses(world: World, caller: Caller, count: int) -> list[int]:
    replies = await asyncio.gather(*(post(world, caller) for _ in range(count)))
    return [reply.status_code for reply in replies]


async def in_turn(world: World, caller: Caller, count: int) -> list[httpx.Response]:
    return [await post(world, caller) for _ in range(count)]


# Where a replica was, and is not.


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9"])
async def test_an_evicted_replica_without_its_address_does_not_hang_the_next_twenty_requests(
    world: World, caller: Caller, url: str
) -> None:
    # vllm production-stack #1008: routable until the router is restarted.
    evicted = await world.add_worker()
    await world.register(evicted, url=url)
    await until(lambda: url in {view.url for view in world.gateway.routes.replicas(POOL)})
    began_s = time.monotonic()
    replies = await in_turn(world, caller, 20)
    assert [text_of(CHAT, reply) for reply in replies] == [whole_text(5)] * 20
    assert time.monotonic() - began_s < 5 * SECONDS_S
    assert evicted.requests == []
    unsent = world.gateway.metrics.setbacks.labels("unsent")._value.get()
    assert unsent <= 10, "passed over after a few, but for one now and then"
    await world.settled(caller, 20)
    await world.dispatcher_is_empty()


async def test_a_death_while_the_registry_cannot_be_read_is_not_healthy_for_hours(
    world: World, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    # production-stack #1091: a delete event was lost, 22 h of failures with /health green.
    gateway = world.gateway

    async def away() -> None:
        raise StoreAwayError("the watch reconnects")

    with monkeypatch.context() as patch:
        patch.setattr(gateway._source, "routing_view", away)
        await world.worker.kill()
        await world.register(world.worker, ReplicaState.LOST)
        reply = await post(world, caller)
        assert reply.status_code == 503
        assert gateway.reasons().keys() >= {"replicas", "postgres"}
    await until(lambda: "postgres" not in gateway.reasons())
    assert gateway.reasons().keys() == {"replicas"}, "the list is read whole: nothing was missed"
    await world.worker.start()
    await world.register(world.worker)
    await until(lambda: gateway.reasons() == {})
    assert await statuses(world, caller, 3) == [200] * 3


# Breakers that open for nothing, or never close.


async def test_a_full_queue_does_not_keep_shedding_after_it_is_idle(
    world: World, caller: Caller
) -> None:
    # sglang P39464: queue-full opens the breaker. Ten times, then it recovers.
    world.worker.script = [
        503,
        429,
        refuses("full"),
        refuses("journal_full"),
        refuses("asleep"),
    ] * 2
    began_s = time.monotonic()
    assert await statuses(world, caller, 5) == [200] * 5
    assert time.monotonic() - began_s < 4 * SECONDS_S
    assert world.gateway._health.open_count == 0
    assert world.gateway.metrics.setbacks.labels("nack")._value.get() == 10


async def test_what_the_caller_got_wrong_is_not_held_against_the_replica(
    world: World, caller: Caller
) -> None:
    world.worker.script = [400, 413] * 3
    assert await statuses(world, caller, 6) == [500] * 6
    assert world.gateway._health.open_count == 0
    assert await statuses(world, caller, 1) == [200]


async def test_a_worker_that_answers_500_fails_fast_and_is_taken_back_after_successes(
    world: World, caller: Caller
) -> None:
    # sglang #31206: decode waits for ever for a prefill worker that fails; half-open never closes.
    world.worker.default = 500
    began_s = time.monotonic()
    assert await statuses(world, caller, 4) == [503] * 4
    assert time.monotonic() - began_s < SECONDS_S
    health = world.gateway._health
    assert health.open_count == 1
    assert len(world.worker.requests) <= 4 * 4
    world.worker.default = answers(5)
    # Its pool's only replica is tried all the same.
    assert {reply.status_code for reply in await in_turn(world, caller, 3)} == {200}
    assert health.open_count == 0


async def test_a_failing_replica_is_passed_over_and_gets_traffic_within_seconds_of_recovery(
    world: World, caller: Caller
) -> None:
    failing = await world.add_worker()
    failing.default = dies(after=None)
    replies = await in_turn(world, caller, 30)
    assert {reply.status_code for reply in replies} == {200}
    assert len(failing.requests) <= 10, "three, and one now and then"
    world.worker.default = failing.default = answers(5, gap_s=0.02)
    recovered = len(failing.requests)

    async def both_serve() -> None:
        while len(failing.requests) < recovered + 20:
            assert set(await statuses(world, caller, 8)) == {200}

    await asyncio.wait_for(both_serve(), 2 * SECONDS_S)
    assert world.gateway._health.open_count == 0


async def test_after_a_burst_over_its_cap_an_idle_worker_takes_every_request(
    world: World, caller: Caller
) -> None:
    # dynamo P12138, P14210: the overload mark is never cleared, 3,600 of 3,600 are rejected.
    world.worker.script = [refuses("full")] * 32
    world.worker.default = answers(2)
    burst = await statuses(world, caller, 32)
    assert set(burst) == {200}
    world.worker.requests.clear()
    assert await statuses(world, caller, 24) == [200] * 24
    assert len(world.worker.requests) == 24, "at the first try"


async def test_being_declined_is_no_tight_loop_and_ends_by_the_deadline(
    world: World, caller: Caller
) -> None:
    # Once 64 refusals, as fast as they came, were a 503.
    world.worker.default = refuses("full")
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        headers = {"authorization": f"Bearer {caller.key}", "x-headworks-deadline-ms": "2500"}
        reply = await client.post(CHAT, json=a_body(CHAT), headers=headers)
    assert reply.status_code == 504
    assert len(world.worker.requests) <= 12
    world.worker.default = answers(5)
    await world.dispatcher_is_empty()


# Streams of replicas that go.


async def test_a_drained_workers_long_stream_ends_whole_and_new_requests_never_reach_it(
    world: World, caller: Caller
) -> None:
    # kthena #1589, kserve P5485, PostHog P73863, GAIE #549: scale-down cuts live streams.
    leaving = world.worker
    leaving.default = answers(40, gap_s=0.05)
    streams = [asyncio.create_task(post(world, caller, stream=True)) for _ in range(3)]
    await until(lambda: len(leaving.runs) == 3)
    await world.add_worker()
    await world.register(leaving, ReplicaState.DRAINING)
    await until(lambda: not any(v.ready for v in views(world) if v.replica == leaving.replica_id))
    before = len(leaving.requests)
    assert await statuses(world, caller, 10) == [200] * 10
    assert len(leaving.requests) == before
    for stream in await asyncio.gather(*streams):
        told = check_openai_chat_stream(stream.content, include_usage=False)
        assert (told.texts, told.done) == ([whole_text(40)], True)
    assert leaving.runs == {}
    rows = await world.settled(caller, 13)
    assert {row.cause for row in rows} == {EndCause.COMPLETE}


def views(world: World) -> tuple[ReplicaView, ...]:
    return tuple(world.gateway.routes.replicas(POOL))


async def test_one_told_to_go_elsewhere_is_resumed_and_blames_nobody(
    world: World, caller: Caller
) -> None:
    # A drain that ran out of time: Failed(shutting_down).
    for _ in range(4):
        world.worker.script = [fails(retryable=True, after=7, code="shutting_down")]
        world.worker.default = answers(20)
        told = check_openai_chat_stream(
            (await post(world, caller, stream=True)).content, include_usage=False
        )
        assert told.texts == [whole_text(20)]
    assert world.gateway._health.open_count == 0


async def test_leaving_before_the_first_token_stops_the_prefill(
    world: World, caller: Caller
) -> None:
    # dynamo P14507: the prefill went on, and the next request waited 54.7 s.
    world.worker.script = [answers(5, delay_s=30)]
    reply = await ask(world.url, CHAT, caller.key, a_body(CHAT), leave_after_s=0.2)
    assert reply.left
    await until(lambda: world.worker.aborts)
    await until(lambda: not world.worker.runs)
    began_s = time.monotonic()
    assert await statuses(world, caller, 1) == [200]
    assert time.monotonic() - began_s < SECONDS_S
    await world.dispatcher_is_empty()


async def test_abandoned_streams_leave_no_connection_behind(world: World, caller: Caller) -> None:
    # litellm #12685, #27954, #38193, bifrost #828: memory climbs with each abandoned stream.
    world.worker.default = answers(500, gap_s=0.01)
    workers = world.gateway._workers
    for path in PATHS:
        body = a_body(path, stream=True, max_tokens=400)
        key, anthropic = caller.key, path == PATHS[2]
        await asyncio.gather(
            *(
                ask(world.url, path, key, body, leave_after_s=0.1 + 0.02 * n, anthropic=anthropic)
                for n in range(8)
            )
        )
    await until(lambda: not world.worker.runs)
    await world.settled(caller, 24)
    idle = sum(len(pool) for pool in workers._idle.values())
    assert workers.connections == idle, "none is in use"
    workers._limits = type(workers._limits)(keep_alive_s=0.0)
    workers.sweep()
    await until(lambda: workers.connections == 0)
    assert workers._idle == {}
    await world.dispatcher_is_empty()


# Mid-stream rules (gateways.md, table 1d): what others do to an answer that has begun.


async def test_an_answer_that_has_begun_is_never_finished_by_another_version(
    world: World, caller: Caller
) -> None:
    other = await world.add_worker()
    other.default = refuses("wrong_version")
    world.worker.default = answers(30)
    for _ in range(3):
        world.worker.script = [dies(after=9, tokens=30)]
        told = check_openai_chat_stream(
            (await post(world, caller, stream=True)).content, include_usage=False
        )
        assert told.texts == [whole_text(30)]
    asked = [request for worker in world.workers for request in worker.requests]
    assert {request.version for request in asked} == {world.manifest.version}


async def test_a_stream_that_stalls_is_resumed_and_tells_no_token_twice(
    world: World, caller: Caller
) -> None:
    await world.add_worker()
    for worker in world.workers:
        worker.default = answers(24)
        worker.script = [hangs(after=8)]
    for path in (CHAT, COMPLETIONS):
        reply = await post(world, caller, path, n=2, logprobs=True if path == CHAT else 1)
        choices = reply.json()["choices"]
        assert len(choices) == 2
        for index, choice in enumerate(choices):
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert text == whole_text(24, index)
            chances = choice["logprobs"]["content" if path == CHAT else "tokens"]
            assert len(chances) == 24
        for worker in world.workers:
            worker.script = [hangs(after=8)]


async def test_an_error_after_the_first_token_is_an_event_and_never_a_silent_end(
    world: World, caller: Caller
) -> None:
    world.worker.default = dies(after=4)
    reply = await post(world, caller, stream=True)
    told = check_openai_chat_stream(reply.content, include_usage=False)
    assert told.error is not None
    assert not told.done
    assert told.texts[0] == whole_text(len(told.texts[0].split()))
    assert error_of(await post(world, caller))["code"] == "service_unavailable"
