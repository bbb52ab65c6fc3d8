"""Differences planted in real records: told once, corrected where that can be, and over."""

import asyncio
import secrets
from contextlib import asynccontextmanager

import pytest

from control_plane.metrics import Metrics
from control_plane.reconciler import LINES_MAX, Reconciler
from control_plane.services import open_services
from store import reconcile
from store.accounts import account
from store.leases import assert_lease
from store.ledger import Ledger
from store.ledger_audit import audit
from store.reconcile import Feed
from store.usage import usage_of
from tests.support.control_plane import assert_refused, running, the_settings
from tests.support.ledger_commands import a_reserve, a_settle, a_usage, a_witness, an_attempt
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]

PROMPTLY = {
    "reconcile_grace_ms": 0,
    "reconcile_overdue_ms": 3_600_000,
    "reconcile_revisit_ms": 0,
    "spool_patience_ms": 3_600_000,
}


class Case:
    """A control plane's services without its jobs, and its reconciler, which a test drives."""

    def __init__(self, services):
        self.services = services
        self.pg = services.postgres
        self.ledger = services.ledger
        self.reconciler = Reconciler(services)

    async def rounds(self, count=2):
        for _ in range(count):
            await self.reconciler.round()

    def count(self, name, **labels):
        return self.services.metrics.registry.get_sample_value(
            f"headworks_reconciler_{name}", labels
        )

    def told(self):
        """How often, by kind."""
        family = self.services.metrics.differences.collect()
        return {
            sample.labels["kind"]: sample.value
            for metric in family
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.value
        }

    async def run(self, statement, *parameters):
        async with self.pg.transaction() as conn:
            await conn.execute(statement, parameters or None)

    async def rows(self, statement, *parameters):
        async with self.pg.connection() as conn:
            return await (await conn.execute(statement, parameters or None)).fetchall()

    async def differences(self):
        return await self.rows(
            "SELECT kind, subject, resolution FROM differences"
            " WHERE raised_at IS NOT NULL ORDER BY id"
        )

    async def request(self, *, settled=True, **changes):
        """Reserved, settled with 10 + 20 tokens for 50 micro-units, confirmed by its journal."""
        tenant = changes.pop("tenant_id", None) or await a_tenant(self.pg)
        request_id = f"req_{secrets.token_hex(8)}"
        fields = {"tenant_id": tenant, "amount_micro": 1_000, **changes}
        await self.ledger.reserve(a_reserve(request_id, **fields))
        if settled:
            await self.ledger.settle(a_settle(request_id, tenant_id=tenant))
            await self.ledger.reconcile(a_witness(request_id))
        return request_id, tenant

    async def usage(self, request_id):
        async with self.pg.connection() as conn:
            return await usage_of(conn, request_id)

    async def entries(self, request_id):
        return await self.rows(
            "SELECT kind, posted_delta_micro FROM entries WHERE request_id = %s ORDER BY seq",
            request_id,
        )


@asynccontextmanager
async def a_case(postgres_url, valkey_url, **changes):
    settings = the_settings(postgres_url, valkey_url, **(PROMPTLY | changes))
    async with open_services(settings, Metrics()) as services:
        yield Case(services)


@pytest.fixture
async def case(fresh_postgres_url, valkey_url):
    async with a_case(fresh_postgres_url, valkey_url) as case:
        yield case


@pytest.fixture
async def overdue(fresh_postgres_url, valkey_url):
    """For whom everything is overdue at once."""
    async with a_case(fresh_postgres_url, valkey_url, reconcile_overdue_ms=0) as case:
        yield case


async def killed_before_it_counted(case, url, witness):
    """A process says `witness` and dies when it is recorded and not yet counted."""
    ledger = await Ledger.open(url, application_name="doomed")
    async with case.pg.transaction() as conn:
        await conn.execute("SELECT FROM accounts FOR UPDATE")  # the recount waits for this
        saying = asyncio.create_task(ledger.reconcile(witness))
        while not await case.rows(  # noqa: ASYNC110 - bounded by the test's own time-out
            "SELECT FROM pg_stat_activity WHERE application_name = 'doomed'"
            " AND query LIKE '%ledger_recount%' AND wait_event_type = 'Lock'"
        ):
            await asyncio.sleep(0.005)
        closing = asyncio.create_task(ledger.close())
        saying.cancel()
        await case.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'doomed'"
        )
    await asyncio.gather(saying, closing, return_exceptions=True)


