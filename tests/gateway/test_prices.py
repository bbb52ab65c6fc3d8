"""Which price a request is charged at, and what becomes of one that has none."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from core.money import Price
from core.pricing import UNPRICED, ListedPrice
from core.protocol import Finished, Started, Timings, Usage
from gateway import anthropic, openai
from store import registry, tenants
from store.prices import PriceBook, create_book, seed_prices
from tests.support.gateway_requests import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PATHS,
    a_body,
    error_of,
    headers_of,
    post,
)
from tests.support.gateway_world import (
    DEPLOYMENT,
    MODEL,
    Caller,
    World,
    a_world,
    until,
    until_answered,
)
from tests.support.scripted_worker import Run, produce

pytestmark = [pytest.mark.anyio, pytest.mark.services]

# Public names: one without any price, one with several, and one that gets its first.
BARE, SOLD, NEW = "bare", "sold", "new"


def a_price(price_id: str, input_micro: int, **changes: int) -> Price:
    rates = {"cached_input_micro": 0, "output_micro": 0} | changes
    return Price(id=price_id, input_micro=input_micro, **rates)


PARTS = a_price(
    "parts",
    1_000_000,
    cached_input_micro=100_000,
    cache_write_5m_micro=10_000_000,
    cache_write_1h_micro=100_000_000,
    output_micro=1_000_000_000,
    reasoning_micro=10_000_000_000,
    request_micro=7,
)
PRICES = [
    ListedPrice(model=SOLD, effective_ms=0, price=PARTS),
    ListedPrice(model=SOLD, service_class="batch", effective_ms=0, price=a_price("batch", 2)),
    ListedPrice(model=SOLD, book="acme", effective_ms=0, price=a_price("acme", 3)),
    ListedPrice(model=SOLD, book="acme", tier="gold", effective_ms=0, price=a_price("gold", 4)),
    ListedPrice(
        model=SOLD,
        book="acme",
        tier="gold",
        service_class="interactive",
        effective_ms=0,
        price=a_price("gold-interactive", 5),
    ),
    ListedPrice(model=SOLD, book="acme", effective_ms=2**52, price=a_price("some-day", 6)),
]


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path) as made:
        async with made.postgres.transaction() as conn:
            await create_book(conn, PriceBook(id="acme", description=""))
            await seed_prices(conn, PRICES)
            for name in (BARE, SOLD):
                await registry.put_route(
                    conn, model=name, deployment=DEPLOYMENT, max_output_tokens=0
                )
        await until(lambda: {BARE, SOLD} <= made.names)
        yield made


async def a_caller(world: World, **terms: str | bool) -> Caller:
    """Of a tenant with these terms, which no gateway has seen with others."""
    caller = await world.add_caller()
    async with world.postgres.transaction() as conn:
        tenant = await tenants.tenant_for_change(conn, caller.tenant_id)
        assert tenant is not None
        await tenants.change_tenant(conn, msgspec.structs.replace(tenant, **terms))
    return caller


async def test_a_billed_tenant_is_refused_what_has_no_price(world: World, caller: Caller) -> None:
    for path, told in ((CHAT, "invalid_request_error"), (MESSAGES, "permission_error")):
        for stream in (False, True):
            refused = await post(world, caller, path, model=BARE, stream=stream)
            assert refused.status_code == 403
            assert error_of(refused)["type"] == told
            assert BARE in error_of(refused)["message"]
    assert error_of(await post(world, caller, COMPLETIONS, model=BARE))["code"] == (
        "model_not_priced"
    )
    assert await world.usage(caller) == []
    assert await world.balance(caller) == (0, 0)
    assert world.worker.requests == []


async def test_it_is_not_told_of_it_either(world: World, caller: Caller) -> None:
    free = await a_caller(world, billed=False)
    async with httpx.AsyncClient(base_url=world.url) as client:
        shown = [
            {
                card["id"]
                for card in (await client.get("/v1/models", headers=headers)).json()["data"]
            }
            for headers in map(headers_of, (caller, free))
        ]
        one = await client.get(f"/v1/models/{BARE}", headers=headers_of(caller))
        body = a_body(MESSAGES, model=BARE, max_tokens=None)
        counted = [
            await client.post(
                f"{MESSAGES}/count_tokens", json=body, headers=headers_of(who, MESSAGES)
            )
            for who in (caller, free)
        ]
    assert [names & {MODEL, SOLD, BARE} for names in shown] == [{MODEL, SOLD}, {MODEL, SOLD, BARE}]
    assert (one.status_code, error_of(one)["code"]) == (403, "model_not_priced")
    assert [response.status_code for response in counted] == [403, 200]


async def test_who_is_not_billed_uses_it_for_nothing(world: World) -> None:
    free = await a_caller(world, billed=False)
    for path in PATHS:
        assert (await post(world, free, path, model=BARE)).status_code == 200
    for row in await world.settled(free, len(PATHS)):
        assert (row.price_id, row.billed_micro) == (UNPRICED.id, 0)
        assert row.metered_output_tokens > 0
    # What has a price costs what it costs, billed or not.
    assert (await post(world, free, CHAT, model=SOLD)).status_code == 200
    rows = await world.settled(free, len(PATHS) + 1)
    assert rows[-1].price_id == PARTS.id
    assert rows[-1].billed_micro > 0


async def test_a_request_is_priced_by_its_tenants_terms_and_its_class(world: World) -> None:
    acme = {"price_book": "acme"}
    for terms, service_tier, expected in [
        ({}, "default", "parts"),
        ({}, "flex", "batch"),
        (acme, "flex", "acme"),
        (acme | {"tier": "gold"}, "flex", "gold"),
        (acme | {"tier": "gold"}, "priority", "gold-interactive"),
        ({"tier": "gold"}, "priority", "parts"),
    ]:
        caller = await a_caller(world, **terms)
        answer = await post(world, caller, CHAT, model=SOLD, service_tier=service_tier)
        assert answer.status_code == 200, answer.text
        (row,) = await world.settled(caller, 1)
        assert row.price_id == expected


async def test_a_new_price_counts_within_a_moment(world: World) -> None:
    caller = await a_caller(world)
    async with world.postgres.transaction() as conn:
        await registry.put_route(conn, model=NEW, deployment=DEPLOYMENT, max_output_tokens=0)
    await until(lambda: NEW in world.names)
    assert (await post(world, caller, CHAT, model=NEW)).status_code == 403
    price = a_price("new", 1_000_000)
    async with world.postgres.transaction() as conn:
        await seed_prices(conn, [ListedPrice(model=NEW, effective_ms=1, price=price)])

    async def is_sold() -> bool:
        return (await post(world, caller, CHAT, model=NEW)).status_code == 200

    await until_answered(is_sold)
    (row,) = await world.settled(caller, 1)
    assert (row.price_id, row.billed_micro) == ("new", row.prompt_tokens)


async def in_parts(run: Run) -> None:
    """Of the prompt 2 tokens cached and 3 written, 1 of them for an hour; 2 of 5 thought."""
    run.cached_tokens = 2
    await run.start()
    await produce(run, 5, 0.0)
    run.ended = True
    usage = msgspec.structs.replace(
        run.usage, cache_write_5m_tokens=2, cache_write_1h_tokens=1, reasoning_tokens=2
    )
    word = Finished(cause="complete", usage=usage, timings=Timings(), journal_seq=1)
    await run.send(run.worker.load(), word)


async def test_every_part_is_told_and_charged(world: World) -> None:
    world.worker.default = in_parts
    for path in PATHS:
        caller = await a_caller(world)
        answer = await post(world, caller, path, model=SOLD)
        (row,) = await world.settled(caller, 1)
        usage = Usage(
            prompt_tokens=row.prompt_tokens,
            cached_tokens=2,
            cache_write_5m_tokens=2,
            cache_write_1h_tokens=1,
            output_tokens=5,
            reasoning_tokens=2,
        )
        dialect = anthropic if path == MESSAGES else openai
        assert dialect.to_usage(answer.json()["usage"]) == usage
        # 7 for the request; 0.2, 2 * 10 and 100 for what caches did; 3 * 1,000 and 2 * 10,000.
        assert row.billed_micro == 7 + (row.prompt_tokens - 5) + 120 + 23_000


async def test_totals_that_cannot_be_are_told_as_the_gateway_counted_them(world: World) -> None:
    async def lying(run: Run) -> None:
        run.started = True
        prompt = len(run.message.prompt_ids)
        begin = Started(boot_id=run.worker.boot_id, prompt_tokens=prompt, cached_tokens=prompt + 1)
        await run.send(begin)
        await produce(run, 5, 0.0)
        run.ended = True
        usage = Usage(prompt_tokens=prompt, cached_tokens=prompt + 1, output_tokens=-1)
        await run.send(Finished(cause="complete", usage=usage, timings=Timings(), journal_seq=1))

    world.worker.default = lying
    caller = await a_caller(world)
    for path in PATHS:
        assert (await post(world, caller, path)).status_code == 200
    for row in await world.settled(caller, len(PATHS)):
        assert row.metered_cached_tokens == row.metered_prompt_tokens == row.prompt_tokens
        assert row.metered_output_tokens == 5
