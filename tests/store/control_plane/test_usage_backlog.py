"""Readers of sums that are behind bring them up to date in small steps, or have older ones."""

import asyncio
import secrets
from contextlib import asynccontextmanager

import pytest

from control_plane.metrics import Metrics
from control_plane.services import open_services
from control_plane.usage_jobs import ENTRIES_MIN, catch_up
from store.rollups import freshness, roll_up
from store.usage_totals import TotalsQuery, usage_totals
from tests.support.control_plane import running, the_settings
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]

FOR_EVER_S = 60.0
HOUR_MS = 3_600_000
CREATED_MS = 1_772_323_200_000  # in March 2026
# Every move of a position, and the transaction it was made in.
WATCH = """
CREATE TABLE moves (transaction_id xid8, entries bigint);
CREATE FUNCTION note_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO moves VALUES (pg_current_xact_id(), NEW.seq - OLD.seq);
    RETURN NEW;
END $$;
CREATE TRIGGER note_move BEFORE UPDATE ON rollup_positions
FOR EACH ROW EXECUTE FUNCTION note_move();
"""
# As a statement that takes longer than Postgres allows it.
TOO_SLOW = """
CREATE FUNCTION too_slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.seq > 500 THEN
        RAISE 'canceling statement due to statement timeout' USING ERRCODE = 'query_canceled';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER too_slow BEFORE UPDATE ON rollup_positions
FOR EACH ROW EXECUTE FUNCTION too_slow();
"""


@pytest.fixture
async def services(fresh_postgres_url, valkey_url):
    """A control plane's without its jobs, so that nothing else brings sums up to date."""
    async with open_services(the_settings(fresh_postgres_url, valkey_url), Metrics()) as services:
        yield services


async def plant(services, requests, tenant=None):
    """So many ended requests of one tenant, each with two entries."""
    tenant = tenant or await a_tenant(services.postgres)
    names = [f"req_{secrets.token_hex(8)}" for _ in range(requests)]
    asked = (a_reserve(name, tenant_id=tenant, created_ms=CREATED_MS) for name in names)
    await asyncio.gather(*map(services.ledger.reserve, asked))
    words = (a_settle(name, tenant_id=tenant) for name in names)
    await asyncio.gather(*map(services.ledger.settle, words))
    return tenant


async def behind(services):
    async with services.postgres.connection() as conn:
        return (await freshness(conn)).entries_behind


async def summed(services, tenant):
    query = TotalsQuery(from_ms=CREATED_MS, to_ms=CREATED_MS + HOUR_MS, tenant_id=tenant)
    async with services.postgres.connection() as conn:
        found = await usage_totals(conn, query, after=None, limit=10)
    return sum(total.requests for total in found.totals)


@asynccontextmanager
async def somebody_at_it(services):
    """Another control plane's transaction, for as long as it takes."""
    while (await roll_up(services.postgres)).entries:
        pass
    async with services.postgres.transaction() as conn:
        await conn.execute("SELECT FROM rollup_positions FOR UPDATE")
        yield


async def test_a_reader_works_a_backlog_off_in_steps_that_postgres_bears(services):
    tenants = [await plant(services, 400) for _ in range(2)]
    async with services.postgres.transaction() as conn:
        await conn.execute(WATCH)
    assert await behind(services) == 1_600
    await catch_up(services, FOR_EVER_S)
    assert await behind(services) == 0
    assert [await summed(services, tenant) for tenant in tenants] == [400, 400]
    async with services.postgres.connection() as conn:
        cursor = await conn.execute("SELECT sum(entries)::int FROM moves GROUP BY transaction_id")
        steps = [entries for (entries,) in await cursor.fetchall()]
    assert sum(steps) == 1_600
    assert max(steps) <= ENTRIES_MIN


async def test_a_reader_whose_time_is_over_has_older_sums(services):
    tenant = await plant(services, 3)
    async with somebody_at_it(services):
        await plant(services, 2, tenant)
        await catch_up(services, 0.1)
        assert (await summed(services, tenant), await behind(services)) == (3, 4)
    await catch_up(services, FOR_EVER_S)
    assert (await summed(services, tenant), await behind(services)) == (5, 0)


async def test_a_reader_waits_for_what_others_are_at(services):
    tenant = await plant(services, 3)
    async with somebody_at_it(services):
        await plant(services, 2, tenant)
        reading = asyncio.create_task(catch_up(services, FOR_EVER_S))
        await asyncio.sleep(0.1)
        assert not reading.done()
    await reading
    assert await summed(services, tenant) == 5


async def test_a_reader_has_what_was_done_before_postgres_became_too_slow(services):
    tenant = await plant(services, 400)
    async with services.postgres.transaction() as conn:
        await conn.execute(TOO_SLOW)
    await catch_up(services, FOR_EVER_S)
    assert await behind(services) == 300
    assert 0 < await summed(services, tenant) < 400


async def test_a_reader_says_that_rows_are_missing(services, caplog):
    tenant = await plant(services, 2)
    async with services.postgres.transaction() as conn:
        await conn.execute(
            "DELETE FROM usage WHERE request_id = (SELECT min(request_id) FROM usage)"
        )
    await catch_up(services, FOR_EVER_S)
    assert (await summed(services, tenant), await behind(services)) == (1, 0)
    said = [record.facts for record in caplog.records if "no usage row" in record.getMessage()]
    assert said == [{"missing": 1}]


async def test_totals_are_answered_behind_a_backlog_and_say_so(fresh_postgres_url, valkey_url):
    settings = the_settings(fresh_postgres_url, valkey_url, usage_rollup_ms=HOUR_MS)
    async with running(settings) as plane:
        tenant = await plant(plane.services, 3)
        async with somebody_at_it(plane.services):
            await plant(plane.services, 2, tenant)
            period = {"from_ms": CREATED_MS, "to_ms": CREATED_MS + HOUR_MS}
            answer = (await plane.admin("GET", "/usage/totals", **period)).json()
            assert [total["requests"] for total in answer["totals"]] == [3]
            assert answer["entries_behind"] == 4
        answer = (await plane.admin("GET", "/usage/totals", **period)).json()
        assert [total["requests"] for total in answer["totals"]] == [5]
        assert answer["entries_behind"] == 0
