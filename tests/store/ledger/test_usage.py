"""Usage rows: every accepted request has one, with what was asked and how it ended."""

import pytest

from core.metering import RequestTimings
from core.money import EndCause
from store.usage import Place, UsageFilter, usage_of, usage_page
from tests.support.ledger_commands import a_reserve, a_settle, an_attempt
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.anyio, pytest.mark.services]


async def test_a_row_tells_the_whole_request(pg, ledger):
    tenant = await a_tenant(pg)
    asked = a_reserve(f"{tenant}_1", tenant_id=tenant)
    await ledger.reserve(asked)
    timings = RequestTimings(
        queue_ms=1.25, prefill_ms=10.0, first_token_ms=20.5, inter_token_ms=3.0, total_ms=80.0
    )
    await ledger.settle(
        a_settle(
            asked.request_id,
            tenant_id=tenant,
            cause=EndCause.CLIENT_CANCELLED,
            attempts=(an_attempt(attempt=1), an_attempt(attempt=2)),
            delivered_tokens=17,
            timings=timings,
            ended_ms=5_000,
        )
    )
    async with pg.connection() as conn:
        row = await usage_of(conn, asked.request_id)
        assert await usage_of(conn, "unknown") is None
    assert row is not None
    for name in set(asked.__struct_fields__) - {"claim"}:  # which is no part of the row
        assert getattr(row, name) == getattr(asked, name)
    for name in timings.__struct_fields__:
        assert getattr(row, name) == getattr(timings, name)
    assert (row.state, row.cause, row.settled_by) == ("settled", "client_cancelled", "gateway")
    assert (row.attempts, row.delivered_tokens, row.ended_ms) == (2, 17, 5_000)
    assert (row.metered_prompt_tokens, row.metered_output_tokens) == (10, 40)
    assert (row.reserved_micro, row.billed_micro) == (100, 90)


async def test_an_open_request_has_no_end(pg, ledger):
    tenant = await a_tenant(pg)
    await ledger.reserve(a_reserve(f"{tenant}_1", tenant_id=tenant))
    async with pg.connection() as conn:
        row = await usage_of(conn, f"{tenant}_1")
    assert row is not None
    assert (row.state, row.cause, row.settled_by, row.ended_ms) == ("open", None, None, None)


async def test_pages_are_newest_first_and_miss_nothing(pg, ledger):
    tenant = await a_tenant(pg)
    for n in range(7):
        # Three at the same millisecond, over the edge of a page.
        asked = a_reserve(f"{tenant}_{n}", tenant_id=tenant, created_ms=1_000 + max(n - 2, 0))
        await ledger.reserve(asked)
        if n % 2:
            await ledger.release(asked.request_id, tenant, ended_ms=2_000)
    seen = []
    place: Place | None = Place(10_000)
    async with pg.connection() as conn:
        while place is not None:
            page = await usage_page(conn, UsageFilter(tenant_id=tenant), place, limit=2)
            assert len(page.rows) <= 2
            seen += [row.request_id for row in page.rows]
            place = page.older
        nobody = await usage_page(conn, UsageFilter(tenant_id="ten_other"))
    assert (nobody.rows, nobody.older) == ([], None)
    assert seen == [f"{tenant}_{n}" for n in (6, 5, 4, 3, 2, 1, 0)]
