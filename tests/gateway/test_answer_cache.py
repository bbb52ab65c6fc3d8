"""Exact repeats answered from memory: opted in, never across tenants, priced."""

from typing import Any

import httpx
import pytest

from core.money import EndCause
from store.answer_cache import AnswerPolicy, drop_policy, put_policy
from tests.support.gateway_requests import CHAT, MESSAGES, a_body, headers_of
from tests.support.gateway_world import Caller, World, until
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import answers, fails

pytestmark = [pytest.mark.anyio, pytest.mark.services]

ON, REFRESH = {"x-headworks-cache": "on"}, {"x-headworks-cache": "refresh"}


async def opt_in(world: World, caller: Caller, **policy: Any) -> None:
    made = AnswerPolicy(**({"ttl_s": 60, "charge": "free"} | policy))
    async with world.postgres.transaction() as conn:
        await put_policy(conn, caller.tenant_id, made)
    known = world.gateway._answers._policies
    await until(lambda: world.gateway._answers._policies.get(caller.tenant_id) == made)
    assert known is not None


async def asked(
    world: World,
    caller: Caller,
    headers: dict[str, str] = ON,
    path: str = CHAT,
    **fields: Any,
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        body = a_body(path, **({"temperature": 0} | fields))
        return await client.post(path, json=body, headers=headers_of(caller, path) | headers)


async def kept(world: World) -> None:
    """What follows an answer's end has been done."""
    await until(lambda: len(world.gateway._endings) == 0)


def counted(world: World) -> dict[str, float]:
    family = world.gateway.metrics.answer_cache.collect()[0]
    return {
        sample.labels["outcome"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def told(answer: httpx.Response) -> Any:
    return answer.json()["choices"]


async def test_a_repeat_is_answered_from_memory_for_nothing(world: World, caller: Caller) -> None:
    await opt_in(world, caller)
    first = await asked(world, caller)
    assert first.headers["x-headworks-cache"] == "miss"
    await kept(world)
    again = await asked(world, caller)
    assert again.headers["x-headworks-cache"] == "hit"
    assert told(again) == told(first)
    assert again.json()["id"] != first.json()["id"]
    usage = again.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert usage["completion_tokens"] == 5
    streamed = await asked(world, caller, stream=True)
    assert streamed.headers["x-headworks-cache"] == "hit"
    check_openai_chat_stream(streamed.content, include_usage=False)
    assert len(world.worker.requests) == 1
    assert counted(world) == {"hit": 2, "miss": 1}
    rows = await world.settled(caller, 3)
    assert [row.billed_micro for row in rows[1:]] == [0, 0]
    assert {row.cause for row in rows} == {EndCause.COMPLETE}
    assert await world.balance(caller) == (rows[0].billed_micro, 0)
    await world.dispatcher_is_empty()


async def test_a_repeat_is_charged_as_its_tenant_s_policy_says(
    world: World, caller: Caller
) -> None:
    await opt_in(world, caller, charge="cached_input")
    await asked(world, caller)
    await kept(world)
    await asked(world, caller)
    _, row = await world.settled(caller, 2)
    assert row.metered_cached_tokens == row.metered_prompt_tokens == row.prompt_tokens
    assert row.metered_output_tokens == row.delivered_tokens == 0
    assert row.billed_micro == (row.prompt_tokens + 1) // 2  # at half of the input's price
    await world.dispatcher_is_empty()


async def test_only_who_has_opted_in_twice_is_answered_from_memory(
    world: World, caller: Caller
) -> None:
    await asked(world, caller)
    await kept(world)
    assert "x-headworks-cache" not in (await asked(world, caller)).headers
    await opt_in(world, caller)
    await asked(world, caller)
    await kept(world)
    assert "x-headworks-cache" not in (await asked(world, caller, {})).headers
    off = {"x-headworks-cache": "off"}
    assert "x-headworks-cache" not in (await asked(world, caller, off)).headers
    assert (await asked(world, caller)).headers["x-headworks-cache"] == "hit"
    async with world.postgres.transaction() as conn:
        assert await drop_policy(conn, caller.tenant_id)
    await until(lambda: caller.tenant_id not in world.gateway._answers._policies)
    assert "x-headworks-cache" not in (await asked(world, caller)).headers


async def test_no_tenant_is_told_another_s_answer(world: World, caller: Caller) -> None:
    other = await world.add_caller()
    await opt_in(world, caller)
    await opt_in(world, other)
    await asked(world, caller)
    await kept(world)
    assert (await asked(world, other)).headers["x-headworks-cache"] == "miss"
    assert len(world.worker.requests) == 2


async def test_what_changes_an_answer_is_another_request(world: World, caller: Caller) -> None:
    await opt_in(world, caller)
    await asked(world, caller)
    await kept(world)
    for fields in (
        {"max_tokens": 49},
        {"stop": ["x"]},
        {"n": 2},
        {"logprobs": True},
        {"messages": [{"role": "user", "content": "Tell me a story!"}]},
        {"frequency_penalty": 0.5},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 0.5, "seed": 2},
    ):
        assert (await asked(world, caller, **fields)).headers["x-headworks-cache"] == "miss", fields
    drawn = await asked(world, caller, temperature=0.5)
    assert "x-headworks-cache" not in drawn.headers  # it would be drawn anew
    await kept(world)
    again = await asked(world, caller, temperature=0.5, seed=1)
    assert again.headers["x-headworks-cache"] == "hit"
    assert (await asked(world, caller, user="me")).headers["x-headworks-cache"] == "hit"
    other = await asked(world, caller, path=MESSAGES)
    assert other.headers["x-headworks-cache"] == "miss"


async def test_an_answer_is_made_anew_when_asked_to_be(world: World, caller: Caller) -> None:
    await opt_in(world, caller)
    await asked(world, caller)
    await kept(world)
    world.worker.default = answers(7)
    anew = await asked(world, caller, REFRESH)
    assert anew.headers["x-headworks-cache"] == "miss"
    await kept(world)
    assert told(await asked(world, caller)) == told(anew)


async def test_failures_and_valkey_away_are_misses(world: World, caller: Caller) -> None:
    await opt_in(world, caller)
    world.worker.script = [fails(retryable=False, after=2)]
    assert (await asked(world, caller)).status_code == 500
    await kept(world)
    assert (await asked(world, caller)).headers["x-headworks-cache"] == "miss"
    await kept(world)
    await world.gateway._answer_slots.close()
    away = await asked(world, caller)
    assert (away.status_code, away.headers["x-headworks-cache"]) == (200, "miss")


async def test_a_bad_header_is_refused_by_name(world: World, caller: Caller) -> None:
    for name, value in (
        ("x-headworks-cache", "yes"),
        ("x-headworks-cache-ttl-s", "0"),
        ("x-headworks-cache-ttl-s", "soon"),
        ("x-headworks-cache-ttl-s", "86401"),
    ):
        refused = await asked(world, caller, ON | {name: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == name
    assert world.worker.requests == []
