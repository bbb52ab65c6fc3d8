"""The ledger's rules, as a state machine in memory: what the SQL in `store` must agree with.

    reserve ─► open ─┬─ settle (bill > 0) ─► settled      top_up raises an open reservation
                     ├─ settle (bill = 0) ─► released     a bill over it is an overage entry
                     └─ expire ────────────► expired      by the sweeper, for a dead gateway

What is billed is a function of the end cause, the witnesses' words and what was asked for
(`core.money.billable`), whatever order they came in. Under a hard cap it is cut: to what the
request holds when it ends, and afterwards to what it held and to the room that is left, for
good. What was cut off is metered, and ours to bear.

Two-phase as TigerBeetle's pending transfers, with its idempotency by the caller's id: the
same words again have no further effect and get the same answer; an id that was refused stays
refused. Expected refusals are values, tried in the order each function lists them.

Invariants: an account's balances are the fold of its entries, which are numbered without a
gap and never change. No word takes posted + reserved over a hard cap.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeAlias

import msgspec

from core.metering import (
    LedgerRefused,
    RequestTimings,
    Reserve,
    Reserved,
    Settle,
    Settled,
    TopUp,
    Witness,
)
from core.money import EndCause, Price, billable, billed_micro
from core.protocol import Usage

LOST_IN_JOURNAL = "lost"  # a journal's word on an attempt that its worker did not live to end


class EntryKind(StrEnum):
    """Why an account changed."""

    RESERVE = "reserve"
    TOP_UP = "top_up"
    SETTLE = "settle"  # frees the reservation and posts a bill, up to what was reserved
    RELEASE = "release"  # frees it for nothing
    EXPIRE = "expire"  # frees it for nothing, on the sweeper's word
    OVERAGE = "overage"  # the part of a bill over its reservation, where there is no cap
    CORRECTION = "correction"  # a witness or the gateway changed a bill already posted


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's balances in micro-units. `entries` numbers the last entry; 0 is none yet."""

    tenant_id: str
    hard_cap_micro: int | None  # None: post-paid without a cap
    posted_micro: int = 0
    reserved_micro: int = 0
    entries: int = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one account, and its balances afterwards."""

    tenant_id: str
    seq: int  # from 1, without a gap
    request_id: str
    kind: EntryKind
    reserved_delta_micro: int
    posted_delta_micro: int
    reserved_micro: int
    posted_micro: int


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """All that one source has said of one attempt."""

    usage: Usage
    exact: bool = False  # a journal's own last word: nothing overrules it
    final: bool = False
    cause: str = ""
    replica_id: str = ""
    at_ms: int = 0


Said: TypeAlias = tuple[int, str, Heard]  # about an attempt, by a source


class Expire(msgspec.Struct, frozen=True, kw_only=True):
    """The sweeper ends a request whose gateway is silent."""

    request_id: str
    ended_ms: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request: what it asked, what it holds, and how it ended."""

    asked: Reserve
    reserved_micro: int  # in all, top-ups included; held while `cause` is None
    cause: EndCause | None = None
    provisional: bool = False  # the sweeper's word, which yields to the gateway's
    metered: Usage = Usage()
    accepted_tokens: int = 0  # of the metered output, as far as the gateway has said
    attempts: int = 0  # the highest number heard of
    billed_micro: int = 0
    bill_limit_micro: int | None = None  # what a hard cap has cut the bill to, for good
    delivered_tokens: int = 0
    timings: RequestTimings = RequestTimings()
    ended_ms: int = 0


