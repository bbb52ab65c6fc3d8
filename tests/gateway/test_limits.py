"""Limits as callers meet them, through two gateways: exact, told in their dialect, never pinned."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.allowance import Allowance
from core.tickets import Limits
from store.limits import say, say_of_models
from tests.support.gateway_requests import CHAT, MESSAGES, a_body, error_of, headers_of, post
from tests.support.gateway_world import MODEL, Caller, World, a_world, until
from tests.support.scripted_worker import answers, hangs

pytestmark = [pytest.mark.anyio, pytest.mark.services]


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """Two gateways that share a worker and agree: time stands still for limits.

    A gateway that Valkey does not answer in time decides alone, by the real clock, and is exact
    by itself only. Here it waits for longer than a busy machine takes, and is shown never to.
    """
    patience = {"valkey_call_ms": 30_000}
    async with a_world(
        postgres_url, valkey_url, tmp_path, reserve_output_tokens=32, **patience
    ) as made:
        await made.start_gateway()
        now_ms = str(time.time_ns() // 1_000_000)
        for decider in deciders(made):
            decider.remote.limits_now = now_ms
        made.worker.default = answers(5)
        yield made
        assert [decider.life for decider in deciders(made)] == [1, 1], "one decided alone"


def deciders(world: World) -> list[Any]:
    gateways: list[Any] = [server._gateway for server, _ in world.servers]
    return [gateway._dispatch._decider for gateway in gateways]


def arrived(world: World) -> int:
    """Requests at the worker, each once however often it was sent."""
    return len({message.request_id for message in world.worker.requests})


async def at_once(
    world: World, caller: Caller, count: int, path: str = CHAT, **fields: Any
) -> tuple[list[httpx.Response], list[httpx.Response]]:
    """Those that were answered, and those refused with 429, of so many through both gateways."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        responses = await asyncio.gather(
            *(
                client.post(
                    f"{world.url_of(i % 2)}{path}",
                    json=a_body(path, **fields),
                    headers=headers_of(caller, path),
                )
                for i in range(count)
            )
        )
    passed = [response for response in responses if response.status_code == 200]
    refused = [response for response in responses if response.status_code == 429]
    assert len(passed) + len(refused) == count, [r.text for r in responses]
    return passed, refused


async def at_once_and_stuck(
    world: World, caller: Caller, count: int, **fields: Any
) -> tuple[int, list[httpx.Response]]:
    """As `at_once`, of requests that hold what they hold until all have been judged."""
    world.worker.requests.clear()
    world.worker.default = hangs()
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=count)) as client:
        asking = [
            asyncio.create_task(
                client.post(
                    f"{world.url_of(i % 2)}{CHAT}",
                    json=a_body(CHAT, **fields),
                    headers=headers_of(caller),
                )
            )
            for i in range(count)
        ]
        await until(
            lambda: sum(task.done() for task in asking) + arrived(world) == count,
            within_s=30,
        )
        refused = [task.result() for task in asking if task.done()]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return arrived(world), refused


async def test_room_for_ten_is_ten_of_twenty_through_two_gateways(world: World) -> None:
    prompt_tokens = (await post(world, await world.add_caller())).json()["usage"]["prompt_tokens"]
    cost = prompt_tokens + 4 * 16
    for limits, hard_cap, code in (
        (Limits(requests_per_min=10), None, "rate_limit_exceeded"),
        (Limits(input_tokens_per_min=10 * prompt_tokens), None, "rate_limit_exceeded"),
        (Limits(output_tokens_per_min=160), None, "rate_limit_exceeded"),
        (Limits(concurrency=10), None, "rate_limit_exceeded"),
        (Limits(), 10 * cost, "insufficient_quota"),
    ):
        caller = await world.add_caller(limits=limits, hard_cap_micro=hard_cap)
        passed, refused = await at_once_and_stuck(world, caller, 20, max_tokens=16)
        assert (passed, len(refused)) == (10, 10), limits
        assert {response.status_code for response in refused} == {429}
        assert {error_of(response)["code"] for response in refused} == {code}
    await world.dispatcher_is_empty()


# litellm #28805, #29191: the first request ever gets 429, as none is said and 1024 are reserved.
async def test_a_first_request_without_max_tokens_is_not_refused_under_a_small_limit(
    world: World,
) -> None:
    caller = await world.add_caller(
        limits=Limits(output_tokens_per_min=100, input_tokens_per_min=100)
    )
    for path in (CHAT, "/v1/completions", CHAT):
        response = await post(world, caller, path, max_tokens=None)
        assert response.status_code == 200, response.text
    left = int(response.headers["x-ratelimit-remaining-tokens"])
    assert left < 100


