"""Rounds of the roll-up: what becomes of late words, of a crash, of two at once, of the ledger."""

import asyncio

import pytest

from core.metering import Adjust, AdjustmentKind, RequestTimings
from core.money import EndCause
from store.ledger import BILLING_CAUSES
from store.postgres import StoreAwayError
from store.queries import load
from store.rollups import differences, freshness, rebuild, roll_up
from store.usage import HOUR_MS
from store.usage_totals import Total, TotalsQuery, usage_totals
from tests.support.ledger_commands import a_reserve, a_settle, an_attempt
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]

NOON_MS = 1_793_534_400_000  # 2026-11-01
LATER_MS = NOON_MS + 5 * HOUR_MS


@pytest.fixture
async def tenant(pg):
    return await a_tenant(pg)


async def reserve(ledger, tenant, number=1, **changes):
    request_id = f"{tenant}_{number}"
    await ledger.reserve(
        a_reserve(request_id, tenant_id=tenant, created_ms=NOON_MS + 59 * 60_000, **changes)
    )
    return request_id


async def sweep(pg, request_id):
    async with pg.transaction() as conn:
        values = {"request_ids": [request_id], "billing_causes": BILLING_CAUSES}
        await conn.execute(load("leases")["expire"], values)


async def roll_all(pg):
    while (await roll_up(pg)).entries:
        pass


async def by_cause(pg, tenant) -> dict[str, Total]:
    query = TotalsQuery(
        from_ms=NOON_MS,
        to_ms=NOON_MS + 10 * HOUR_MS,
        bucket="hour",
        by=frozenset({"cause"}),
        tenant_id=tenant,
    )
    async with pg.connection() as conn:
        found = (await usage_totals(conn, query)).totals
        assert await differences(conn, tenant) == []
    assert all(total.bucket_ms == NOON_MS for total in found)
    return {total.cause: total for total in found}


async def test_a_late_word_moves_a_request_from_one_cause_to_another(pg, ledger, tenant):
    request_id = await reserve(ledger, tenant)
    await sweep(pg, request_id)
    await roll_all(pg)
    assert {cause: t.requests for cause, t in (await by_cause(pg, tenant)).items()} == {
        "not_started": 1
    }
    timings = RequestTimings(first_token_ms=20.25, inter_token_ms=3.0)
    await ledger.settle(a_settle(request_id, tenant_id=tenant, timings=timings, ended_ms=LATER_MS))
    await roll_all(pg)
    (complete,) = (await by_cause(pg, tenant)).values()
    assert (complete.cause, complete.requests, complete.billed_micro) == ("complete", 1, 50)
    assert (complete.first_token_count, complete.first_token_us) == (1, 20_250)
    assert (complete.inter_token_count, complete.inter_token_us) == (1, 3_000)
    assert (complete.output_tokens, complete.accepted_tokens, complete.delivered_tokens) == (
        (20, 20, 20)
    )


async def test_what_operators_change_later_lands_in_the_requests_hour(pg, ledger, tenant):
    request_id = await reserve(ledger, tenant)
    await ledger.settle(a_settle(request_id, tenant_id=tenant))
    await roll_all(pg)
    refund = Adjust(
        id=f"{tenant}_refund",
        tenant_id=tenant,
        kind=AdjustmentKind.REFUND,
        amount_micro=20,
        request_id=request_id,
        reason="goodwill",
        author="admin",
    )
    await ledger.adjust(refund)
    await ledger.adjust(refund)
    await roll_all(pg)
    (complete,) = (await by_cause(pg, tenant)).values()
    assert (complete.billed_micro, complete.adjusted_micro) == (50, -20)


async def test_a_request_counts_only_when_it_has_ended(pg, ledger, tenant):
    request_id = await reserve(ledger, tenant)
    await roll_all(pg)
    assert await by_cause(pg, tenant) == {}
    await ledger.release(request_id, tenant, ended_ms=LATER_MS)
    async with pg.connection() as conn:
        behind = await freshness(conn, tenant)
    assert behind.entries_behind == 1
    await roll_all(pg)
    (released,) = (await by_cause(pg, tenant)).values()
    assert (released.cause, released.requests, released.billed_micro) == ("not_started", 1, 0)
    async with pg.connection() as conn:
        caught_up = await freshness(conn, tenant)
    assert caught_up.entries_behind == 0
    assert caught_up.fresh_as_of_ms > behind.fresh_as_of_ms


