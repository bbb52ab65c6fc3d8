"""What a tenant is told of itself by its key: limits with what is left, and a month's usage."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from core.allowance import Allowance
from core.tickets import Limits
from gateway.own_usage import month_of
from store.limits import say, say_of_models
from store.rollups import roll_up
from tests.support.gateway_requests import error_of, headers_of, post
from tests.support.gateway_world import MODEL, Caller, World, until
from tests.support.scripted_worker import answers, hangs

pytestmark = [pytest.mark.anyio, pytest.mark.services]


async def get(world: World, caller: Caller, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        return await client.get(path, headers=headers_of(caller))


async def limits_of(world: World, caller: Caller) -> dict[tuple[str, str | None], Any]:
    answer = await get(world, caller, "/v1/limits")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["has_more"], body["degraded"]) == ("list", False, False)
    return {(one["scope"], one["model"]): one for one in body["data"]}


async def test_a_key_is_told_its_limits_in_each_scope_and_what_is_left(world: World) -> None:
    stopped(world)
    caller = await world.add_caller(limits=Limits(requests_per_min=50, concurrency=4))
    async with world.postgres.transaction() as conn:
        await say(conn, "key", caller.key_id, Allowance(requests_per_min=3, prompt_tokens_max=90))
        of_models = {MODEL: Allowance(output_tokens_per_min=600), "other": Allowance(concurrency=1)}
        await say_of_models(conn, "tenant", caller.tenant_id, of_models)
        await say_of_models(conn, "key", caller.key_id, {MODEL: Allowance(requests_per_min=9)})
    before = await limits_of(world, caller)
    assert before == await limits_of(world, caller), "to be told costs nothing"
    assert list(before) == [
        ("tenant", None),
        ("key", None),
        ("model", "other"),
        ("model", MODEL),
        ("key_model", MODEL),
    ]
    assert before["tenant", None] == {
        "object": "limit",
        "scope": "tenant",
        "model": None,
        "requests_per_min": {"limit": 50, "remaining": 50, "reset_ms": 0},
        "input_tokens_per_min": None,
        "output_tokens_per_min": None,
        "concurrency": {"limit": 4, "remaining": 4},
        "prompt_tokens_max": None,
        "output_tokens_max": None,
        "deadline_ms_max": None,
    }
    assert before["key", None]["prompt_tokens_max"] == 90
    world.worker.default = hangs()
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        asked = {"model": MODEL, "prompt": "Hello", "max_tokens": 20, "stream": True}
        request = client.build_request(
            "POST", "/v1/completions", json=asked, headers=headers_of(caller)
        )
        sending = asyncio.create_task(client.send(request, stream=True))
        await until(lambda: world.worker.requests)
        during = await limits_of(world, caller)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert during["tenant", None]["concurrency"] == {"limit": 4, "remaining": 3}
    assert during["tenant", None]["requests_per_min"]["remaining"] == 49
    assert during["key", None]["requests_per_min"] == {
        "limit": 3,
        "remaining": 2,
        "reset_ms": 20_000,
    }
    assert during["model", MODEL]["output_tokens_per_min"]["remaining"] == 580
    assert during["key_model", MODEL]["requests_per_min"]["remaining"] == 8
    assert during["model", "other"]["concurrency"] == {"limit": 1, "remaining": 1}
    other = await world.add_caller()
    assert list(await limits_of(world, other)) == [("tenant", None)]
    await world.dispatcher_is_empty()


async def test_a_tenant_is_told_its_month_by_model_and_by_key_and_nobody_else_s(
    world: World,
) -> None:
    world.worker.default = answers(5)
    caller, other = await world.add_caller(), await world.add_caller()
    for _ in range(2):
        assert (await post(world, caller)).status_code == 200
    assert (await post(world, other)).status_code == 200
    rows = await world.settled(caller, 2)
    await world.settled(other, 1)
    while (await roll_up(world.postgres)).entries:
        pass
    at = datetime.fromtimestamp(rows[0].created_ms / 1000, tz=UTC)
    asked = f"/v1/usage?month={at:%Y-%m}"
    told = (await get(world, caller, asked)).json()
    sums = {
        "num_model_requests": 2,
        "input_tokens": sum(row.metered_prompt_tokens for row in rows),
        "input_cached_tokens": 0,
        "output_tokens": 10,
        "cost_micro": sum(row.billed_micro for row in rows),
    }
    assert sums["cost_micro"] > 0
    month = month_of(at.year, at.month)
    assert told.pop("as_of_time") > 0
    assert told == {
        "object": "usage",
        "start_time": month.start_ms // 1000,
        "end_time": month.end_ms // 1000,
        "total": sums,
        "key": sums,
        "models": [{"model": MODEL, **sums}],
    }
    assert (await get(world, other, asked)).json()["total"]["num_model_requests"] == 1
    long_ago = (await get(world, caller, "/v1/usage?month=2001-12")).json()
    assert (long_ago["models"], long_ago["total"]["num_model_requests"]) == ([], 0)
    assert (await get(world, caller, "/v1/usage")).status_code == 200
    assert await world.usage(caller) == rows, "to be told is no request"


async def test_a_tenant_reads_one_month_at_a_time_and_leaves_others_their_turn(
    world: World,
) -> None:
    caller, other = await world.add_caller(), await world.add_caller()
    async with world.postgres.transaction() as conn:
        await conn.execute("LOCK TABLE usage_sums IN ACCESS EXCLUSIVE MODE")
        same = [asyncio.create_task(get(world, caller, "/v1/usage?month=2020-01")) for _ in "ab"]
        await until(lambda: len(world.gateway.own_usage.under_way) == 1)
        refused = await get(world, caller, "/v1/usage?month=2020-02")
        assert refused.status_code == 503
        others = asyncio.create_task(get(world, other, "/v1/usage?month=2020-02"))
        await until(lambda: len(world.gateway.own_usage.under_way) == 2)
    assert [(await each).status_code for each in (*same, others)] == [200, 200, 200]
    assert not world.gateway.own_usage.under_way


async def test_what_is_asked_otherwise_is_refused_by_name(world: World) -> None:
    caller = await world.add_caller()
    for path, param in (
        ("/v1/usage?month=2026-13", "month"),
        ("/v1/usage?month=1969-01", "month"),
        ("/v1/usage?tenant=ten_1", "tenant"),
        ("/v1/limits?key=key_1", "key"),
    ):
        refused = await get(world, caller, path)
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    nobody = Caller(caller.tenant_id, caller.key_id, "hw_no")
    for path in ("/v1/usage", "/v1/limits"):
        assert (await get(world, nobody, path)).status_code == 401
        async with httpx.AsyncClient(base_url=world.url) as client:
            assert (await client.post(path, headers=headers_of(caller))).status_code == 405


def stopped(world: World) -> None:
    """Time stands still for limits."""
    decider: Any = world.gateway._dispatch._decider
    decider.remote.limits_now = str(time.time_ns() // 1_000_000)