class Book:
    """Every account and request. The simulator's ledger; a second opinion for the tests.

    Commands come one at a time. A batch in `store` is some order of its commands.
    """

    def __init__(self, prices: Iterable[Price]) -> None:
        self.prices: Mapping[str, Price] = {price.id: price for price in prices}
        self.accounts: dict[str, Account] = {}
        self.entries: list[Entry] = []
        self.rows: dict[str, Row] = {}
        self.refusals: dict[str, LedgerRefused] = {}
        self.heard: dict[tuple[str, int, str], Heard] = {}  # by request, attempt, source

    def open_account(self, tenant_id: str, hard_cap_micro: int | None) -> None:
        """Opening an account that is open changes nothing."""
        self.accounts.setdefault(
            tenant_id, Account(tenant_id=tenant_id, hard_cap_micro=hard_cap_micro)
        )

    def set_hard_cap(self, tenant_id: str, hard_cap_micro: int | None) -> None:
        """The operator's word: it refuses what is new, and changes nothing else.

        A cap may be set under what is posted and reserved: then that only falls, until there
        is room again.
        """
        account = self.accounts[tenant_id]
        self.accounts[tenant_id] = msgspec.structs.replace(account, hard_cap_micro=hard_cap_micro)

    def reserve(self, asked: Reserve) -> Reserved | LedgerRefused:
        """Hold the amount. The same words again are answered with what the request now holds.

        Refused in this order: id_reused, what it was refused before, no_account, no_price,
        hard_cap. The last three are remembered for the id.
        """
        assert asked.amount_micro >= 0
        row = self.rows.get(asked.request_id)
        if row is not None:
            if row.asked != asked:
                return LedgerRefused(reason="id_reused")
            return Reserved(reserved_micro=row.reserved_micro)
        before = self.refusals.get(asked.request_id)
        if before is not None:
            return before
        refused = self._refuses(asked)
        if refused is not None:
            self.refusals[asked.request_id] = refused
            return refused
        self.rows[asked.request_id] = Row(asked=asked, reserved_micro=asked.amount_micro)
        self._post(asked, EntryKind.RESERVE, reserved=asked.amount_micro)
        return Reserved(reserved_micro=asked.amount_micro)

    def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """Refused in this order: not_open, hard_cap. Never lowers a reservation."""
        row = self._row(more.request_id, more.tenant_id)
        if row is None or row.cause is not None:
            return LedgerRefused(reason="not_open")
        extra = more.total_micro - row.reserved_micro
        if extra <= 0:
            return Reserved(reserved_micro=row.reserved_micro)
        refused = over_cap(self.accounts[more.tenant_id], extra)
        if refused is not None:
            return refused
        self._keep(row, reserved_micro=more.total_micro)
        self._post(row.asked, EntryKind.TOP_UP, reserved=extra)
        return Reserved(reserved_micro=more.total_micro)

    def settle(self, word: Settle) -> Settled | LedgerRefused:
        """The gateway's word: fixes the cause unless an earlier one of its words has.

        Refused: not_open. A release of an id that was never reserved closes the id instead: a
        reserve still on its way is then refused, so that nothing stays held for nobody.
        """
        row = self._row(word.request_id, word.tenant_id)
        if row is None:
            return self._never_reserved(word)
        for said in word.attempts:
            heard = Heard(usage=said.usage, replica_id=said.replica_id, at_ms=word.ended_ms)
            self._hear(word.request_id, said.attempt, "gateway", heard)
        if row.cause is not None and not row.provisional:
            return self._close(row, row.cause)
        was_open = row.cause is None
        row = self._keep(
            row,
            cause=word.cause,
            provisional=False,
            delivered_tokens=word.delivered_tokens,
            timings=word.timings,
            ended_ms=word.ended_ms,
        )
        return self._close(row, word.cause, freeing=EntryKind.RELEASE if was_open else None)

    def expire(self, word: Expire) -> Settled | LedgerRefused:
        """The sweeper's word, provisional: LOST if any witness heard of work, else NOT_STARTED.

        Refused: not_open. A request that has ended stays as it ended.
        """
        row = self.rows.get(word.request_id)
        if row is None:
            return LedgerRefused(reason="not_open")
        if row.cause is not None:
            return self._close(row, row.cause)
        cause = provisional_cause(metered(self._said(word.request_id)))
        row = self._keep(row, cause=cause, provisional=True, ended_ms=word.ended_ms)
        return self._close(row, cause, freeing=EntryKind.EXPIRE)

    def reconcile(self, witness: Witness) -> Settled | None:
        """Take a witness's totals and post what they change.

        None: the request is still open, or not known yet; its settlement will count them.
        """
        self._hear(witness.request_id, witness.attempt, witness.source, heard_from(witness))
        row = self.rows.get(witness.request_id)
        if row is None or row.cause is None:
            return None
        cause = row.cause
        if row.provisional:
            cause = provisional_cause(metered(self._said(witness.request_id)))
            row = self._keep(row, cause=cause)
        return self._close(row, cause)

    def _refuses(self, asked: Reserve) -> LedgerRefused | None:
        account = self.accounts.get(asked.tenant_id)
        if account is None:
            return LedgerRefused(reason="no_account")
        if asked.price_id not in self.prices:
            return LedgerRefused(reason="no_price")
        return over_cap(account, asked.amount_micro)

    def _never_reserved(self, word: Settle) -> Settled | LedgerRefused:
        if not is_release(word) or word.request_id in self.rows:
            return LedgerRefused(reason="not_open")
        self.refusals.setdefault(word.request_id, LedgerRefused(reason="not_open"))
        return Settled(billed_micro=0, metered=Usage(), cause=EndCause.NOT_STARTED)

    def _close(self, row: Row, cause: EndCause, *, freeing: EntryKind | None = None) -> Settled:
        """Post the difference between the bill as it stands and as it now should be.

        `freeing` says that the reservation is still held, and what freeing it for nothing is
        called.
        """
        asked = row.asked
        row = self._count(row)
        due = self._due(row, cause)
        bill = due
        if self.accounts[asked.tenant_id].hard_cap_micro is not None:
            bill = min(due, self._affordable(row, is_open=freeing is not None))
        if freeing is not None:
            kind = EntryKind.SETTLE if bill > 0 else freeing
            covered = min(bill, row.reserved_micro)
            self._post(asked, kind, reserved=-row.reserved_micro, posted=covered)
            if bill > covered:
                self._post(asked, EntryKind.OVERAGE, posted=bill - covered)
        elif bill != row.billed_micro:
            self._post(asked, EntryKind.CORRECTION, posted=bill - row.billed_micro)
        limit = bill if bill < due else row.bill_limit_micro
        self._keep(row, billed_micro=bill, bill_limit_micro=limit)
        return Settled(billed_micro=bill, metered=row.metered, cause=cause)

    def _count(self, row: Row) -> Row:
        said = self._said(row.asked.request_id)
        return self._keep(
            row,
            metered=metered(said),
            accepted_tokens=accepted_tokens(said),
            attempts=max((attempt for attempt, _, _ in said), default=0),
        )

    def _due(self, row: Row, cause: EndCause) -> int:
        """What the request costs, but for what a hard cap may take off it now."""
        usage = billable(
            cause,
            row.metered,
            accepted_tokens=row.accepted_tokens,
            max_tokens=row.asked.max_tokens * row.asked.choices,
        )
        due = billed_micro(cause, self.prices[row.asked.price_id], usage)
        return due if row.bill_limit_micro is None else min(due, row.bill_limit_micro)

    def _affordable(self, row: Row, *, is_open: bool) -> int:
        """The most that a hard cap lets it be billed.

        A request that has ended holds nothing any more: others may have taken its room.
        """
        if is_open:
            return row.reserved_micro
        room = room_micro(self.accounts[row.asked.tenant_id])
        return max(row.billed_micro, min(row.reserved_micro, row.billed_micro + room))

    def _row(self, request_id: str, tenant_id: str) -> Row | None:
        row = self.rows.get(request_id)
        return row if row is not None and row.asked.tenant_id == tenant_id else None

    def _keep(self, row: Row, **changes: object) -> Row:
        row = msgspec.structs.replace(row, **changes)
        self.rows[row.asked.request_id] = row
        return row

    def _hear(self, request_id: str, attempt: int, source: str, heard: Heard) -> None:
        key = (request_id, attempt, source)
        before = self.heard.get(key)
        self.heard[key] = heard if before is None else merge(before, heard)

    def _said(self, request_id: str) -> list[Said]:
        return [(*key[1:], heard) for key, heard in self.heard.items() if key[0] == request_id]

    def _post(self, asked: Reserve, kind: EntryKind, *, reserved: int = 0, posted: int = 0) -> None:
        account = self.accounts[asked.tenant_id]
        account = msgspec.structs.replace(
            account,
            reserved_micro=account.reserved_micro + reserved,
            posted_micro=account.posted_micro + posted,
            entries=account.entries + 1,
        )
        self.accounts[asked.tenant_id] = account
        self.entries.append(
            Entry(
                tenant_id=asked.tenant_id,
                seq=account.entries,
                request_id=asked.request_id,
                kind=kind,
                reserved_delta_micro=reserved,
                posted_delta_micro=posted,
                reserved_micro=account.reserved_micro,
                posted_micro=account.posted_micro,
            )
        )