async def test_a_round_that_dies_counts_nothing_and_the_ledger_does_not_wait_for_it(
    pg, ledger, tenant
):
    for number in (1, 2):
        request_id = await reserve(ledger, tenant, number)
        await ledger.settle(a_settle(request_id, tenant_id=tenant))
        if number == 1:
            await roll_all(pg)
    async with pg.transaction() as conn:
        await conn.execute("SELECT FROM usage_sums WHERE tenant_id = %s FOR UPDATE", (tenant,))
        stuck = asyncio.create_task(roll_up(pg))
        pid = await _waiting_backend(pg)
        # It has everything it will ever lock, and has written half of it.
        async with asyncio.timeout(1):
            third = await reserve(ledger, tenant, 3)
            await ledger.settle(a_settle(third, tenant_id=tenant))
        await conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
        with pytest.raises(StoreAwayError):
            await stuck
    assert sum(t.requests for t in (await _hours(pg, tenant))) == 1
    await roll_all(pg)
    (complete,) = (await by_cause(pg, tenant)).values()
    assert (complete.requests, complete.billed_micro) == (3, 150)


async def test_a_round_passes_over_accounts_that_another_holds(pg, ledger, tenant):
    await roll_all(pg)
    other = await a_tenant(pg)
    for name in (tenant, other):
        request_id = await reserve(ledger, name)
        await ledger.settle(a_settle(request_id, tenant_id=name))
    await roll_up(pg, entries_max=0)  # makes positions, moves none
    async with pg.transaction() as conn:
        await conn.execute(
            "SELECT FROM rollup_positions WHERE tenant_id = %s FOR UPDATE", (tenant,)
        )
        assert (await roll_up(pg)).requests == 1
        assert (await roll_up(pg)).entries == 0
    assert (await roll_up(pg)).requests == 1
    assert len(await by_cause(pg, tenant)) == len(await by_cause(pg, other)) == 1


async def test_a_round_is_bounded_and_takes_the_longest_neglected_first(pg, ledger, tenant):
    await roll_all(pg)
    for number in range(4):
        request_id = await reserve(ledger, tenant, number)
        await ledger.settle(a_settle(request_id, tenant_id=tenant))
    assert [(await roll_up(pg, entries_max=3)).entries for _ in range(4)] == [3, 3, 2, 0]
    (complete,) = (await by_cause(pg, tenant)).values()
    assert complete.requests == 4


async def test_sums_taken_anew_are_the_same(pg, ledger, tenant):
    for number, cause in enumerate([EndCause.COMPLETE, EndCause.FAILED, EndCause.LENGTH]):
        request_id = await reserve(ledger, tenant, number, key_id=f"key_{number}")
        await ledger.settle(
            a_settle(request_id, tenant_id=tenant, cause=cause, attempts=(an_attempt(),))
        )
    late = await reserve(ledger, tenant, 9)
    await sweep(pg, late)
    await roll_all(pg)
    await ledger.settle(a_settle(late, tenant_id=tenant))
    await roll_all(pg)
    before = await by_cause(pg, tenant)
    assert await rebuild(pg, tenant) == 9
    assert await by_cause(pg, tenant) == before
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT count(*) FROM usage_sums WHERE tenant_id = %s AND requests = 0", (tenant,)
        )
        assert await cursor.fetchone() == (0,)
    assert (await roll_up(pg)).entries == 0
    assert await rebuild(pg, "ten_unknown") == 0


async def test_a_sum_that_is_off_is_told(pg, ledger, tenant):
    request_id = await reserve(ledger, tenant)
    await ledger.settle(a_settle(request_id, tenant_id=tenant))
    await roll_all(pg)
    async with pg.transaction() as conn:
        await conn.execute(
            "UPDATE usage_sums SET billed_micro = billed_micro + 1 WHERE tenant_id = %s", (tenant,)
        )
        assert len(await differences(conn, tenant)) == 4  # kept and counted, hour and day
    await rebuild(pg, tenant)
    assert len(await by_cause(pg, tenant)) == 1


async def _hours(pg, tenant) -> list[Total]:
    query = TotalsQuery(from_ms=NOON_MS, to_ms=NOON_MS + HOUR_MS, tenant_id=tenant)
    async with pg.connection() as conn:
        return (await usage_totals(conn, query)).totals


async def _waiting_backend(pg) -> int:
    async with asyncio.timeout(10):
        while True:
            async with pg.connection() as conn:
                cursor = await conn.execute(
                    "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                    " AND datname = current_database()"
                )
                row = await cursor.fetchone()
            if row is not None:
                return int(row[0])
            await asyncio.sleep(0.01)