# litellm #38647: the worst case of huge max_tokens pins the budget, and nothing is ever spent.
async def test_twenty_at_once_that_ask_for_far_more_than_they_use_are_all_answered(
    world: World,
) -> None:
    caller = await world.add_caller(hard_cap_micro=4_000)  # of 20 x 400 x 4 in the worst case
    passed, refused = await at_once(world, caller, 20, max_tokens=400)
    assert (len(passed), len(refused)) == (20, 0)
    rows = await world.settled(caller, 20)
    posted, reserved = await world.balance(caller)
    assert (posted, reserved) == (sum(row.billed_micro for row in rows), 0)
    assert 0 < posted < 4_000


async def test_an_answer_that_is_only_partly_affordable_is_cut_or_refused_by_policy(
    world: World,
) -> None:
    world.worker.default = answers(400, gap_s=0.001)
    patient = await world.add_caller(hard_cap_micro=400)
    cut = await post(world, patient, max_tokens=300)
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    assert 0 < cut.json()["usage"]["completion_tokens"] < 300
    strict = await world.add_caller(hard_cap_micro=400, output_policy="refuse")
    refused = await post(world, strict, max_tokens=300)
    assert refused.status_code == 429
    assert error_of(refused)["code"] == "insufficient_quota"
    assert "is reserved by requests under way" in error_of(refused)["message"]
    assert (await post(world, strict, max_tokens=20)).status_code == 200
    named_none = await post(world, strict, max_tokens=None)
    assert named_none.status_code == 200
    assert named_none.json()["choices"][0]["finish_reason"] == "length"


async def test_bounds_are_kept_before_anything_is_held(world: World) -> None:
    bounds = Allowance(prompt_tokens_max=60, output_tokens_max=7, deadline_ms_max=300)
    lenient = await world.add_caller(allowance=bounds)
    world.worker.default = answers(50)
    response = await post(world, lenient, max_tokens=400)
    assert response.json()["usage"]["completion_tokens"] == 7
    assert (await post(world, lenient, max_tokens=None)).json()["usage"]["completion_tokens"] == 7
    strict = await world.add_caller(allowance=bounds, output_policy="refuse")
    sent = len(world.worker.requests)
    for path in (CHAT, MESSAGES):
        refused = await post(world, strict, path, max_tokens=8)
        assert refused.status_code == 400
        long = [{"role": "user", "content": "word " * 100}]
        refused = await post(world, strict, path, messages=long, max_tokens=2)
        assert refused.status_code == 400
    assert len(world.worker.requests) == sent
    assert await world.usage(strict) == []
    world.worker.default = answers(3, delay_s=5)
    assert (await post(world, strict, max_tokens=5)).status_code == 504
    await world.dispatcher_is_empty()


async def test_the_tightest_scope_is_told_and_the_one_in_the_way_is_named(world: World) -> None:
    caller = await world.add_caller(limits=Limits(requests_per_min=50))
    async with world.postgres.transaction() as conn:
        await say(conn, "key", caller.key_id, Allowance(requests_per_min=3))
        only = {MODEL: Allowance(requests_per_min=2, input_tokens_per_min=10_000)}
        await say_of_models(conn, "tenant", caller.tenant_id, only)
    first = await post(world, caller)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    second = await post(world, caller, MESSAGES, gateway=1)
    assert second.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert second.headers["anthropic-ratelimit-input-tokens-limit"] == "10000"
    refused = await post(world, caller, gateway=1)
    assert refused.status_code == 429
    assert f"requests per minute for the model `{MODEL}`" in error_of(refused)["message"]
    gateway: Any = world.servers[1][0]._gateway
    told = gateway.metrics.text().decode()
    assert 'headworks_gateway_refusals_total{reason="requests",scope="model"} 1.0' in told
    assert caller.tenant_id not in told
    assert int(refused.headers["retry-after"]) >= 30


# litellm #16011: as many at once as workers times the limit.
async def test_forty_streams_at_once_are_three_at_the_worker(world: World) -> None:
    caller = await world.add_caller(limits=Limits(concurrency=3))
    passed, refused = await at_once_and_stuck(world, caller, 40, stream=True)
    assert (passed, len(refused)) == (3, 37)
    await world.dispatcher_is_empty()
    world.worker.default = answers(5)
    assert (await post(world, caller)).status_code == 200, "their slots are free again"


# litellm #34223: reserved by max_tokens 1, answered by max_completion_tokens 4096.
async def test_two_lengths_that_disagree_are_refused(world: World) -> None:
    caller = await world.add_caller(limits=Limits(output_tokens_per_min=100))
    response = await post(world, caller, max_tokens=1, max_completion_tokens=400)
    assert response.status_code == 400
    assert error_of(response)["param"] == "max_completion_tokens"
    assert await world.usage(caller) == []
