"""Idempotency-Key: one generation and one bill, whoever asks how often, and the same answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from core.idempotency import Claim
from core.money import EndCause
from core.tickets import Limits
from store.idempotency import find
from store.ledger import BILLING_CAUSES, Ledger
from store.queries import load
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.client import ask
from tests.support.gateway_requests import CHAT, MESSAGES, PATHS, a_body, error_of, headers_of
from tests.support.gateway_world import MODEL, Caller, World, a_world, until_answered
from tests.support.ledger_commands import a_reserve
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import answers, fails, hangs, says

pytestmark = [pytest.mark.anyio, pytest.mark.services]

KEY = {"idempotency-key": "order 7 / Müller".encode()}


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path, idempotency_bytes_max=20_000) as made:
        yield made


@pytest.fixture
async def two_gateways(world: World) -> World:
    await world.start_gateway()
    return world


async def keyed(
    world: World,
    caller: Caller,
    path: str = CHAT,
    *,
    gateway: int = 0,
    headers: dict[str, Any] | None = None,
    **fields: Any,
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=world.url_of(gateway), timeout=30) as client:
        said = headers_of(caller, path) | KEY | (headers or {})
        return await client.post(path, json=a_body(path, **fields), headers=said)


async def once(world: World, caller: Caller) -> None:
    """One generation, one bill, nothing held."""
    assert len(world.worker.requests) == 1
    rows = await world.settled(caller, 1)
    assert await world.balance(caller) == (rows[0].billed_micro, 0)
    await world.dispatcher_is_empty()


async def test_a_repeat_is_the_same_bytes_and_costs_nothing(two_gateways: World) -> None:
    for path in PATHS:
        await a_repeat(two_gateways, await two_gateways.add_caller(), path)
        two_gateways.worker.requests.clear()


async def a_repeat(world: World, caller: Caller, path: str) -> None:
    first = await keyed(world, caller, path)
    assert first.status_code == 200, first.text
    assert "x-headworks-replayed" not in first.headers
    await world.settled(caller, 1)
    again = await keyed(world, caller, path, gateway=1)
    assert again.content == first.content
    assert again.headers["x-headworks-replayed"] == "true"
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    await once(world, caller)


async def test_an_answer_is_told_again_as_a_stream_or_not(world: World, caller: Caller) -> None:
    world.worker.default = answers(20)
    first = await keyed(world, caller, stream=True)
    await world.settled(caller, 1)
    whole = await keyed(world, caller)
    streamed = await keyed(world, caller, stream=True)
    assert whole.headers["content-type"] == "application/json"
    assert whole.headers["x-headworks-replayed"] == "true"
    told = [check_openai_chat_stream(a.content, include_usage=False) for a in (first, streamed)]
    assert told[0] == told[1]
    await once(world, caller)


async def test_a_message_is_told_again_as_a_stream_or_not(world: World, caller: Caller) -> None:
    first = await keyed(world, caller, MESSAGES)
    await world.settled(caller, 1)
    streamed = await keyed(world, caller, MESSAGES, stream=True)
    check_anthropic_stream(streamed.content)
    assert b"w0.4" in streamed.content
    assert (await keyed(world, caller, MESSAGES)).content == first.content
    await once(world, caller)


async def test_tool_calls_and_logprobs_come_again_as_they_were(
    world: World, caller: Caller
) -> None:
    world.worker.default = says("One ", "two ", "three")
    fields = {"logprobs": True, "top_logprobs": 1, "n": 2}
    first = await keyed(world, caller, **fields)
    await world.settled(caller, 1)
    assert (await keyed(world, caller, **fields)).content == first.content
    await once(world, caller)


async def test_of_twenty_at_two_gateways_one_is_generated(two_gateways: World) -> None:
    world, caller = two_gateways, await two_gateways.add_caller()
    world.worker.default = answers(20, gap_s=0.02)
    crowd = await asyncio.gather(*(keyed(world, caller, gateway=i % 2) for i in range(20)))
    statuses = sorted(answer.status_code for answer in crowd)
    assert statuses == [200, *[409] * 19]
    for answer in crowd:
        if answer.status_code == 409:
            assert answer.headers["retry-after-ms"] in {"1000", "100"}
            assert "x-should-retry" not in answer.headers
    assert len(world.worker.requests) == 1
    rows = await world.settled(caller, len(await world.usage(caller)))
    assert [row.cause for row in rows if row.billed_micro] == [EndCause.COMPLETE]
    assert await world.balance(caller) == (sum(row.billed_micro for row in rows), 0)
    await world.dispatcher_is_empty()


async def test_another_body_or_header_under_a_key_is_told_so(world: World, caller: Caller) -> None:
    await keyed(world, caller)
    await world.settled(caller, 1)
    for other in (
        await keyed(world, caller, max_tokens=49),
        await keyed(world, caller, user="somebody"),
        await keyed(world, caller, headers={"x-headworks-of-ours": "1"}),
    ):
        assert other.status_code == 422
        assert "another request" in error_of(other)["message"]
    waits = await keyed(world, caller, headers={"x-headworks-deadline-ms": "9000"})
    assert waits.headers["x-headworks-replayed"] == "true"
    await once(world, caller)


async def test_a_key_is_one_tenant_s_and_one_path_s(world: World, caller: Caller) -> None:
    await keyed(world, caller)
    for who, path in ((await world.add_caller(), CHAT), (caller, MESSAGES)):
        answer = await keyed(world, who, path)
        assert answer.status_code == 200
        assert "x-headworks-replayed" not in answer.headers
    assert len(world.worker.requests) == 3


async def test_a_bad_key_is_refused(world: World, caller: Caller) -> None:
    for key in (b"", b"\xc2\xa0", b"a" * 256, b"\xff\xfe", b"tab\tin"):
        answer = await keyed(world, caller, headers={"idempotency-key": key})
        assert answer.status_code == 400, key
        assert error_of(answer)["param"] == "Idempotency-Key"
    assert world.worker.requests == []


async def test_who_left_may_ask_again_and_pays_once(world: World, caller: Caller) -> None:
    world.worker.script = [answers(300, gap_s=0.01)]
    world.worker.default = answers(50)
    await leave(world, caller, after_s=0.4)
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.CLIENT_CANCELLED
    assert row.billed_micro > 0
    again = await keyed(world, caller)
    assert again.status_code == 200
    assert "x-headworks-replayed" not in again.headers
    first, second = await world.settled(caller, 2)
    assert first.billed_micro + first.adjusted_micro == 0
    assert await world.balance(caller) == (second.billed_micro, 0)


async def leave(world: World, caller: Caller, *, after_s: float) -> None:
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                CHAT, json=a_body(CHAT), headers=headers_of(caller) | KEY, timeout=after_s
            )


async def test_what_is_no_whole_answer_leaves_the_key_open(world: World, caller: Caller) -> None:
    """Refused before it began, failed in the middle, out of time; then answered."""
    world.worker.script = [fails(retryable=False, after=3), hangs()]
    assert (await keyed(world, caller, model="nothing")).status_code == 404
    assert (await keyed(world, caller)).status_code == 500
    await world.settled(caller, 1)
    short = {"x-headworks-first-token-ms": "200"}
    assert (await keyed(world, caller, headers=short)).status_code == 504
    await world.settled(caller, 2)
    again = await keyed(world, caller)
    assert again.status_code == 200
    assert "x-headworks-replayed" not in again.headers


async def test_an_answer_too_large_to_keep_is_never_generated_twice(
    world: World, caller: Caller
) -> None:
    world.worker.default = says("x" * 9_000)
    assert (await keyed(world, caller)).status_code == 200
    await world.settled(caller, 1)
    again = await keyed(world, caller)
    assert again.status_code == 422
    assert "too large to keep" in error_of(again)["message"]
    await once(world, caller)


async def test_a_key_of_a_dead_gateway_opens_when_its_request_is_swept(
    world: World, caller: Caller
) -> None:
    ledger = await Ledger.open(world.settings.database_url)
    first = await keyed(world, caller)
    (row,) = await world.settled(caller, 1)
    async with world.postgres.transaction() as conn:
        cursor = await conn.execute(
            "SELECT scope, key, fingerprint FROM idempotency_keys WHERE tenant_id = %s",
            (caller.tenant_id,),
        )
        scope, key, fingerprint = (await cursor.fetchall())[0]
        await conn.execute("DELETE FROM idempotency_keys WHERE tenant_id = %s", (caller.tenant_id,))
    dead = a_reserve(
        f"{row.request_id[:-1]}x",
        gateway_id="gw_dead",
        tenant_id=caller.tenant_id,
        price_id=row.price_id,
        claim=Claim(scope=scope, key=key, fingerprint=fingerprint),
    )
    await ledger.reserve(dead)
    await ledger.close()
    waits = await keyed(world, caller)
    assert (waits.status_code, waits.headers["retry-after"]) == (409, "1")
    async with world.postgres.transaction() as conn:
        await conn.execute(
            load("leases")["expire"],
            {"request_ids": [dead.request_id], "billing_causes": BILLING_CAUSES},
        )
    again = await keyed(world, caller)
    assert again.status_code == 200
    assert again.json()["choices"] == first.json()["choices"]


async def test_the_official_sdk_retries_until_its_answer_is_there(two_gateways: World) -> None:
    world, caller = two_gateways, await two_gateways.add_caller()
    world.worker.default = answers(30, gap_s=0.02)
    clients = [
        openai.AsyncOpenAI(api_key=caller.key, base_url=f"{world.url_of(i)}/v1", max_retries=5)
        for i in range(2)
    ]
    told = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=30,
                extra_headers={"Idempotency-Key": "sdk"},
            )
            for client in clients
        )
    )
    assert told[0].id == told[1].id
    assert told[0].choices[0].message.content == told[1].choices[0].message.content
    assert len(world.worker.requests) == 1
    for client in clients:
        await client.close()


async def test_a_repeat_consumes_no_limit(world: World) -> None:
    caller = await world.add_caller(limits=Limits(requests_per_min=1))
    first = await keyed(world, caller)
    await world.settled(caller, 1)
    for _ in range(5):
        assert (await keyed(world, caller)).content == first.content
    assert (await keyed(world, caller, headers={"idempotency-key": "2"})).status_code == 429
    await once_of_two(world, caller)


async def once_of_two(world: World, caller: Caller) -> None:
    assert len(world.worker.requests) == 1
    rows = await world.settled(caller, len(await world.usage(caller)))
    assert await world.balance(caller) == (sum(row.billed_micro for row in rows), 0)


async def test_a_client_that_leaves_a_replay_breaks_nothing(world: World, caller: Caller) -> None:
    await keyed(world, caller)
    await world.settled(caller, 1)
    await ask(world.url, CHAT, caller.key, a_body(CHAT), leave_after_s=0.0)
    assert (await keyed(world, caller)).status_code == 200
    async with world.postgres.connection() as conn:
        found = await find(
            conn,
            tenant_id=caller.tenant_id,
            scope=f"POST {CHAT}",
            key=KEY["idempotency-key"].decode(),
        )
    assert found is not None
    assert found.answer


async def test_whoever_races_and_leaves_each_key_costs_one_answer(two_gateways: World) -> None:
    """Six keys, each asked four times at both gateways by clients that mostly leave."""
    world, caller = two_gateways, await two_gateways.add_caller()
    world.worker.default = answers(20, gap_s=0.01)

    async def impatient(number: int, key: int) -> None:
        async with httpx.AsyncClient(base_url=world.url_of(number % 2), timeout=30) as client:
            said = headers_of(caller) | {"idempotency-key": f"k{key}"}
            patience_s = 0.03 * (1 + (number * 7 + key * 3) % 11)
            with suppress(httpx.TimeoutException):
                body = a_body(CHAT, stream=number % 3 == 0)
                await client.post(CHAT, json=body, headers=said, timeout=patience_s)

    async def patient(key: int) -> None:
        said = {"idempotency-key": f"k{key}"}

        async def is_answered() -> bool:
            return (await keyed(world, caller, headers=said)).status_code == 200

        await until_answered(is_answered, within_s=40)

    await asyncio.gather(*(impatient(n, key) for n in range(4) for key in range(6)))
    await asyncio.gather(*(patient(key) for key in range(6)))
    rows = await world.settled(caller, len(await world.usage(caller)))
    one = max(row.billed_micro for row in rows)
    costs = [row.billed_micro + row.adjusted_micro for row in rows]
    assert sorted(cost for cost in costs if cost) == [one] * 6
    assert await world.balance(caller) == (6 * one, 0)
    await world.dispatcher_is_empty()
