"""Judges what `check` has gathered: pure, one function for each item of the report.

With requests in flight, open things are normal and an item says how many; it is off only
where nobody is left to close them. `quiescent` is the stricter question: is everything that
should be zero at rest zero? A part that could not be asked is off, with the reason.
"""

from collections.abc import Iterable, Sequence

import msgspec

from control_plane.replica_client import ReplicaLoad, Unreachable
from store.audit import Books, Lease, OpenReservation
from store.differences import Difference
from store.dispatch_audit import DispatchAudit
from store.ledger_audit import LedgerAudit, Violation

# A silent gateway's requests are due one lease after its last word and one more of grace for
# the worker's journal; the third lets the sweeper come round.
LEASES_TO_SWEEP = 3


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at. `detail` is for a person."""

    name: str
    ok: bool
    detail: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`ok` only if every item is."""

    ok: bool
    quiescent: bool
    items: tuple[Item, ...]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What is still normal. `lease_ms` is for gateways that never said their own."""

    quiescent: bool
    lease_ms: int
    request_ms_max: int


class AskedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that should be running, and its own word."""

    replica_id: str
    boot_id: str
    answer: ReplicaLoad | Unreachable


def report(items: Sequence[Item], rules: Rules) -> Report:
    """The items together."""
    return Report(ok=all(item.ok for item in items), quiescent=rules.quiescent, items=tuple(items))


def unasked(names: Iterable[str], reason: str) -> list[Item]:
    """Items nobody could look at."""
    return [Item(name=name, ok=False, detail=f"could not be checked: {reason}") for name in names]


BOOK_ITEMS = ("reservations", "leases", "entries", "metered", "reconciliation")
REPLICA_ITEMS = ("kv_blocks", "journals")
DISPATCH_ITEMS = ("tickets", "dispatcher_accounts")

# The ledger's rules about what a request used and paid; its other rules are about accounts.
METERED_RULES = frozenset(
    {
        "metered is what the witnesses say",
        "billed is the end cause's policy applied to metered",
        "nothing is delivered that was not metered",
    }
)


def book_items(books: Books, rules: Rules) -> list[Item]:
    """Everything that Postgres alone can answer, in the order of `BOOK_ITEMS`."""
    broken = books.ledger.violations
    return [
        reservations(books, rules),
        leases(books.leases),
        _ledger_rules("entries", [v for v in broken if v.rule not in METERED_RULES]),
        _ledger_rules("metered", [v for v in broken if v.rule in METERED_RULES]),
        reconciliation(books.differences),
    ]


def reservations(books: Books, rules: Rules) -> Item:
    """Held money has a living holder, and not for ever."""
    faults = [
        f"{held.request_id} of {held.gateway_id}: {problem}"
        for held in books.reservations
        if (problem := _abandoned(held, rules))
    ]
    oldest = books.oldest
    if oldest is not None and oldest.age_ms > rules.request_ms_max:
        faults.append(f"{oldest.request_id} of {oldest.gateway_id}: open for {oldest.age_ms} ms")
    held_now = books.ledger.open_reservations
    detail = f"{held_now} open, each held by a living gateway"
    return _item("reservations", detail, faults, at_rest=held_now if rules.quiescent else 0)


def leases(seen: Sequence[Lease]) -> Item:
    """No gateway has been silent for long with requests still in its name."""
    faults = [
        f"{lease.id} is silent for {lease.silent_ms} ms and holds {lease.reservations}"
        for lease in seen
        if lease.reservations and lease.silent_ms > LEASES_TO_SWEEP * lease.lease_ms
    ]
    alive = sum(not lease.retired and lease.silent_ms <= lease.lease_ms for lease in seen)
    return _item("leases", f"{alive} gateways alive, {len(seen) - alive} gone", faults)


def _ledger_rules(name: str, broken: Sequence[Violation]) -> Item:
    faults = [f"{v.rule}: {v.subject} {v.problem}" for v in broken]
    return _item(name, "the ledger's rules hold", faults)


def reconciliation(found: Sequence[Difference]) -> Item:
    """Nothing that the reconciler has told of waits for a person."""
    faults = [f"{d.kind} {d.subject}: {d.detail} (difference {d.id})" for d in found]
    return _item("reconciliation", "no difference is open", faults)


