"""Words that were heard and never counted: corrected, once, where a recount can."""

import asyncio
import secrets

import pytest

from store import reconcile
from store.accounts import account
from store.ledger_audit import audit
from tests.support.ledger_commands import a_reserve, a_settle, a_usage, a_witness, an_attempt
from tests.support.ledger_database import a_tenant
from tests.support.reconciler_case import (
    a_case,
    hear,
    killed_before_it_counted,
    lines,
)

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def test_a_word_that_was_heard_and_never_counted(case, fresh_postgres_url, caplog):
    tenant = await a_tenant(case.pg)
    request_id = f"req_{secrets.token_hex(8)}"
    await case.ledger.reserve(a_reserve(request_id, tenant_id=tenant, amount_micro=1_000))
    attempt = an_attempt(a_usage(output=30))
    await case.ledger.settle(a_settle(request_id, tenant_id=tenant, attempts=(attempt,)))
    word = a_witness(request_id, usage=a_usage(output=20))
    await killed_before_it_counted(case, fresh_postgres_url, word)
    assert (await case.usage(request_id)).billed_micro == 70

    await case.rounds(3)
    row = await case.usage(request_id)
    assert (row.metered_output_tokens, row.accepted_tokens, row.billed_micro) == (20, 20, 50)
    assert await case.entries(request_id) == [
        ("reserve", 0),
        ("settle", 70),
        ("correction", -20),
    ]
    # The gateway's 30 stay on record beside the journal's 20.
    assert await case.differences() == [
        ("uncounted", request_id, "corrected"),
        ("contradicted", request_id, None),
    ]
    assert case.told() == {"uncounted": 1, "contradicted": 1}
    assert case.count("corrections_total") == 1
    assert [line["kind"] for line in lines(caplog)] == ["uncounted", "contradicted"]
    assert case.count("open_differences", kind="uncounted") == 0
    async with case.pg.connection() as conn:
        assert (await audit(conn)).violations == ()


async def test_a_word_that_may_still_be_counted_is_left_alone(fresh_postgres_url, valkey_url):
    async with a_case(fresh_postgres_url, valkey_url, reconcile_grace_ms=60_000) as case:
        request_id, _ = await case.request()
        await hear(case, a_witness(request_id, source="checkpoint", usage=a_usage(output=30)))
        await hear(case, a_witness(request_id, attempt=2, usage=a_usage(output=5)))
        await case.rounds()
        assert await case.differences() == []
        assert len(await case.entries(request_id)) == 2


async def test_reconcilers_side_by_side_tell_and_correct_once(
    case, fresh_postgres_url, valkey_url, caplog
):
    requests = [(await case.request())[0] for _ in range(8)]
    for request_id in requests:
        await hear(case, a_witness(request_id, attempt=2, usage=a_usage(output=7)))
    async with (
        a_case(fresh_postgres_url, valkey_url) as second,
        a_case(fresh_postgres_url, valkey_url) as third,
    ):
        cases = (case, second, third)
        for _ in range(4):
            await asyncio.gather(*(each.reconciler.round() for each in cases))
        assert sum(each.told().get("uncounted", 0) for each in cases) == 8
        assert sum(each.count("corrections_total") for each in cases) == 8
    assert len(lines(caplog)) == 8
    for request_id in requests:
        assert (await case.usage(request_id)).metered_output_tokens == 27
        assert [kind for kind, _ in await case.entries(request_id)].count("correction") == 1


async def test_a_reconciler_that_is_cut_off_goes_on_from_what_it_committed(case):
    requests = [(await case.request())[0] for _ in range(20)]
    for request_id in requests:
        await hear(case, a_witness(request_id, attempt=2, usage=a_usage(output=7)))
    ended = 0
    for n in range(8):
        going = asyncio.create_task(case.reconciler.round())
        await asyncio.sleep(0.005 * n)
        async with case.services.books.connection() as conn:
            await conn.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE application_name = 'headworks control plane'"
                " AND datname = current_database()"
            )
        ended += isinstance((await asyncio.gather(going, return_exceptions=True))[0], Exception)
    assert ended
    await case.rounds()
    assert sorted(await case.differences()) == [
        ("uncounted", request_id, "corrected") for request_id in sorted(requests)
    ]
    for request_id in requests:
        assert [kind for kind, _ in await case.entries(request_id)].count("correction") == 1


async def test_counters_that_were_changed_are_counted_again(case):
    request_id, tenant = await case.request()
    await case.run("UPDATE usage SET metered_output_tokens = 19, accepted_tokens = 3")
    await case.rounds()
    row = await case.usage(request_id)
    assert (row.metered_output_tokens, row.accepted_tokens, row.billed_micro) == (20, 20, 50)
    assert (await case.entries(request_id))[2:] == [("correction", 0)]
    told = case.told()
    assert told.pop("uncounted") == 1
    assert await case.rows("SELECT FROM differences WHERE resolved_at IS NULL") == []
    async with case.pg.connection() as conn:
        assert (await account(conn, tenant)).posted_micro == 50


async def test_a_bill_that_its_entries_do_not_say_is_for_a_person(case):
    request_id, tenant = await case.request()
    await case.run("UPDATE usage SET metered_output_tokens = 19, billed_micro = 48")
    await case.rounds(3)
    row = await case.usage(request_id)
    assert (row.metered_output_tokens, row.billed_micro) == (19, 48)
    assert len(await case.entries(request_id)) == 2
    assert ("misposted", request_id, None) in await case.differences()
    assert case.told()["misposted"] == 1
    assert not case.count("corrections_total")
    async with case.pg.connection() as conn:
        assert (await account(conn, tenant)).posted_micro == 50


async def test_only_the_entries_since_a_request_are_added_up(case):
    tenant = await a_tenant(case.pg)
    for _ in range(40):
        await case.request(tenant_id=tenant)
    before = "now() - interval '1 day'"
    await case.run("ALTER TABLE entries DISABLE TRIGGER USER")
    await case.run(f"UPDATE entries SET at = {before}")
    created_ms = int((await case.rows("SELECT extract(epoch FROM now()) * 1000"))[0][0])
    request_id, _ = await case.request(tenant_id=tenant, created_ms=created_ms)
    async with case.pg.connection() as conn:
        assert await reconcile.misposted(conn, [request_id]) == {}
    await case.run("UPDATE usage SET billed_micro = 7 WHERE request_id = %s", request_id)
    async with case.pg.connection() as conn:
        wrong = await reconcile.misposted(conn, [request_id])
    assert wrong == {request_id: "billed 7, but its entries have posted 50"}


async def test_a_bill_is_not_recounted_when_its_entries_cannot_be_read_in_time(case, monkeypatch):
    monkeypatch.setattr("store.reconcile.POSTED_TIMEOUT_MS", 50)
    request_id, _ = await case.request()
    async with case.services.books.transaction() as other:
        await other.execute("LOCK TABLE entries IN ACCESS EXCLUSIVE MODE")
        async with case.pg.transaction() as conn:
            wrong = await reconcile.misposted(conn, [request_id])
            # What was found before is still written down.
            assert await (await conn.execute("SELECT 1")).fetchone() == (1,)
    assert wrong == {request_id: "its entries could not be added up in time"}