async def hear(case, witness):
    """As a process that dies before it counts, and quicker."""
    async with case.pg.transaction() as conn:
        await conn.execute(
            "INSERT INTO witnesses (request_id, month, attempt, source, replica_id,"
            " prompt_tokens, cached_tokens, cache_write_5m_tokens, cache_write_1h_tokens,"
            " output_tokens, reasoning_tokens, exact, final, cause, at_ms)"
            " VALUES (%s, ledger_month(%s), %s, %s, 'rep_1', %s, %s, 0, 0, %s, 0, %s, %s, %s, 1)"
            " ON CONFLICT (request_id, month, attempt, source) DO UPDATE"
            " SET output_tokens = excluded.output_tokens",
            (
                witness.request_id,
                witness.request_id,
                witness.attempt,
                witness.source,
                witness.usage.prompt_tokens,
                witness.usage.cached_tokens,
                witness.usage.output_tokens,
                witness.source == "journal" and witness.final,
                witness.final,
                witness.cause,
            ),
        )


def lines(caplog, message="records differ"):
    return [record.facts for record in caplog.records if record.getMessage() == message]


# Corrections.


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


# What a person is told of.


async def test_usage_rows_that_are_not_right_are_told_once_and_left(case):
    breaks = {
        "misbilled": ["billed_micro = 51", "bill_limit_micro = 40"],
        "overdelivered": ["delivered_tokens = 21"],
    }
    requests = {}
    for kind, changes in breaks.items():
        for change in changes:
            requests[(await case.request())[0]] = (kind, change)
    held, _ = await case.request()
    await case.rounds()
    assert await case.differences() == []

    for request_id, (_, change) in requests.items():
        await case.run(f"UPDATE usage SET {change} WHERE request_id = %s", request_id)
    await case.run(
        "INSERT INTO reservations SELECT request_id, month, tenant_id, key_id, gateway_id, model,"
        " version, region, service_class, dialect, endpoint, stream, price_id, prompt_tokens,"
        " max_tokens, choices, amount_micro, floor_micro, 0, day, created_ms FROM usage"
        " WHERE request_id = %s",
        held,
    )
    await case.rounds(3)
    told = {request_id: kind for request_id, (kind, _) in requests.items()} | {held: "still_held"}
    assert {(r, k, n) for k, r, n in await case.differences()} == {
        (request_id, kind, None) for request_id, kind in told.items()
    }
    assert case.told() == {"misbilled": 2, "overdelivered": 1, "still_held": 1}
    assert case.count("open_differences", kind="misbilled") == 2
    for request_id in told:
        assert len(await case.entries(request_id)) == 2


async def test_an_account_that_is_not_right_is_told_once_until_it_is(case):
    breaks = [
        ("accounts SET posted_micro = 1", "accounts SET posted_micro = 0", "balance"),
        ("accounts SET credit_micro = 1", "accounts SET credit_micro = 0", "balance"),
        (r"accounts SET head = '\x00' || head", "accounts SET head = substr(head, 2)", "balance"),
        ("reservations SET reserved_micro = 1", "reservations SET reserved_micro = 1000", "held"),
    ]
    tenants = [(await case.request(settled=False))[1] for _ in breaks]
    await case.rounds()
    assert await case.differences() == []
    for tenant, (how, _, _) in zip(tenants, breaks, strict=True):
        await case.run(f"UPDATE {how} WHERE tenant_id = %s", tenant)
    await case.rounds(3)
    pairs = [(kind, tenant) for tenant, (_, _, kind) in zip(tenants, breaks, strict=True)]
    assert sorted(await case.differences()) == sorted((*pair, None) for pair in pairs)
    assert case.told() == {"balance": 3, "held": 1}
    for tenant, (_, back, _) in zip(tenants, breaks, strict=True):
        await case.run(f"UPDATE {back} WHERE tenant_id = %s", tenant)
    await case.rounds()
    assert sorted(await case.differences()) == sorted((*pair, "gone") for pair in pairs)


