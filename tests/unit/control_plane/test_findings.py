"""How `check` judges what was gathered: in flight, at rest, and with parts away."""

import msgspec
import pytest

from control_plane import findings
from control_plane.findings import AskedReplica, Rules
from control_plane.replica_client import ReplicaLoad, Unreachable
from store import ledger_audit
from store.audit import Books, Lease, OldestReservation, OpenReservation
from store.dispatch_audit import DispatchAudit, PoolAudit, ReplicaAccount, TenantAudit
from store.ledger_audit import LedgerAudit, Violation

LIVE = Rules(quiescent=False, lease_ms=5_000, request_ms_max=3_600_000)
REST = msgspec.structs.replace(LIVE, quiescent=True)
OVERDUE_MS = findings.LEASES_TO_SWEEP * 5_000


def a_ledger(**changes):
    fields = {
        "open_reservations": 0,
        "oldest_open_ms": 0,
        "lapsed_gateways": (),
        "unconfirmed_attempts": 0,
        "violations": (),
    }
    return LedgerAudit(**(fields | changes))


def books(**changes):
    fields = {
        "ledger": a_ledger(),
        "reservations": [],
        "oldest": None,
        "leases": [],
        "orphans": 0,
        "differences": [],
    }
    return Books(**(fields | changes))


def held(**changes):
    fields = {
        "request_id": "req_1",
        "tenant_id": "ten_1",
        "gateway_id": "gw_1",
        "reserved_micro": 10,
        "age_ms": 100,
        "lease_ms": 5_000,
        "gateway_silent_ms": 400,
    }
    return OpenReservation(**(fields | changes))


def with_held(**changes):
    return books(ledger=a_ledger(open_reservations=1), reservations=[held(**changes)])


def a_lease(**changes):
    fields = {
        "id": "gw_1",
        "region": "local",
        "lease_ms": 5_000,
        "retired": False,
        "silent_ms": 400,
        "reservations": 0,
    }
    return Lease(**(fields | changes))


def asked(answer=None, **changes):
    fields = {
        "boot_id": "boot_1",
        "kv_blocks_total": 64,
        "kv_blocks_free": 64,
        "running": 0,
        "waiting": 0,
        "integrity": True,
        "journal_unacked": 0,
    }
    load = answer or ReplicaLoad(**(fields | changes))
    return AskedReplica(replica_id="rep-0", boot_id="boot_1", answer=load)


def test_everything_at_rest_is_well_by_both_rules():
    for rules in (LIVE, REST):
        items = findings.book_items(books(), rules)
        assert [item.name for item in items] == list(findings.BOOK_ITEMS)
        assert findings.report(items, rules).ok
        assert findings.kv_blocks([asked()], rules).ok
        assert findings.journals(books(), [asked()], rules).ok


def test_one_item_off_makes_the_report_off():
    items = findings.book_items(with_held(), REST)
    assert [item.name for item in items if not item.ok] == ["reservations"]
    assert not findings.report(items, REST).ok


def test_a_living_gateways_reservation_is_off_only_at_rest():
    assert findings.reservations(with_held(), LIVE).ok
    assert "not at rest: 1 open" in findings.reservations(with_held(), REST).detail


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({"gateway_silent_ms": OVERDUE_MS}, True),
        ({"gateway_silent_ms": OVERDUE_MS + 1}, False),
        ({"gateway_silent_ms": None, "lease_ms": None, "age_ms": OVERDUE_MS}, True),
        ({"gateway_silent_ms": None, "lease_ms": None, "age_ms": OVERDUE_MS + 1}, False),
        ({"gateway_silent_ms": OVERDUE_MS + 1, "lease_ms": 60_000}, True),
    ],
)
def test_a_silent_gateways_reservation_is_off_when_the_sweeper_should_have_come(changes, ok):
    item = findings.reservations(with_held(**changes), LIVE)
    assert item.ok is ok
    assert ok or "req_1 of gw_1" in item.detail


def test_an_old_reservation_is_off_whoever_holds_it():
    old = OldestReservation(request_id="req_0", gateway_id="gw_1", age_ms=3_600_001)
    item = findings.reservations(books(oldest=old), LIVE)
    assert (item.ok, "req_0" in item.detail) == (False, True)
    young = msgspec.structs.replace(old, age_ms=3_600_000)
    assert findings.reservations(books(oldest=young), LIVE).ok


def test_a_gone_gateway_is_off_only_if_it_still_holds_something():
    gone = a_lease(silent_ms=OVERDUE_MS + 1)
    assert findings.leases([gone, a_lease()]).detail == "1 gateways alive, 1 gone"
    item = findings.leases([msgspec.structs.replace(gone, reservations=3)])
    assert (item.ok, "holds 3" in item.detail) == (False, True)
    assert findings.leases([a_lease(reservations=3)]).ok


