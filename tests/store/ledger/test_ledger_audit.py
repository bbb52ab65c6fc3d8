"""The audit finds what is broken, and only that."""

import pytest

from core.metering import RequestTimings
from store.leases import assert_lease
from store.ledger_audit import audit
from tests.support.ledger_commands import a_reserve, a_settle, a_usage, a_witness, an_attempt
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.anyio, pytest.mark.services]


@pytest.fixture
def postgres_url(fresh_postgres_url):
    """What is broken here would be found by the next test."""
    return fresh_postgres_url


@pytest.fixture
async def tenant(pg, ledger):
    """One settled request `a` and one open request `b`."""
    tenant = await a_tenant(pg)
    for request_id in ("a", "b"):
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant))
    await ledger.settle(a_settle("a", tenant_id=tenant, timings=RequestTimings()))
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


# How to break it, the rule that says so, and whom it names.
BREAKS = [
    (
        "UPDATE accounts SET posted_micro = posted_micro + 1",
        {"an account's balances are the sum of its entries", "what is posted is what requests"},
    ),
    (
        "UPDATE accounts SET reserved_micro = reserved_micro + 1",
        {"an account's balances are the sum of its entries", "what is reserved is what open"},
    ),
    (
        "INSERT INTO entries SELECT tenant_id, 9, 'x', 'release', 0, 0, 0, 0 FROM accounts",
        {"an account's balances are the sum of its entries", "entries follow one another"},
    ),
    ("DELETE FROM reservations", {"what is reserved is what open", "every open request has one"}),
    (
        "INSERT INTO reservations SELECT 'a', tenant_id, 'gw', 5 FROM accounts",
        {"what is reserved is what open", "every open request has one"},
    ),
    (
        "INSERT INTO reservations SELECT 'x', tenant_id, 'gw', 0 FROM accounts",
        {"every open request has one"},
    ),
    (
        "UPDATE reservations SET reserved_micro = 99",
        {"what is reserved is what open", "every open request has one"},
    ),
    (
        "UPDATE usage SET cause = 'boredom' WHERE request_id = 'a'",
        {"every ended request has one end cause", "billed is the end cause's policy"},
    ),
    (
        "UPDATE usage SET metered_output_tokens = 21 WHERE request_id = 'a'",
        {"metered is what the witnesses say"},
    ),
    (
        "UPDATE usage SET accepted_tokens = 19 WHERE request_id = 'a'",
        {"metered is what the witnesses say", "billed is the end cause's policy"},
    ),
    (
        "UPDATE usage SET max_tokens = 9 WHERE request_id = 'a'",
        {"billed is the end cause's policy"},
    ),
    (
        "UPDATE usage SET bill_limit_micro = 49 WHERE request_id = 'a'",
        {"billed is the end cause's policy"},
    ),
    (
        "UPDATE usage SET billed_micro = 51 WHERE request_id = 'a'",
        {"what is posted is what requests", "billed is the end cause's policy"},
    ),
    (
        "UPDATE usage SET delivered_tokens = 21 WHERE request_id = 'a'",
        {"nothing is delivered that was not metered"},
    ),
]


@pytest.mark.parametrize(("how", "rules"), BREAKS)
async def test_a_break_is_found_by_its_rules(pg, tenant, how, rules):
    async with pg.transaction() as conn:
        await conn.execute(how)
    violations = (await read(pg)).violations
    found = {violation.rule for violation in violations}
    assert len(found) == len(rules)
    assert all(any(rule.startswith(start) for rule in found) for start in rules)
    assert all(violation.subject and violation.problem for violation in violations)


async def test_witnesses_not_yet_counted_are_found(pg, ledger, tenant):
    async with pg.transaction() as conn:
        await conn.execute(
            "INSERT INTO witnesses VALUES"
            " ('a', 1, 'journal', 'rep', 10, 0, 30, true, true, 'complete', 1)"
        )
    (violation,) = (await read(pg)).violations
    assert violation.rule == "metered is what the witnesses say"
    assert violation.problem == "metered 10/0/20 (20 accepted), but its witnesses say 10/0/30 (20)"


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