async def test_a_balance_that_an_entry_went_on_from_is_a_break_in_the_chain(case):
    _, tenant = await case.request()
    await case.run("UPDATE accounts SET posted_micro = posted_micro - 1")
    await case.request(tenant_id=tenant)
    await case.rounds()
    assert await case.differences() == [("chain", f"{tenant}/3", None)]


async def test_a_cap_that_counts_what_nobody_holds_is_told(case):
    _, tenant = await case.request(settled=False)
    await case.run("SELECT ledger_set_cap(%s, '', 'day', NULL, 10000)", tenant)
    await case.request(tenant_id=tenant)
    await case.rounds()
    assert await case.differences() == []
    await case.run("UPDATE cap_windows SET reserved_micro = reserved_micro - 1")
    await case.rounds()
    assert await case.differences() == [("held", tenant, None)]
    await case.run("UPDATE cap_windows SET reserved_micro = reserved_micro + 1")
    await case.rounds()
    assert await case.differences() == [("held", tenant, "gone")]


async def test_an_entry_that_was_changed_is_told_and_stays(case):
    breaks = {
        "UPDATE entries SET reason = 'changed' WHERE seq = 3": 3,
        "UPDATE entries SET chain = '' WHERE seq = 4": 4,
        "UPDATE entries SET posted_micro = posted_micro + 1 WHERE seq = 4": 4,
        "DELETE FROM entries WHERE seq = 3": 4,
    }
    tenants = [await a_tenant(case.pg) for _ in breaks]
    for tenant in tenants:
        await case.request(tenant_id=tenant)
    await case.rounds()  # verified up to here
    await case.run("ALTER TABLE entries DISABLE TRIGGER USER")
    for tenant, how in zip(tenants, breaks, strict=True):
        for _ in range(2):
            await case.request(tenant_id=tenant)
        await case.run(f"{how} AND tenant_id = %s", tenant)
    await case.rounds(3)
    told = await case.differences()
    assert {(kind, resolution) for kind, _, resolution in told} == {("chain", None)}
    for tenant, seq in zip(tenants, breaks.values(), strict=True):
        assert ("chain", f"{tenant}/{seq}", None) in told
    assert case.told() == {"chain": len(told)}
    assert await case.rows("SELECT seq FROM reconciled_accounts") == [(6,)] * 4


async def test_entries_are_verified_over_many_slices(case, monkeypatch):
    monkeypatch.setattr("control_plane.reconciler.ENTRIES_MAX", 3)
    tenants = [await a_tenant(case.pg) for _ in range(3)]
    await asyncio.gather(*(case.request(tenant_id=tenants[n % 3]) for n in range(30)))
    await case.rounds(1)
    rows = await case.rows("SELECT seq FROM reconciled_accounts")
    assert rows == [(20,)] * 3
    assert await case.differences() == []


async def test_a_witness_of_a_request_that_was_never_reserved(overdue):
    tenant = await a_tenant(overdue.pg)
    await overdue.ledger.reconcile(a_witness("req_unheard"))
    await overdue.rounds(3)
    assert await overdue.differences() == [("unknown_request", "req_unheard", None)]
    assert overdue.told() == {"unknown_request": 1}
    # Its gateway's spool arrives after all.
    await overdue.ledger.reserve(a_reserve("req_unheard", tenant_id=tenant))
    await overdue.ledger.settle(a_settle("req_unheard", tenant_id=tenant))
    await overdue.rounds()
    assert await overdue.differences() == [("unknown_request", "req_unheard", "gone")]
    assert overdue.count("open_differences", kind="unknown_request") == 0


async def test_an_ended_request_that_no_journal_confirms(overdue):
    tenant = await a_tenant(overdue.pg)
    await overdue.ledger.reserve(a_reserve("req_1", tenant_id=tenant))
    await overdue.ledger.settle(a_settle("req_1", tenant_id=tenant))
    await overdue.rounds()
    await overdue.ledger.reconcile(a_witness("req_1", final=False, cause=""))
    await overdue.rounds()
    assert await overdue.differences() == [("unconfirmed", "req_1", None)]
    await overdue.ledger.reconcile(a_witness("req_1"))
    await overdue.rounds()
    assert await overdue.differences() == [("unconfirmed", "req_1", "gone")]
    assert overdue.told() == {"unconfirmed": 1}