def test_the_ledgers_rules_are_told_under_the_item_they_belong_to():
    for rule in ledger_audit._RULES:
        violation = Violation(rule=rule, subject="req_1", problem="is off")
        items = findings.book_items(books(ledger=a_ledger(violations=(violation,))), LIVE)
        off = [item.name for item in items if not item.ok]
        assert off == ["metered" if rule in findings.METERED_RULES else "entries"]
    assert set(ledger_audit._RULES) >= findings.METERED_RULES


def test_only_what_two_looks_have_seen_is_off():
    passing = Violation(rule="metered is what the witnesses say", subject="req_1", problem="3")
    lasting = Violation(rule="metered is what the witnesses say", subject="req_2", problem="4")
    new = Violation(rule="metered is what the witnesses say", subject="req_3", problem="5")
    first = a_ledger(violations=(passing, lasting))
    second = a_ledger(violations=(lasting, new), open_reservations=2)
    kept = findings.lasting(first, second)
    assert (kept.violations, kept.open_reservations) == ((lasting,), 2)


@pytest.mark.parametrize(
    ("replica", "problem"),
    [
        (asked(Unreachable("connection refused")), "could not be checked: connection refused"),
        (asked(boot_id="boot_2"), "answers as boot_2, registered as boot_1"),
        (asked(integrity=False), "its own check of the cache fails"),
        (asked(kv_blocks_free=60), "idle with 4 blocks in use"),
    ],
)
def test_a_replica_with_a_fault_is_off_by_both_rules(replica, problem):
    for rules in (LIVE, REST):
        item = findings.kv_blocks([replica], rules)
        assert (item.ok, item.detail) == (False, f"rep-0: {problem}")


def test_a_busy_replica_is_off_only_at_rest():
    busy = asked(kv_blocks_free=60, running=1, waiting=1)
    assert findings.kv_blocks([busy], LIVE).detail == "4 blocks in use by 2 requests on 1 replicas"
    assert findings.kv_blocks([busy], LIVE).ok
    assert not findings.kv_blocks([busy], REST).ok


def test_journals_are_judged_at_rest_alone():
    late = books(ledger=a_ledger(unconfirmed_attempts=2))
    assert findings.journals(late, [asked(journal_unacked=3)], LIVE).ok
    assert not findings.journals(late, [], REST).ok
    assert not findings.journals(books(), [asked(journal_unacked=3)], REST).ok
    assert not findings.journals(None, [asked(journal_unacked=3)], REST).ok
    assert findings.journals(None, [asked(Unreachable("away"))], REST).ok


def a_dispatch(**pool):
    account = ReplicaAccount(
        replica="rep-0",
        boot_id="boot_1",
        tickets=1,
        kv_blocks=pool.pop("kv_blocks", 0),
        unreported_blocks=0,
    )
    counts = {"queued": 0, "granted": 0, "placed": 0, "dropped": 0} | pool
    found = PoolAudit(pool="a@local", epoch="1", gateways=(), replicas=(account,), **counts)
    return DispatchAudit(pools=(found,), tenants=(), problems=())


def test_tickets_are_off_at_rest_and_contradictions_always():
    busy = a_dispatch(placed=2, queued=1, kv_blocks=7)
    assert findings.tickets(busy, LIVE).detail == "3 in pools, 1 of them queued; 0 held by tenants"
    assert findings.tickets(busy, LIVE).ok
    assert not findings.tickets(busy, REST).ok
    assert findings.dispatcher_accounts(busy, LIVE).ok
    assert not findings.dispatcher_accounts(busy, REST).ok
    assert findings.tickets(a_dispatch(), REST).ok
    assert findings.dispatcher_accounts(a_dispatch(), REST).ok
    wrong = msgspec.structs.replace(a_dispatch(), problems=("pool a@local: off by 3",))
    assert findings.tickets(wrong, LIVE).detail == "pool a@local: off by 3"
    by_tenant = msgspec.structs.replace(
        a_dispatch(), tenants=(TenantAudit(tenant="ten_1", held=("req_1",)),)
    )
    assert not findings.tickets(by_tenant, REST).ok


def test_what_could_not_be_asked_is_off_with_the_reason():
    items = findings.unasked(findings.DISPATCH_ITEMS, "Valkey: not connected")
    assert [item.name for item in items] == ["tickets", "dispatcher_accounts"]
    assert {item.ok for item in items} == {False}
    assert items[0].detail == "could not be checked: Valkey: not connected"
