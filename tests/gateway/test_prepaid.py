"""A prepaid tenant, from the operator's credit to the last micro-unit of it.

The price is so dear that what is held at first for an answer is a fifth of the credit: far more
callers than can be served at once, and all of them greedy.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from core.ids import KeyId
from core.money import EndCause, Price, worst_case_micro
from core.pricing import ListedPrice
from store.prices import seed_prices
from tests.support.control_plane import ControlPlane, running, the_settings
from tests.support.gateway_requests import (
    CHAT,
    MESSAGES,
    a_body,
    error_of,
    headers_of,
    post,
    text_of,
)
from tests.support.gateway_world import MODEL, Caller, World, a_world, until_answered
from tests.support.registry import open_postgres
from tests.support.scripted_worker import answers

pytestmark = [pytest.mark.anyio, pytest.mark.services]

CREDIT = 1_000_000  # one dollar
DEAR = Price(
    id="dear",
    input_micro=10_000_000,
    cached_input_micro=10_000_000,
    output_micro=1_000_000_000,
)
FIRST_TOKENS = 200  # a fifth of the credit
CLIENTS = 50
GREED = 350  # tokens: two such answers and most of a third, if they were held whole


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with open_postgres(postgres_url) as postgres, postgres.transaction() as conn:
        await conn.execute("INSERT INTO price_books (id) VALUES ('dear') ON CONFLICT DO NOTHING")
        await seed_prices(conn, [ListedPrice(book="dear", model=MODEL, effective_ms=0, price=DEAR)])
    settings = {"reserve_output_tokens": FIRST_TOKENS}
    async with a_world(postgres_url, valkey_url, tmp_path, **settings) as made:
        made.worker.default = answers(1_000, gap_s=0.002)
        yield made


@pytest.fixture
async def plane(world: World) -> AsyncIterator[ControlPlane]:
    settings = the_settings(world.settings.database_url, world.settings.redis_url)
    async with running(settings) as made:
        yield made


async def a_prepaid_caller(plane: ControlPlane, credit: int = CREDIT) -> Caller:
    """A tenant as an operator makes one that has paid."""
    name = f"prepaid {secrets.token_hex(4)}"
    tenant = (await plane.made("/tenants", {"name": name, "price_book": "dear"}))["id"]
    terms = {"prepaid": True, "hard_cap_micro": None}
    assert (await plane.admin("PUT", f"/tenants/{tenant}/account", terms)).status_code == 200
    await give_credit(plane, tenant, credit)
    key = await plane.made(f"/tenants/{tenant}/keys", {"name": "main"})
    return Caller(tenant, KeyId(key["id"]), key["key"])


async def give_credit(plane: ControlPlane, tenant: str, amount: int) -> None:
    body = {"id": secrets.token_hex(8), "amount_micro": amount, "reason": "paid by card"}
    await plane.made(f"/tenants/{tenant}/credits", body)


async def use_all(
    client: httpx.AsyncClient, caller: Caller, times: int
) -> tuple[int, httpx.Response | None]:
    """Ask for much more than there is, so often or until refused: how many answers, the refusal."""
    for answered in range(times):
        body = a_body(CHAT, max_tokens=GREED)
        response = await client.post(CHAT, json=body, headers=headers_of(caller))
        if response.status_code != httpx.codes.OK:
            return answered, response
        assert text_of(CHAT, response)
        assert response.json()["choices"][0]["finish_reason"] == "length"
    return times, None


class Sums(msgspec.Struct, frozen=True):
    """What a refusal says, in micro-units."""

    cap: int
    spent: int
    reserved: int
    fits: int


def sums_of(message: str) -> Sums:
    assert message.startswith("Your account's prepaid credit of ")
    amounts = re.findall(r"(\d+)\.(\d{6}) USD", message)
    cap, spent, reserved, fits = (int(whole) * 1_000_000 + int(part) for whole, part in amounts)
    return Sums(cap, spent, reserved, fits)


@pytest.mark.parametrize("times", [1, 100])
async def test_fifty_greedy_clients_use_a_dollar_and_never_more(
    world: World, plane: ControlPlane, times: int
) -> None:
    caller = await a_prepaid_caller(plane)
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=world.url, timeout=60, limits=limits) as client:
        asking = [asyncio.create_task(use_all(client, caller, times)) for _ in range(CLIENTS)]
        least = CREDIT
        while not all(task.done() for task in asking):
            posted, reserved = await world.balance(caller)
            least = min(least, CREDIT - posted - reserved)
            await asyncio.sleep(0.005)
        ends = [await task for task in asking]
    assert least >= 0
    answered = sum(count for count, _ in ends)
    rows = await world.settled(caller, answered)
    posted, reserved = await world.balance(caller)
    assert (posted, reserved) == (sum(row.billed_micro for row in rows), 0)
    assert 0.9 * CREDIT <= posted <= CREDIT
    assert all(row.cause is EndCause.LENGTH for row in rows)
    # Not only when somebody looked: each entry holds the balances after it.
    async with world.postgres.connection() as conn:
        cursor = await conn.execute(
            "SELECT count(*) FROM entries"
            " WHERE tenant_id = %s AND posted_micro + reserved_micro > credit_micro",
            (caller.tenant_id,),
        )
        assert await cursor.fetchone() == (0,)
    refusals = [refused for _, refused in ends if refused is not None]
    assert len(refusals) == (CLIENTS if times > 1 else CLIENTS - answered)
    for refused in refusals:
        assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert error_of(refused)["code"] == "insufficient_quota"
        assert refused.headers["x-should-retry"] == "false"
        sums = sums_of(error_of(refused)["message"])
        assert sums.cap == CREDIT
        assert sums.fits == CREDIT - sums.spent - sums.reserved
    await world.dispatcher_is_empty()


async def test_a_refusal_says_the_same_sums_in_both_dialects(
    world: World, plane: ControlPlane
) -> None:
    caller = await a_prepaid_caller(plane, credit=16_000)  # less than sixteen tokens and a prompt
    for path, kind in [(CHAT, "insufficient_quota"), (MESSAGES, "rate_limit_error")]:
        refused = await post(world, caller, path)
        assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert error_of(refused)["type"] == kind
        assert refused.headers["x-should-retry"] == "false"
        assert sums_of(error_of(refused)["message"]) == Sums(16_000, 0, 0, 16_000)
    assert (await post(world, caller, max_tokens=10)).status_code == httpx.codes.OK
    assert world.worker.requests[0].sampling.max_tokens == 10


async def test_an_answer_ends_where_its_credit_does_and_goes_on_with_more(
    world: World, plane: ControlPlane
) -> None:
    caller = await a_prepaid_caller(plane, credit=60_000)
    short = await post(world, caller, max_tokens=450)
    (row,) = await world.settled(caller, 1)
    assert row.amount_micro > 60_000 == row.reserved_micro
    assert short.json()["choices"][0]["finish_reason"] == "length"
    within = worst_case_micro(
        DEAR, prompt_tokens=row.prompt_tokens, output_tokens=row.accepted_tokens
    )
    assert row.billed_micro == min(within, 60_000)
    assert row.billed_micro >= 0.9 * 60_000
    assert (await post(world, caller)).status_code == httpx.codes.TOO_MANY_REQUESTS
    await give_credit(plane, caller.tenant_id, 100_000)
    assert (await post(world, caller, max_tokens=50)).status_code == httpx.codes.OK


async def test_a_keys_day_is_kept_by_the_gateway_that_hears_of_it(
    world: World, plane: ControlPlane
) -> None:
    caller = await a_prepaid_caller(plane)
    other = await plane.made(f"/tenants/{caller.tenant_id}/keys", {"name": "other"})
    assert (await post(world, caller, max_tokens=5)).status_code == httpx.codes.OK
    cap = await plane.admin("PUT", f"/keys/{caller.key_id}/caps/day", {"hard_micro": 5_100})
    assert cap.json()["posted_micro"] > 5_000

    async def refused() -> bool:
        response = await post(world, caller, max_tokens=5)
        if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
            return False
        return "This API key's budget of 0.005100 USD for this day" in response.text

    await until_answered(refused)
    its_other = Caller(caller.tenant_id, KeyId(other["id"]), other["key"])
    assert (await post(world, its_other, max_tokens=5)).status_code == httpx.codes.OK