def release(request_id: str, tenant_id: str, ended_ms: int) -> Settle:
    """Free a reservation that no worker ever heard of."""
    return Settle(
        request_id=request_id,
        tenant_id=tenant_id,
        cause=EndCause.NOT_STARTED,
        attempts=(),
        delivered_tokens=0,
        timings=RequestTimings(),
        ended_ms=ended_ms,
    )


def is_release(word: Settle) -> bool:
    """Whether this frees a reservation and says that nothing was done for it."""
    return word.cause is EndCause.NOT_STARTED and not word.attempts


def room_micro(account: Account) -> int:
    """How much more a capped account may hold or be billed; 0 when its cap was lowered under it."""
    assert account.hard_cap_micro is not None
    return max(0, account.hard_cap_micro - account.posted_micro - account.reserved_micro)


def over_cap(account: Account, extra_micro: int) -> LedgerRefused | None:
    """The refusal when holding `extra_micro` more would pass the hard cap."""
    cap = account.hard_cap_micro
    if cap is None or account.posted_micro + account.reserved_micro + extra_micro <= cap:
        return None
    return LedgerRefused(
        reason="hard_cap",
        reserved_micro=account.reserved_micro,
        posted_micro=account.posted_micro,
        hard_cap_micro=cap,
    )


def provisional_cause(usage: Usage) -> EndCause:
    """The sweeper's verdict. It rises from NOT_STARTED to LOST when a witness comes late."""
    return EndCause.NOT_STARTED if usage == Usage() else EndCause.LOST