async def test_a_journal_is_given_time(case):
    tenant = await a_tenant(case.pg)
    await case.ledger.reserve(a_reserve("req_1", tenant_id=tenant))
    await case.ledger.settle(a_settle("req_1", tenant_id=tenant))
    await case.ledger.reconcile(a_witness("req_unheard"))
    await case.rounds(3)
    assert await case.differences() == []


async def test_nothing_is_overdue_while_nobody_could_hear(case):
    tenant = await a_tenant(case.pg)
    await case.ledger.reserve(a_reserve("req_1", tenant_id=tenant))
    await case.ledger.settle(a_settle("req_1", tenant_id=tenant))
    await case.ledger.reconcile(a_witness("req_unheard"))
    await case.run("ALTER TABLE witnesses DISABLE TRIGGER USER")
    await case.run("UPDATE witnesses SET recorded_at = now() - interval '3 hours'")
    await case.run(
        "UPDATE reconcile_cursors SET at = now() - interval '4 hours',"
        " moved_at = now() - interval '2 minutes'"  # since when every control plane was down
    )
    await case.rounds(3)
    assert await case.differences() == []
    await case.run(
        "UPDATE reconcile_cursors SET at = now() - interval '1 hour' WHERE feed = 'contact'"
    )
    await case.rounds(3)
    assert sorted(await case.differences()) == [
        ("unconfirmed", "req_1", None),
        ("unknown_request", "req_unheard", None),
    ]
    # What is open stays so when they pause again.
    await case.run("UPDATE reconcile_cursors SET moved_at = now() - interval '2 minutes'")
    await case.rounds(3)
    assert [resolution for *_, resolution in await case.differences()] == [None, None]


async def test_a_request_that_has_ended_without_work_needs_no_journal(overdue):
    tenant = await a_tenant(overdue.pg)
    await overdue.ledger.reserve(a_reserve("req_1", tenant_id=tenant))
    await overdue.ledger.release("req_1", tenant, ended_ms=1)
    await overdue.rounds()
    assert await overdue.differences() == []


async def test_a_reservation_that_is_open_for_too_long(case):
    request_id, tenant = await case.request(settled=False)
    await case.rounds()
    assert await case.differences() == []
    await case.run("UPDATE reservations SET opened_at = now() - interval '2 hours'")
    await case.rounds()
    assert await case.differences() == [("open_too_long", request_id, None)]
    await case.ledger.settle(a_settle(request_id, tenant_id=tenant))
    await case.rounds()
    assert await case.differences() == [("open_too_long", request_id, "gone")]
    assert case.told() == {"open_too_long": 1}


async def a_gateway(case, *, spool_bytes=0, refused_words=0):
    async with case.pg.transaction() as conn:
        await assert_lease(
            conn, "gw_1", "local", 5_000, spool_bytes=spool_bytes, refused_words=refused_words
        )


async def test_a_spool_is_given_time_to_drain(case):
    await a_gateway(case, spool_bytes=4_096)
    await case.rounds()
    assert await case.rows("SELECT kind FROM differences") == [("spool",)]
    await a_gateway(case)
    await case.rounds()
    assert await case.rows("SELECT kind FROM differences") == []

    await a_gateway(case, spool_bytes=4_096)
    await case.rounds()
    assert await case.differences() == []
    await case.run("UPDATE differences SET noticed_at = now() - interval '2 hours'")
    await a_gateway(case, spool_bytes=9_999)
    await case.rounds(3)
    assert await case.differences() == [("spool", "gw_1", None)]
    assert case.told() == {"spool": 1}
    await a_gateway(case)
    await case.rounds()
    assert await case.differences() == [("spool", "gw_1", "gone")]


async def test_refused_words_are_told_again_when_there_are_more(case, caplog):
    for words in (0, 2, 2, 5):
        await a_gateway(case, refused_words=words)
        await case.rounds()
    assert case.told() == {"refused_words": 2}
    assert [line["detail"] for line in lines(caplog)] == [
        "2 words were refused",
        "5 words were refused",
    ]
    # They are on its disk, whatever becomes of the gateway.
    await case.run("DELETE FROM gateways")
    await case.rounds()
    assert await case.differences() == [("refused_words", "gw_1", None)]


