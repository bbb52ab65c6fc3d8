"""What must hold of a ledger at every moment, whatever has failed: fifteen checks, each by name.

They follow from TigerBeetle's two-phase transfers and Jepsen's bank and counter checkers. Each
takes what the database holds (`View`) and what callers know (`Evidence`), and raises
AssertionError with what is wrong. `broken` tries them all.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from itertools import pairwise
from typing import Any

from core.accounts import EntryKind
from core.caps import Cap, Period, counts, window_start
from core.metering import LedgerRefused, Reserve
from core.money import EndCause, billable, billed_micro
from core.protocol import Usage
from tests.support.invariants_evidence import Evidence
from tests.support.invariants_floats import floats_in_the_code
from tests.support.invariants_view import Row, View

Check = Callable[[View, Evidence], None]

FREEING = {EntryKind.SETTLE, EntryKind.RELEASE, EntryKind.EXPIRE}
AFTER_AN_END = {
    EntryKind.OVERAGE,
    EntryKind.CORRECTION,
    EntryKind.REFUND,
    EntryKind.REPRICE,
}
BALANCES = ("reserved", "posted", "credit")

# What a request's row says of how it was asked for; a claim is kept under its key.
ASKED = [name for name in Reserve.__struct_fields__ if name != "claim"]


def both_sides_agree(view: View, evidence: Evidence) -> None:
    """1. What an account holds and owes is what its requests hold and owe, at every read."""
    for tenant, account in view.accounts.items():
        mine = [row for row in view.requests.values() if row["tenant_id"] == tenant]
        held = sum(row["reserved_micro"] for row in mine if row["state"] == "open")
        spent = sum(row["billed_micro"] + row["adjusted_micro"] for row in mine)
        given = sum(
            entry["posted_delta_micro"]
            for entry in view.entries[tenant]
            if entry["kind"] == EntryKind.ADJUSTMENT
        )
        credit = sum(
            entry["credit_delta_micro"]
            for entry in view.entries[tenant]
            if entry["kind"] == EntryKind.CREDIT
        )
        assert account["reserved_micro"] == held, f"{tenant} reserved"
        assert account["posted_micro"] == spent + given, f"{tenant} posted"
        assert account["credit_micro"] == credit, f"{tenant} credit"


def nothing_goes_over_a_limit(view: View, evidence: Evidence) -> None:
    """2. Posted + reserved is within every hard limit; over one set lower it only falls."""
    for name, limit, total in limits(view):
        assert total <= max(limit, evidence.over.get(name, 0)), f"{name}: {total} of {limit}"


def a_reservation_ends_once(view: View, evidence: Evidence) -> None:
    """3. Each is settled, released or expired once, and none is open when all is quiet."""
    for request_id, row in view.requests.items():
        endings = [entry for entry in view.of(request_id) if entry["kind"] in FREEING]
        assert len(endings) == (row["state"] != "open"), f"{request_id} ended {len(endings)} times"
        held = sum(entry["reserved_delta_micro"] for entry in view.of(request_id))
        assert held == (row["reserved_micro"] if row["state"] == "open" else 0), request_id
        assert row["state"] != "open" or not evidence.quiesced, f"{request_id} is left open"


def a_bill_over_its_reservation_is_an_overage(view: View, evidence: Evidence) -> None:
    """4. An ending posts no more than it frees; the rest of a bill is an entry of its own."""
    for entries in view.entries.values():
        for entry in entries:
            if entry["kind"] in FREEING:
                assert entry["posted_delta_micro"] <= -entry["reserved_delta_micro"], entry["line"]
        for before, entry in pairwise(entries):
            if entry["kind"] == EntryKind.OVERAGE:
                assert before["kind"] == EntryKind.SETTLE, entry["line"]
                assert before["request_id"] == entry["request_id"], entry["line"]
                assert before["posted_delta_micro"] == -before["reserved_delta_micro"]
                assert entry["posted_delta_micro"] > 0, entry["line"]


def the_same_words_have_one_effect(view: View, evidence: Evidence) -> None:
    """5. However often, from whatever process, before or after a crash; and one answer."""
    for repeat in evidence.repeats:
        assert all(answer == repeat.answers[0] for answer in repeat.answers), repeat
    for request_id, row in view.requests.items():
        kinds = Counter(entry["kind"] for entry in view.of(request_id))
        assert kinds[EntryKind.RESERVE] == 1, f"{request_id} reserved {kinds}"
        assert kinds[EntryKind.OVERAGE] <= 1, f"{request_id} over {kinds}"
        assert row["reserved_micro"] <= evidence.asked_micro[request_id], f"{request_id} holds"
        billed = sum(
            entry["posted_delta_micro"]
            for entry in view.of(request_id)
            if entry["kind"] in FREEING | {EntryKind.OVERAGE, EntryKind.CORRECTION}
        )
        assert billed == row["billed_micro"], f"{request_id} posted {billed}"
    adjusted = Counter(
        entry["adjustment_id"]
        for entries in view.entries.values()
        for entry in entries
        if entry["adjustment_id"]
    )
    assert set(adjusted.values()) <= {1}, adjusted


def a_taken_id_is_refused_to_other_words(view: View, evidence: Evidence) -> None:
    """6. The same id with another body: rejected, and no effect."""
    for reuse in evidence.reuses:
        assert reuse.answer == LedgerRefused(reason="id_reused"), reuse
        assert reuse.entries_after == reuse.entries_before, reuse
    for request_id, asked in evidence.reserved.items():
        row = view.requests.get(request_id)
        if row is not None:
            assert {name: row[name] for name in ASKED} == {
                name: getattr(asked, name) for name in ASKED
            }, request_id


def a_refused_id_stays_refused(view: View, evidence: Evidence) -> None:
    """7. Whatever room there is later: the answer is the same, and nothing is held for it."""
    for request_id, first, again in evidence.asked_again:
        assert again == first, f"{request_id}: {first}, then {again}"
    for request_id in evidence.refused:
        assert request_id not in view.requests, f"{request_id} was refused and is there"
        assert request_id in view.refusals, f"{request_id} is forgotten"


def nothing_follows_an_end_but_corrections(view: View, evidence: Evidence) -> None:
    """8. No post on a reservation that has ended or expired, and no expiry before its time."""
    for request_id, row in view.requests.items():
        entries = view.of(request_id)
        end = next((n for n, entry in enumerate(entries) if entry["kind"] in FREEING), None)
        if end is not None:
            late = {entry["kind"] for entry in entries[end + 1 :]}
            assert late <= AFTER_AN_END, f"{request_id}: {late}"
            if row["settled_by"] == "sweeper":
                ended_us, opened_us = entries[end]["at_us"], entries[0]["at_us"]
                due_us = expires_us(evidence, row["gateway_id"], opened_us, ended_us)
                assert ended_us >= due_us, f"{request_id} expired {due_us - ended_us} µs early"


def balances_are_the_fold_of_a_chain(view: View, evidence: Evidence) -> None:
    """9. Entries are numbered without a gap, each follows from the last, and the links hold."""
    for tenant, account in view.accounts.items():
        entries = view.entries[tenant]
        assert [entry["seq"] for entry in entries] == list(range(1, account["entries"] + 1)), tenant
        running = dict.fromkeys(BALANCES, 0)
        link, lines = b"", []
        for entry in entries:
            for balance in BALANCES:
                running[balance] += entry[f"{balance}_delta_micro"]
                assert running[balance] == entry[f"{balance}_micro"], entry["line"]
            lines.append(entry["line"])
            if entry["chain"] is not None:
                link, lines = hashlib.sha256(link + "\n".join(lines).encode()).digest(), []
                assert bytes_of(entry["chain"]) == link, f"{tenant}/{entry['seq']} does not link"
        assert not lines, f"{tenant}: {len(lines)} entries in no link"
        assert bytes_of(account["head"]) == link, f"{tenant}: head"
        for balance in BALANCES:
            assert account[f"{balance}_micro"] == running[balance], f"{tenant} {balance}"


def entries_never_change(view: View, evidence: Evidence) -> None:
    """10. UPDATE, DELETE and TRUNCATE are refused, and what was read once reads the same."""
    assert not evidence.immutable_changed, evidence.immutable_changed
    for tenant, before in evidence.entries.items():
        assert view.entries[tenant][: len(before)] == before, f"{tenant}'s past has changed"


def no_money_is_a_float(view: View, evidence: Evidence) -> None:
    """11. In no column, no value and no line of the code that computes it."""
    assert not view.float_columns, view.float_columns
    assert not floats_in_the_code(), floats_in_the_code()
    for row in [*view.accounts.values(), *view.requests.values(), *view.windows.values()]:
        for name, value in row.items():
            if name.endswith(("_micro", "_tokens")):
                assert value is None or type(value) is int, f"{name} = {value}"


def reads_are_between_the_known_and_the_possible(view: View, evidence: Evidence) -> None:
    """12. Σ of what was answered ≤ what is read ≤ that + Σ of what was not, of each count."""
    for tenant in view.entries:
        mine = {name for name, row in view.requests.items() if row["tenant_id"] == tenant}
        known = {n for n, asked in evidence.reserved.items() if asked.tenant_id == tenant}
        perhaps = {n for n, asked in evidence.perhaps_reserved.items() if asked.tenant_id == tenant}
        assert known <= mine <= known | perhaps, f"{tenant}: {known ^ mine} of {perhaps}"
        over = {name for name in mine if view.requests[name]["state"] != "open"}
        ended, perhaps = evidence.ended & mine, evidence.perhaps_ended & mine
        assert ended <= over <= ended | perhaps, f"{tenant}: ended {ended ^ over}"
        bills = [evidence.bills.get(name, (0, 0)) for name in mine]
        billed = sum(view.requests[name]["billed_micro"] for name in mine)
        least, most = sum(bill[0] for bill in bills), sum(bill[1] for bill in bills)
        assert least <= billed <= most, f"{tenant}: billed {billed}, of {least} to {most}"
        if tenant in view.accounts:
            least, most = evidence.credit(tenant)
            credit = view.accounts[tenant]["credit_micro"]
            assert least <= credit <= most, f"{tenant}: credit {credit}, of {least} to {most}"


def counters_are_what_a_rebuild_gives(view: View, evidence: Evidence) -> None:
    """13. Spend counters, made anew from requests and entries alone, are the same numbers.

    Ours are in Postgres, in `cap_windows` and `accounts`: Valkey counts rates, and no money.
    """
    rebuilt: dict[tuple[str, str, str, str], list[int]] = {}
    for cap, row in capped(view):
        starts = window_start(cap.period, date.fromisoformat(row["day"]))
        place = (cap.tenant_id, cap.key_id, cap.period.value, starts.isoformat())
        sums = rebuilt.setdefault(place, [0, 0])
        sums[0] += row["billed_micro"] + row["adjusted_micro"]
        sums[1] += row["reserved_micro"] if row["state"] == "open" else 0
    for place, window in view.windows.items():
        found = [window["posted_micro"], window["reserved_micro"]]
        assert found == rebuilt.pop(place, [0, 0]), f"{place}: {found}"
    assert not any(any(sums) for sums in rebuilt.values()), f"not counted: {rebuilt}"


def no_fault_breaks_any_of_these(view: View, evidence: Evidence) -> None:
    """14. After a cut, a crash or a kill at any step, 1 to 9 hold."""
    if evidence.faults:
        for check in list(INVARIANTS.values())[:9]:
            check(view, evidence)


def a_bill_keeps_its_price_version(view: View, evidence: Evidence) -> None:
    """15. A request is billed at the version it named, and an old export reads the same."""
    for request_id, row in view.requests.items():
        asked = evidence.reserved.get(request_id)
        if asked is not None:
            assert row["price_id"] == asked.price_id, f"{request_id} has another price"
        if row["state"] != "open":
            due = due_micro(view, row)
            limit = row["bill_limit_micro"]
            bill = due if limit is None else min(due, limit)
            assert row["billed_micro"] == bill, f"{request_id} is billed otherwise than {bill}"
    for tenant, taken in evidence.exports.items():
        for seq, before in taken.items():
            assert export(view, tenant, seq) == before, f"{tenant}: the export up to {seq}"


INVARIANTS: dict[int, Check] = dict(
    enumerate(
        [
            both_sides_agree,
            nothing_goes_over_a_limit,
            a_reservation_ends_once,
            a_bill_over_its_reservation_is_an_overage,
            the_same_words_have_one_effect,
            a_taken_id_is_refused_to_other_words,
            a_refused_id_stays_refused,
            nothing_follows_an_end_but_corrections,
            balances_are_the_fold_of_a_chain,
            entries_never_change,
            no_money_is_a_float,
            reads_are_between_the_known_and_the_possible,
            counters_are_what_a_rebuild_gives,
            no_fault_breaks_any_of_these,
            a_bill_keeps_its_price_version,
        ],
        start=1,
    )
)


def broken(view: View, evidence: Evidence, numbers: Iterable[int] = ()) -> dict[int, str]:
    """Which invariants do not hold, of these or of all, by number, and what is wrong."""
    found = {}
    for number in numbers or INVARIANTS:
        try:
            INVARIANTS[number](view, evidence)
        except AssertionError as error:
            found[number] = f"{INVARIANTS[number].__name__}: {error}"
    return found


def limits(view: View) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Every hard limit: its name, how much, and what is used of it."""
    for tenant, account in view.accounts.items():
        used = account["posted_micro"] + account["reserved_micro"]
        if account["hard_cap_micro"] is not None:
            yield (tenant, "total"), account["hard_cap_micro"], used
        if account["prepaid"]:
            yield (tenant, "credit"), account["credit_micro"], used
    for cap in view.caps:
        for place, window in view.windows.items():
            if cap["hard_micro"] is not None and place[:3] == (
                cap["tenant_id"],
                cap["key_id"],
                cap["period"],
            ):
                yield place, cap["hard_micro"], window["posted_micro"] + window["reserved_micro"]