def heard_from(witness: Witness) -> Heard:
    """A witness's word.

    Only a journal that saw the end itself is exact: the `lost` that a worker's next life
    writes is a lower bound, up to one flush behind.
    """
    is_journal = witness.source == "journal"
    return Heard(
        usage=witness.usage,
        exact=is_journal and witness.final and witness.cause != LOST_IN_JOURNAL,
        final=witness.final,
        cause=witness.cause,
        replica_id=witness.replica_id,
        at_ms=witness.at_ms,
    )


def merge(one: Heard, other: Heard) -> Heard:
    """What a source has said in all: an exact word replaces the rest, else the highest totals.

    Commutative, associative and idempotent, so that order and repetition do not matter.
    """
    if one.exact != other.exact:
        return one if one.exact else other
    return Heard(
        usage=_highest((one.usage, other.usage)),
        exact=one.exact,
        final=one.final or other.final,
        cause=max(one.cause, other.cause),
        replica_id=max(one.replica_id, other.replica_id),
        at_ms=max(one.at_ms, other.at_ms),
    )


def metered(said: Iterable[Said]) -> Usage:
    """A request's totals from all that was said of it.

    Within an attempt: the exact word if there is one, else the highest of each total, for
    honest witnesses only ever say too little. Over attempts: output tokens add up, since each
    attempt produces its own; the prompt counts once, from the attempt that read the most of
    it and, among equals, found the most in cache, so that a retry never costs the tenant more.
    """
    totals = _attempt_totals(said).values()
    prompt, cached = max(((t.prompt_tokens, t.cached_tokens) for t in totals), default=(0, 0))
    output = sum(total.output_tokens for total in totals)
    return Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)


def accepted_tokens(said: Iterable[Said]) -> int:
    """The output that the gateway says it accepted, of each attempt within what was metered.

    An attempt that it does not speak of brought it nothing.
    """
    said = list(said)
    own = {
        attempt: heard.usage.output_tokens for attempt, source, heard in said if source == "gateway"
    }
    return sum(
        min(own.get(attempt, 0), total.output_tokens)
        for attempt, total in _attempt_totals(said).items()
    )


def _attempt_totals(said: Iterable[Said]) -> dict[int, Usage]:
    attempts: dict[int, list[Heard]] = {}
    for attempt, _, heard in said:
        attempts.setdefault(attempt, []).append(heard)
    return {attempt: _attempt_total(words) for attempt, words in attempts.items()}


def _attempt_total(words: list[Heard]) -> Usage:
    exact = [word.usage for word in words if word.exact]
    return _highest(exact or [word.usage for word in words])


def _highest(usages: Iterable[Usage]) -> Usage:
    usages = list(usages)
    return Usage(
        prompt_tokens=max(usage.prompt_tokens for usage in usages),
        cached_tokens=max(usage.cached_tokens for usage in usages),
        output_tokens=max(usage.output_tokens for usage in usages),
    )