# Much of it.


async def copies(case, count, *, uncounted):
    """`count` more requests that failed at no cost, the first so many with a word not counted."""
    request_id, _ = await case.request()
    await case.run("UPDATE usage SET cause = 'failed', billed_micro = 0")
    columns = [
        name
        for (name,) in await case.rows(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'usage'::regclass AND attnum > 0"
        )
    ]
    rest = ", ".join(name for name in columns if name != "request_id")
    async with case.pg.transaction() as conn:
        await conn.execute(
            f"INSERT INTO usage (request_id, {rest})"
            f" SELECT 'copy_' || lpad(n::text, 6, '0'), {rest} FROM usage, generate_series(1, %s) n"
            " WHERE request_id = %s",
            (count, request_id),
        )
        # One journal's batch after another.
        await conn.execute(
            "INSERT INTO witnesses SELECT 'copy_' || lpad(n::text, 6, '0'), w.month, w.attempt,"
            " w.source, w.replica_id, w.prompt_tokens, 0, 0, 0,"
            " w.output_tokens + CASE WHEN n <= %s AND w.source = 'journal' THEN 1 ELSE 0 END, 0,"
            " w.exact, w.final, w.cause, w.at_ms,"
            " now() - interval '1 minute' + n / 200 * interval '100 milliseconds'"
            " FROM witnesses w, generate_series(1, %s) n WHERE w.request_id = %s",
            (uncounted, count, request_id),
        )
    await case.run("UPDATE reconcile_cursors SET at = now() - interval '3 days'")


async def test_a_word_that_says_more_comes_again_and_one_repeated_does_not(case):
    request_id, _ = await case.request()
    await case.rounds()

    async def come():
        async with case.pg.transaction() as conn:
            done = await reconcile.next_words(
                conn, Feed.WORDS, window_ms=60_000, lag_ms=0, limit=10
            )
            await reconcile.move(conn, Feed.WORDS, done)
        return done.subjects

    await case.ledger.reconcile(a_witness(request_id, source="checkpoint"))
    assert await come() == [request_id]
    await case.ledger.reconcile(a_witness(request_id, source="checkpoint"))
    assert await come() == []
    word = a_witness(request_id, source="checkpoint", usage=a_usage(output=25))
    await case.ledger.reconcile(word)
    assert await come() == [request_id]


async def test_a_backlog_is_worked_off_in_bounded_slices(case, caplog):
    await copies(case, 10_000, uncounted=250)
    seen, sizes, window_ms = [], [], 1_000
    async with case.pg.transaction() as conn:
        more = True
        while more:
            done = await reconcile.next_words(
                conn, Feed.WORDS, window_ms=window_ms, lag_ms=0, limit=1_000
            )
            await reconcile.move(conn, Feed.WORDS, done)
            seen += done.subjects
            sizes.append(len(done.subjects))
            more, window_ms = done.more, window_ms * 2
    assert max(sizes) == 1_000
    copied = [request_id for request_id in seen if request_id.startswith("copy_")]
    assert sorted(copied) == [f"copy_{n:06}" for n in range(1, 10_001)]

    await case.run("UPDATE reconcile_cursors SET at = now() - interval '3 days'")
    rounds = 0
    while (
        await case.rows(
            "SELECT at < now() - interval '2 seconds' FROM reconcile_cursors WHERE feed = 'words'"
        )
    )[0][0] or case.count("corrections_total") < 250:
        # Each by another process: all that is known of the way is in Postgres.
        case.reconciler = Reconciler(case.services)
        await case.rounds(1)
        rounds += 1
        assert rounds < 40
    assert case.told() == {"uncounted": 250}
    assert case.count("corrections_total") == 250
    wrong = await case.rows(
        "SELECT FROM usage WHERE request_id LIKE 'copy_%'"
        " AND metered_output_tokens <> 20 + (right(request_id, 6)::int <= 250)::int"
    )
    assert wrong == []
    # Not a line for each: a failure of many must not bury the rest of the log.
    assert sum(line.get("further", 1) for line in lines(caplog)) == 250
    assert len(lines(caplog)) < 250
    assert sum("subject" in line for line in lines(caplog)) >= LINES_MAX


