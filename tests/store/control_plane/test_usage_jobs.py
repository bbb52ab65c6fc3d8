"""The jobs that keep usage in order, as they run beside the API."""

import asyncio
import secrets
import time
from datetime import UTC, datetime

import pytest

from store.retention import make_partitions
from store.usage import usage_of
from tests.support.control_plane import running, the_settings
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]

DAY_MS = 86_400_000


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    settings = the_settings(
        fresh_postgres_url, valkey_url, usage_rollup_ms=200, usage_kept_months=2
    )
    async with running(settings) as plane:
        yield plane


async def a_request(plane, tenant, at_ms):
    request_id = f"req_local_{at_ms:012x}{secrets.token_hex(8)}"
    await plane.services.ledger.reserve(
        a_reserve(request_id, tenant_id=tenant, created_ms=at_ms, amount_micro=100)
    )
    await plane.services.ledger.settle(a_settle(request_id, tenant_id=tenant))
    return request_id


async def requests_in_totals(plane, count):
    async with asyncio.timeout(20):
        while True:
            answer = await plane.admin("GET", "/usage/totals", from_ms=0)
            if (found := answer.json())["totals"] and found["totals"][0]["requests"] == count:
                return found
            await asyncio.sleep(0.02)


async def test_what_ends_is_in_the_totals_soon_after(plane):
    tenant = await a_tenant(plane.services.postgres)
    now_ms = time.time_ns() // 1_000_000
    for _ in range(3):
        await a_request(plane, tenant, now_ms)
    found = await requests_in_totals(plane, 3)
    assert found["entries_behind"] == 0
    counted = "headworks_control_plane_rolled_requests_total 3.0"
    async with asyncio.timeout(20):  # a moment after the commit
        while counted not in (await plane.client.get("/metrics")).text:  # noqa: ASYNC110 - bounded above
            await asyncio.sleep(0.01)


async def test_an_old_month_goes_when_it_is_summed_and_a_month_that_may_not_go_stays(
    fresh_postgres_url, valkey_url, plane
):
    tenant = await a_tenant(plane.services.postgres)
    now_ms = time.time_ns() // 1_000_000
    old_ms, kept_ms = now_ms - 150 * DAY_MS, now_ms - 31 * DAY_MS
    first = datetime.fromtimestamp(old_ms / 1000, UTC).date()
    await make_partitions(plane.services.postgres, first=first, months_ahead=0)
    old = await a_request(plane, tenant, old_ms)
    kept = await a_request(plane, tenant, kept_ms)
    await requests_in_totals(plane, 2)
    settings = the_settings(
        fresh_postgres_url, valkey_url, usage_rollup_ms=200, usage_kept_months=2
    )
    async with running(settings), plane.services.postgres.connection() as conn:
        async with asyncio.timeout(20):
            while await usage_of(conn, old) is not None:  # noqa: ASYNC110 - bounded above
                await asyncio.sleep(0.02)
        assert await usage_of(conn, kept) is not None
    await requests_in_totals(plane, 2)