def capped(view: View) -> Iterator[tuple[Cap, Row]]:
    """Every cap with each request that it counts."""
    for row in view.caps:
        cap = Cap(
            tenant_id=row["tenant_id"],
            key_id=row["key_id"],
            period=Period(row["period"]),
            soft_micro=row["soft_micro"],
            hard_micro=row["hard_micro"],
            since=date.fromisoformat(row["since"]),
        )
        for request in view.requests.values():
            if request["tenant_id"] == cap.tenant_id and counts(
                cap, key_id=request["key_id"], day=date.fromisoformat(request["day"])
            ):
                yield cap, request


def expires_us(evidence: Evidence, gateway_id: str, opened_us: int, ended_us: int) -> int:
    """The earliest moment at which a request of this gateway might expire, as of its end."""
    heard = [until for at, until in evidence.leases.get(gateway_id, []) if at <= ended_us]
    return heard[-1] if heard else opened_us + evidence.lease_us_default


def due_micro(view: View, row: Row) -> int:
    """The bill by the rules in memory, for what the row says was metered."""
    metered = Usage(**{name: row[f"metered_{name}"] for name in Usage.__struct_fields__})
    cause = EndCause(row["cause"])
    usage = billable(
        cause,
        metered,
        accepted_tokens=row["accepted_tokens"],
        max_tokens=row["max_tokens"] * row["choices"],
    )
    return billed_micro(cause, view.prices[row["price_id"]], usage)


def export(view: View, tenant: str, seq: int) -> bytes:
    """A closed period as one would hand it out: entries up to `seq`, each with its rates."""
    lines = []
    for entry in view.entries[tenant][:seq]:
        request = view.requests.get(entry["request_id"])
        price = None if request is None else view.prices[request["price_id"]]
        lines.append(f"{entry['line']};{price}")
    return "\n".join(lines).encode()


def bytes_of(value: Any) -> bytes:
    """A bytea as JSON has it."""
    return bytes.fromhex(value.removeprefix("\\x"))