# Operators.


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    settings = the_settings(
        fresh_postgres_url, valkey_url, **(PROMPTLY | {"reconcile_every_ms": 30})
    )
    async with running(settings) as plane:
        yield plane


async def until_open(plane, count):
    """The job itself finds them."""
    while True:
        answer = await plane.admin("GET", "/reconciliation")
        assert answer.status_code == 200, answer.text
        if len(answer.json()["differences"]) == count:
            return answer.json()["differences"]
        await asyncio.sleep(0.02)


async def test_operators_see_what_is_open_and_close_it(plane):
    pg = plane.services.postgres
    async with pg.transaction() as conn:
        await assert_lease(conn, "gw_1", "local", 5_000, refused_words=2)
        await assert_lease(conn, "gw_2", "local", 5_000, refused_words=1)
    second, first = await until_open(plane, 2)
    assert (first["kind"], first["subject"]) == ("refused_words", "gw_1")
    assert first["resolution"] is None
    assert first["raised_ms"] >= first["noticed_ms"] > 0

    page = (await plane.admin("GET", "/reconciliation", limit=1)).json()
    assert page == {"differences": [second], "before": second["id"]}
    page = (await plane.admin("GET", "/reconciliation", limit=1, before=second["id"])).json()
    assert page["differences"] == [first]
    assert (await plane.admin("GET", "/reconciliation", kind="chain")).json()["differences"] == []

    report = (await plane.admin("GET", "/check")).json()
    (item,) = [item for item in report["items"] if item["name"] == "reconciliation"]
    assert not item["ok"]
    assert "refused_words gw_1: 2 words were refused" in item["detail"]

    close = f"/reconciliation/{first['id']}/close"
    assert (await plane.admin("POST", close, {"note": "said again by hand"})).json() == {
        "id": first["id"],
        "kind": "refused_words",
        "subject": "gw_1",
    }
    assert_refused(await plane.admin("POST", close, {"note": "again"}), 404, "not_found")
    await asyncio.sleep(0.1)
    assert [item["subject"] for item in await until_open(plane, 1)] == ["gw_2"]
    every = (await plane.admin("GET", "/reconciliation", open=False)).json()["differences"]
    assert [item["resolution"] for item in every] == [None, "closed"]
    assert every[1]["note"] == "said again by hand"
    log = (await plane.admin("GET", "/audit-log", subject=str(first["id"]))).json()["records"]
    assert [line["action"] for line in log] == ["difference.close"]

    async with pg.transaction() as conn:
        await assert_lease(conn, "gw_1", "local", 5_000, refused_words=3)
    newest, oldest = await until_open(plane, 2)
    assert (newest["subject"], oldest["subject"]) == ("gw_1", "gw_2")
    words = {"kind": "refused_words", "upto": oldest["id"], "note": "all said"}
    close = "/reconciliation/close"
    assert (await plane.admin("POST", close, words)).json() == {"closed": 1}
    assert (await plane.admin("POST", close, words)).json() == {"closed": 0}
    assert (await until_open(plane, 1)) == [newest]


async def test_bad_questions_are_refused(postgres_url, valkey_url):
    async with running(the_settings(postgres_url, valkey_url)) as plane:
        for query, param in (
            ({"kind": "mood"}, "kind"),
            ({"open": "perhaps"}, "open"),
            ({"before": -1}, "before"),
        ):
            answer = await plane.admin("GET", "/reconciliation", **query)
            assert_refused(answer, 422, "unprocessable", param)
        words = {"kind": "chain", "upto": 1, "note": "x"}
        for change in ({"kind": "mood"}, {"upto": 0}, {"note": ""}, {"who": 1}):
            answer = await plane.admin("POST", "/reconciliation/close", words | change)
            assert_refused(answer, 422, "unprocessable", *change)
        for body, param in (({}, "note"), ({"note": ""}, "note"), ({"note": "x", "who": 1}, "who")):
            answer = await plane.admin("POST", "/reconciliation/1/close", body)
            assert_refused(answer, 422, "unprocessable", param)
