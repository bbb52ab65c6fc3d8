"""The audit finds what is broken, and only that."""

import pytest

from core.caps import Period
from core.metering import Adjust, AdjustmentKind, RequestTimings
from store.accounts import set_cap
from store.leases import assert_lease
from store.ledger_audit import _RULES, audit
from tests.support.ledger_commands import a_reserve, a_settle, a_usage, a_witness, an_attempt
from tests.support.ledger_database import a_tenant

UNLOCK = "ALTER TABLE entries DISABLE TRIGGER entries_append_only;"

pytestmark = [pytest.mark.anyio, pytest.mark.services]


@pytest.fixture
def postgres_url(fresh_postgres_url):
    """What is broken here would be found by the next test."""
    return fresh_postgres_url


@pytest.fixture
async def tenant(pg, ledger):
    """A request `a` that is settled and partly refunded, an open one `b`, and a cap on both."""
    tenant = await a_tenant(pg)
    async with pg.transaction() as conn:
        await set_cap(conn, tenant, "", Period.DAY, soft_micro=1, hard_micro=None)
    for request_id in ("a", "b"):
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant))
    await ledger.settle(a_settle("a", tenant_id=tenant, timings=RequestTimings()))
    await ledger.adjust(
        Adjust(
            id="adj_1",
            tenant_id=tenant,
            kind=AdjustmentKind.REFUND,
            amount_micro=10,
            request_id="a",
            reason="said so",
            author="admin",
        )
    )
    return tenant


async def read(pg):
    async with pg.connection() as conn:
        return await audit(conn)


async def test_a_ledger_in_order_has_no_violations(pg, ledger, tenant):
    report = await read(pg)
    assert report.violations == ()
    assert (report.open_reservations, report.unconfirmed_attempts) == (1, 1)
    assert report.oldest_open_ms >= 0
    await ledger.release("b", tenant, ended_ms=1)
    await ledger.reconcile(a_witness("a"))
    report = await read(pg)
    assert (report.open_reservations, report.unconfirmed_attempts) == (0, 0)


ANOTHER_ENTRY = """
INSERT INTO entries (tenant_id, seq, request_id, kind, reserved_delta_micro, posted_delta_micro,
                     reserved_micro, posted_micro)
SELECT tenant_id, 9, 'x', 'release', 0, 0, 0, 0 FROM accounts
"""
HELD_AGAIN = """
INSERT INTO reservations
SELECT (jsonb_populate_record(r, '{"request_id": "a"}')).* FROM reservations AS r
"""
# How to break it, and the rules that say so.
BREAKS = [
    ("UPDATE accounts SET posted_micro = posted_micro + 1", {"balance", "posted"}),
    ("UPDATE accounts SET reserved_micro = reserved_micro + 1", {"balance", "reserved"}),
    ("UPDATE accounts SET credit_micro = credit_micro + 1", {"balance"}),
    ("UPDATE accounts SET head = '\\x00'", {"chain"}),
    ("UPDATE accounts SET caps = caps + 1", {"caps"}),
    (
        ANOTHER_ENTRY,
        {"balance", "sequence", "chain"},
    ),
    (
        f"{UNLOCK} UPDATE entries SET posted_delta_micro = 49 WHERE kind = 'settle'",
        {"balance", "sequence", "chain"},
    ),
    (f"{UNLOCK} UPDATE entries SET at = at + interval '1 microsecond' WHERE seq = 2", {"chain"}),
    (f"{UNLOCK} UPDATE entries SET reason = 'mine' WHERE seq = 2", {"chain"}),
    (f"{UNLOCK} UPDATE entries SET chain = NULL WHERE seq = 2", {"chain"}),
    (f"{UNLOCK} UPDATE entries SET request_id = 'x' WHERE kind = 'refund'", {"chain", "adjusted"}),
    ("DELETE FROM reservations", {"reserved", "windows"}),
    (
        HELD_AGAIN,
        {"reserved", "windows", "open_pairs"},
    ),
    ("UPDATE reservations SET reserved_micro = 99", {"reserved", "windows"}),
    ("UPDATE reservations SET month = 1", {"months"}),
    ("UPDATE usage SET month = 999901", {"months", "metered"}),
    ("UPDATE witnesses SET month = 999901", {"months", "metered"}),
    ("UPDATE cap_windows SET posted_micro = 1", {"windows"}),
    ("UPDATE usage SET adjusted_micro = -9", {"posted", "adjusted", "windows"}),
    ("UPDATE usage SET adjusted_micro = -51", {"posted", "adjusted", "windows", "cost"}),
    ("UPDATE usage SET cause = 'boredom'", {"end_cause", "billed"}),
    ("UPDATE usage SET metered_output_tokens = 21", {"metered"}),
    ("UPDATE usage SET accepted_tokens = 19", {"metered", "billed"}),
    ("UPDATE usage SET max_tokens = 9", {"billed"}),
    ("UPDATE usage SET bill_limit_micro = 49", {"billed"}),
    ("UPDATE usage SET billed_micro = 51", {"posted", "billed", "windows"}),
    ("UPDATE usage SET delivered_tokens = 21", {"delivered"}),
]


@pytest.mark.parametrize(("how", "rules"), BREAKS)
async def test_a_break_is_found_by_its_rules(pg, tenant, how, rules):
    async with pg.transaction() as conn:
        await conn.execute(how)
    violations = (await read(pg)).violations
    assert {_RULES[violation.rule] for violation in violations} == rules
    assert all(violation.subject and violation.problem for violation in violations)


def test_there_is_a_break_for_every_rule():
    assert {rule for _, rules in BREAKS for rule in rules} == set(_RULES.values())


async def test_witnesses_not_yet_counted_are_found(pg, ledger, tenant):
    async with pg.transaction() as conn:
        await conn.execute(
            "INSERT INTO witnesses SELECT (jsonb_populate_record(w,"
            ' \'{"source": "journal", "output_tokens": 30, "exact": true}\')).* FROM witnesses AS w'
        )
    (violation,) = (await read(pg)).violations
    assert violation.rule == "metered is what the witnesses say"
    assert violation.problem == (
        "metered (10,0,20,0,0,0) (20 accepted), but its witnesses say (10,0,30,0,0,0) (20)"
    )


async def test_a_lapsed_gateway_that_holds_something_is_named(pg, tenant):
    async with pg.transaction() as conn:
        await assert_lease(conn, "gw_1", "local", 1)
        await assert_lease(conn, "gw_2", "local", 1)
        await conn.execute("UPDATE gateways SET last_seen = now() - interval '3 seconds'")
    (lapsed,) = (await read(pg)).lapsed_gateways
    assert (lapsed.gateway_id, lapsed.reservations) == ("gw_1", 1)
    assert lapsed.silent_ms >= 3_000


async def test_it_lists_so_many_of_each_rule(pg, ledger, tenant):
    for n in range(25):
        request_id = f"many_{n}"
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant))
        attempts = (an_attempt(a_usage(10, 0, 1)),)
        await ledger.settle(
            a_settle(request_id, tenant_id=tenant, attempts=attempts, delivered_tokens=2)
        )
    assert len((await read(pg)).violations) == 20
