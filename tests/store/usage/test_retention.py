"""Months of usage: made ahead, and dropped when all that is of them is in the sums."""

import asyncio
import secrets
import time
from datetime import UTC, date, datetime

import pytest

from core.metering import Adjust, Adjusted, AdjustmentKind, LedgerRefused
from store.ledger import Ledger
from store.ledger_audit import audit
from store.postgres import Postgres, PostgresConfig
from store.retention import NotYetError, Retired, make_partitions, old_months, retire_month
from store.rollups import roll_up
from store.usage import UsageFilter, usage_of, usage_page
from store.usage_totals import DAY_MS, TotalsQuery, usage_totals
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]

OLD_MS = (time.time_ns() // 1_000_000 - 150 * DAY_MS) // DAY_MS * DAY_MS
_OLD = datetime.fromtimestamp(OLD_MS / 1000, UTC)
OLD = _OLD.year * 100 + _OLD.month


@pytest.fixture
async def pg(fresh_postgres_url):
    pg = await Postgres.open(PostgresConfig(database_url=fresh_postgres_url, application_name="t"))
    async with pg.transaction() as conn:
        await conn.execute("SELECT ledger_make_partitions(%s, 1)", (_OLD.date(),))
    yield pg
    await pg.close()


@pytest.fixture
async def ledger(pg, fresh_postgres_url):
    ledger = await Ledger.open(fresh_postgres_url)
    yield ledger
    await ledger.close()


@pytest.fixture
async def tenant(pg):
    return await a_tenant(pg)


async def reserve(ledger, tenant, at_ms=OLD_MS):
    request_id = f"req_local_{at_ms:012x}{secrets.token_hex(8)}"
    await ledger.reserve(a_reserve(request_id, tenant_id=tenant, created_ms=at_ms))
    return request_id


async def a_request(ledger, tenant, at_ms=OLD_MS):
    request_id = await reserve(ledger, tenant, at_ms)
    await ledger.settle(a_settle(request_id, tenant_id=tenant))
    return request_id


async def a_refund(ledger, tenant, request_id):
    return await ledger.adjust(
        Adjust(
            id=f"refund {secrets.token_hex(4)}",
            tenant_id=tenant,
            kind=AdjustmentKind.REFUND,
            amount_micro=10,
            request_id=request_id,
            reason="goodwill",
            author="admin",
        )
    )


async def months(pg):
    """The old one, if it is there: those that migrations make, all empty, get old in time too."""
    async with pg.connection() as conn:
        return [month for month in await old_months(conn, kept_months=1) if month == OLD]


async def billed(pg, tenant):
    query = TotalsQuery(from_ms=OLD_MS - 20 * DAY_MS, to_ms=OLD_MS + 400 * DAY_MS, tenant_id=tenant)
    async with pg.connection() as conn:
        (total,) = (await usage_totals(conn, query)).totals
    return total.requests, total.billed_micro, total.adjusted_micro


async def violations(pg):
    async with pg.connection() as conn:
        return (await audit(conn)).violations


async def test_partitions_are_made_for_three_months_ahead(pg):
    async with pg.transaction() as conn:
        for table in ("usage", "witnesses"):
            cursor = await conn.execute(
                "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass",
                (table,),
            )
            for (name,) in await cursor.fetchall():
                if not name.endswith("_other"):
                    await conn.execute(f"DROP TABLE {name}")
    assert await make_partitions(pg) == 8
    assert await make_partitions(pg) == 0
    assert await make_partitions(pg, months_ahead=4) == 2


async def test_partitions_are_made_when_a_reader_lets_go_of_the_tables(pg):
    async with pg.connection() as reader:
        await reader.execute("BEGIN")
        await reader.execute("SELECT count(*) FROM usage, witnesses")
        making = asyncio.create_task(make_partitions(pg, first=date(2031, 1, 1), months_ahead=1))
        await asyncio.sleep(0.25)  # it has given way at least once
        assert not making.done()
        # It may read on in what it has not touched yet: nobody waits for anybody in a ring.
        await reader.execute("SELECT count(*) FROM entries")
        await reader.execute("ROLLBACK")
    assert await making == 4


async def test_a_summed_month_goes_and_its_sums_stay(pg, ledger, tenant):
    old = await a_request(ledger, tenant)
    refunded = await a_request(ledger, tenant)
    new = await a_request(ledger, tenant, time.time_ns() // 1_000_000)
    assert isinstance(await a_refund(ledger, tenant, refunded), Adjusted)
    await roll_up(pg)
    before = await billed(pg, tenant)
    assert before == (3, 150, -10)
    assert await months(pg) == [OLD]
    assert await retire_month(pg, OLD) == Retired(month=OLD, requests=2)
    assert await months(pg) == []
    assert await retire_month(pg, OLD) is None
    assert await billed(pg, tenant) == before
    assert await violations(pg) == ()
    async with pg.connection() as conn:
        assert await usage_of(conn, old) is None
        for shown in (UsageFilter(), UsageFilter(tenant_id=tenant), UsageFilter(key_id="key_1")):
            page = await usage_page(conn, shown)
            assert [row.request_id for row in page.rows] == [new]
            assert page.older is None
    refused = await a_refund(ledger, tenant, refunded)
    assert isinstance(refused, LedgerRefused)
    assert (await roll_up(pg)).missing == 0


async def test_a_month_stays_while_something_of_it_is_open_or_not_summed(pg, ledger, tenant):
    open_one = await reserve(ledger, tenant)
    await roll_up(pg)
    with pytest.raises(NotYetError, match="1 open requests, 0 entries"):
        await retire_month(pg, OLD)
    await ledger.settle(a_settle(open_one, tenant_id=tenant))
    with pytest.raises(NotYetError, match="0 open requests, 1 entries"):
        await retire_month(pg, OLD)
    await roll_up(pg)
    await a_refund(ledger, tenant, open_one)
    with pytest.raises(NotYetError, match="0 open requests, 1 entries"):
        await retire_month(pg, OLD)
    await roll_up(pg)
    assert await retire_month(pg, OLD) == Retired(month=OLD, requests=1)


async def test_a_month_whose_sums_are_off_stays(pg, ledger, tenant):
    await a_request(ledger, tenant)
    await roll_up(pg)
    async with pg.transaction() as conn:
        await conn.execute("UPDATE usage_sums SET requests = requests + 1")
    with pytest.raises(NotYetError, match=tenant):
        await retire_month(pg, OLD)
    assert await months(pg) == [OLD]


async def test_a_drop_gives_way_to_readers_and_sees_what_happened_meanwhile(pg, ledger, tenant):
    old = await a_request(ledger, tenant)
    await roll_up(pg)
    async with pg.transaction() as reader:
        await reader.execute("SELECT FROM usage LIMIT 1")
        dropping = asyncio.create_task(retire_month(pg, OLD))
        await _waiting_for_usage(pg)
        for _ in range(10):
            await a_request(ledger, tenant, time.time_ns() // 1_000_000)
            await asyncio.sleep(0.05)
        assert not dropping.done()  # the token path went on while the drop waited for the reader
        assert isinstance(await a_refund(ledger, tenant, old), Adjusted)
    with pytest.raises(NotYetError, match=tenant):
        await dropping
    assert await months(pg) == [OLD]
    assert await violations(pg) == ()
    await roll_up(pg)
    assert await billed(pg, tenant) == (11, 550, -10)
    assert await retire_month(pg, OLD) == Retired(month=OLD, requests=1)


async def test_two_at_once_do_not_get_in_each_others_way(pg, ledger, tenant):
    await a_request(ledger, tenant)
    await roll_up(pg)
    done = await asyncio.gather(retire_month(pg, OLD), retire_month(pg, OLD))
    assert sorted(done, key=str) == [None, Retired(month=OLD, requests=1)]


async def _waiting_for_usage(pg):
    async with asyncio.timeout(10):
        while True:
            async with pg.connection() as conn:
                cursor = await conn.execute(
                    "SELECT FROM pg_locks WHERE relation = 'usage'::regclass AND NOT granted"
                )
                if await cursor.fetchone() is not None:
                    return
