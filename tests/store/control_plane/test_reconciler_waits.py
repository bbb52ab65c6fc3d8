"""What may still come is waited for, and told of when it is overdue."""

import msgspec
import pytest

from core.providers import provider_replica
from store.ledger_audit import audit
from tests.support.ledger_commands import a_reserve, a_settle, a_witness, an_attempt
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


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


async def test_an_outside_provider_keeps_no_journal_and_none_is_missed(overdue):
    tenant = await a_tenant(overdue.pg)
    replica = provider_replica("acme", "told")
    attempt = msgspec.structs.replace(an_attempt(), replica_id=replica)
    await overdue.ledger.reserve(a_reserve("req_1", tenant_id=tenant))
    await overdue.ledger.settle(a_settle("req_1", tenant_id=tenant, attempts=(attempt,)))
    await overdue.rounds(3)
    assert await overdue.differences() == []
    async with overdue.pg.connection() as conn:
        assert (await audit(conn)).unconfirmed_attempts == 0


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