def lasting(first: LedgerAudit, second: LedgerAudit) -> LedgerAudit:
    """The second, with only those violations that the first had too.

    A witness is committed a moment before it is counted, so one look may fall between.
    """
    seen = {(v.rule, v.subject) for v in first.violations}
    kept = tuple(v for v in second.violations if (v.rule, v.subject) in seen)
    return msgspec.structs.replace(second, violations=kept)


def kv_blocks(replicas: Sequence[AskedReplica], rules: Rules) -> Item:
    """No block is owned by nobody; each replica's own check of its cache holds."""
    faults = [
        f"{replica.replica_id}: {problem}"
        for replica in replicas
        if (problem := _kv_problem(replica))
    ]
    loads = _loads(replicas)
    used, busy = sum(load.kv_blocks_used for load in loads), sum(load.busy for load in loads)
    detail = f"{used} blocks in use by {busy} requests on {len(loads)} replicas"
    return _item("kv_blocks", detail, faults, at_rest=used + busy if rules.quiescent else 0)


def journals(books: Books | None, replicas: Sequence[AskedReplica], rules: Rules) -> Item:
    """At rest every journal is delivered, and has closed every attempt that did any work."""
    unacked = sum(load.journal_unacked for load in _loads(replicas))
    detail = f"{unacked} attempts not yet delivered"
    waiting = unacked
    if books is not None:
        waiting += books.ledger.unconfirmed_attempts
        detail += (
            f"; {books.ledger.unconfirmed_attempts} ended attempts not closed by a journal;"
            f" {books.orphans} requests known to journals alone"
        )
    return _item("journals", detail, [], at_rest=waiting if rules.quiescent else 0)


def tickets(seen: DispatchAudit, rules: Rules) -> Item:
    """The dispatcher's memory does not contradict itself; at rest it holds no ticket."""
    count = sum(pool.queued + pool.granted + pool.placed + pool.dropped for pool in seen.pools)
    held = sum(len(tenant.held) for tenant in seen.tenants)
    queued = sum(pool.queued for pool in seen.pools)
    detail = f"{count} in pools, {queued} of them queued; {held} held by tenants"
    return _item("tickets", detail, seen.problems, at_rest=count + held if rules.quiescent else 0)


def dispatcher_accounts(seen: DispatchAudit, rules: Rules) -> Item:
    """What tickets hold of replicas; the sums are checked with the tickets."""
    accounts = [account for pool in seen.pools for account in pool.replicas]
    blocks = sum(account.kv_blocks for account in accounts)
    unreported = sum(account.unreported_blocks for account in accounts)
    detail = f"{blocks} blocks on {len(accounts)} replicas, {unreported} of them not reported yet"
    at_rest = blocks + unreported if rules.quiescent else 0
    return _item("dispatcher_accounts", detail, [], at_rest=at_rest)


def _item(name: str, detail: str, faults: Sequence[str], *, at_rest: int = 0) -> Item:
    """`at_rest` counts what must be gone when nothing runs: anything left is a fault."""
    if faults:
        return Item(name=name, ok=False, detail="; ".join(faults))
    if at_rest:
        return Item(name=name, ok=False, detail=f"not at rest: {detail}")
    return Item(name=name, ok=True, detail=detail)


def _abandoned(held: OpenReservation, rules: Rules) -> str:
    lease_ms = held.lease_ms if held.lease_ms is not None else rules.lease_ms
    due_ms = LEASES_TO_SWEEP * lease_ms
    if held.gateway_silent_ms is None:
        return "its gateway has no lease" if held.age_ms > due_ms else ""
    if held.gateway_silent_ms > due_ms:
        return f"its gateway is silent for {held.gateway_silent_ms} ms"
    return ""


def _kv_problem(replica: AskedReplica) -> str:
    answer = replica.answer
    if isinstance(answer, Unreachable):
        return f"could not be checked: {answer.reason}"
    if answer.boot_id != replica.boot_id:
        return f"answers as {answer.boot_id}, registered as {replica.boot_id}"
    if not answer.integrity:
        return "its own check of the cache fails"
    if not answer.busy and answer.kv_blocks_used:
        return f"idle with {answer.kv_blocks_used} blocks in use"
    return ""


def _loads(replicas: Sequence[AskedReplica]) -> list[ReplicaLoad]:
    return [r.answer for r in replicas if isinstance(r.answer, ReplicaLoad)]
