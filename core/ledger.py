"""The ledger's rules, as a state machine in memory: what the SQL in `store` must agree with.

    reserve ─► open ─┬─ settle (bill > 0) ─► settled      top_up raises an open reservation
                     ├─ settle (bill = 0) ─► released     a bill over it is an overage entry
                     └─ expire ────────────► expired      by the sweeper, for a dead gateway

What is billed is a function of the end cause, the witnesses' words and what was asked for
(`core.money.billable`), whatever order they came in. Under a hard limit it is cut: to what the
request holds when it ends, and afterwards to what it held and to the room that is left, for
good. What was cut off is metered, and ours to bear.

Two-phase as TigerBeetle's pending transfers, with its idempotency by the caller's id: the
same words again have no further effect and get the same answer; an id that was refused stays
refused. Expected refusals are values, tried in the order each function lists them.

Invariants: an account's balances are the fold of its entries, which are numbered without a
gap and never change. No word takes posted + reserved over a hard limit. Every change of an
ended request has an entry, if only of 0. No request costs less than nothing: where a bill falls
after a refund, what was given back too much is taken back.
"""

from collections.abc import Iterable, Mapping
from datetime import date
from enum import StrEnum
from typing import TypeAlias

import msgspec

from core.caps import FOR_GOOD, Cap, Limit, Period, Window, counts, order, posted, window_start
from core.metering import (
    Adjust,
    Adjusted,
    AdjustmentKind,
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
from core.witnesses import Heard, Said, accepted_tokens, heard_from, merge, metered

WindowKey: TypeAlias = tuple[str, str, Period, date]  # tenant, key, period, first day

TAKEN_BACK = "its bill has fallen below what was given back"  # why a refund posts above 0


class EntryKind(StrEnum):
    """Why an account changed."""

    RESERVE = "reserve"
    TOP_UP = "top_up"
    SETTLE = "settle"  # frees the reservation and posts a bill, up to what was reserved
    RELEASE = "release"  # frees it for nothing
    EXPIRE = "expire"  # frees it for nothing, on the sweeper's word
    OVERAGE = "overage"  # the part of a bill over its reservation, where there is no limit
    CORRECTION = "correction"  # a witness or the gateway changed a request already ended
    CREDIT = "credit"  # from here on by an operator, with a reason
    REFUND = "refund"
    ADJUSTMENT = "adjustment"
    REPRICE = "reprice"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's balances in micro-units. `entries` numbers the last entry; 0 is none yet."""

    tenant_id: str
    hard_cap_micro: int | None  # on all that is ever posted and reserved
    prepaid: bool = False  # whether the credit is a limit too
    credit_micro: int = 0
    posted_micro: int = 0
    reserved_micro: int = 0
    entries: int = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one account, and its balances afterwards."""

    tenant_id: str
    seq: int  # from 1, without a gap
    request_id: str  # "" where it is about no request
    kind: EntryKind
    reserved_delta_micro: int
    posted_delta_micro: int
    credit_delta_micro: int = 0
    reserved_micro: int
    posted_micro: int
    credit_micro: int = 0
    adjustment_id: str = ""  # this and the next two: of an operator's
    reason: str = ""
    author: str = ""


class Expire(msgspec.Struct, frozen=True, kw_only=True):
    """The sweeper ends a request whose gateway is silent."""

    request_id: str
    ended_ms: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request: what it asked, what it holds, and how it ended."""

    asked: Reserve
    day: date  # UTC, when it was reserved: which windows it counts in
    reserved_micro: int  # in all, top-ups included; held while `cause` is None
    cause: EndCause | None = None
    provisional: bool = False  # the sweeper's word, which yields to the gateway's
    metered: Usage = Usage()
    accepted_tokens: int = 0  # of the metered output, as far as the gateway has said
    attempts: int = 0  # the highest number heard of
    billed_micro: int = 0
    adjusted_micro: int = 0  # by refunds and repricings: what it costs is the sum of the two
    bill_limit_micro: int | None = None  # what a hard limit has cut the bill to, for good
    delivered_tokens: int = 0
    timings: RequestTimings = RequestTimings()
    ended_ms: int = 0

    @property
    def net_micro(self) -> int:
        """What the tenant pays for it in the end."""
        return self.billed_micro + self.adjusted_micro


class Book:
    """Every account and request. The simulator's ledger; a second opinion for the tests.

    Commands come one at a time. A batch in `store` is some order of its commands. `today` is
    the day of the database's clock.
    """

    def __init__(self, prices: Iterable[Price], *, today: date = FOR_GOOD) -> None:
        self.prices: Mapping[str, Price] = {price.id: price for price in prices}
        self.today = today
        self.accounts: dict[str, Account] = {}
        self.caps: dict[tuple[str, str, Period], Cap] = {}
        self.windows: dict[WindowKey, Window] = {}
        self.entries: list[Entry] = []
        self.rows: dict[str, Row] = {}
        self.refusals: dict[str, LedgerRefused] = {}
        self.adjusted: dict[str, tuple[Adjust, Adjusted]] = {}
        self.heard: dict[tuple[str, int, str], Heard] = {}  # by request, attempt, source

    def open_account(self, tenant_id: str, hard_cap_micro: int | None) -> None:
        """Opening an account that is open changes nothing."""
        self.accounts.setdefault(
            tenant_id, Account(tenant_id=tenant_id, hard_cap_micro=hard_cap_micro)
        )

    def set_terms(
        self, tenant_id: str, *, hard_cap_micro: int | None, prepaid: bool = False
    ) -> None:
        """The operator's word: it refuses what is new, and changes nothing else.

        A limit may be set under what is posted and reserved: then that only falls, until there
        is room again.
        """
        self.accounts[tenant_id] = msgspec.structs.replace(
            self.accounts[tenant_id], hard_cap_micro=hard_cap_micro, prepaid=prepaid
        )

    def set_cap(
        self,
        tenant_id: str,
        key_id: str,
        period: Period,
        *,
        soft_micro: int | None,
        hard_micro: int | None,
    ) -> None:
        """A new one counts from its current window on, with all that is in it already."""
        place = (tenant_id, key_id, period)
        before = self.caps.get(place)
        cap = Cap(
            tenant_id=tenant_id,
            key_id=key_id,
            period=period,
            soft_micro=soft_micro,
            hard_micro=hard_micro,
            since=self.today if before is None else before.since,
        )
        self.caps[place] = cap
        window = (*place, window_start(period, self.today))
        if before is None:
            self.windows[window] = self._counted(cap)
        elif window in self.windows:
            self.windows[window] = posted(self.windows[window], cap, reserved=0, posted=0)

    def remove_cap(self, tenant_id: str, key_id: str, period: Period) -> None:
        """Its counters go with it."""
        place = (tenant_id, key_id, period)
        self.caps.pop(place, None)
        self.windows = {at: window for at, window in self.windows.items() if at[:3] != place}

    def reserve(self, asked: Reserve) -> Reserved | LedgerRefused:
        """Hold the amount, or what there is room for. The same words again: what it now holds.

        Refused in this order: id_reused, what it was refused before, no_account, no_price,
        hard_cap. The last three are remembered for the id.
        """
        assert 0 <= floor_micro(asked.floor_micro, asked.amount_micro) <= asked.amount_micro
        row = self.rows.get(asked.request_id)
        if row is not None:
            if row.asked != asked:
                return LedgerRefused(reason="id_reused")
            return Reserved(reserved_micro=row.reserved_micro)
        before = self.refusals.get(asked.request_id)
        if before is not None:
            return before
        held = self._allowed(asked)
        if isinstance(held, LedgerRefused):
            self.refusals[asked.request_id] = held
            return held
        row = Row(asked=asked, day=self.today, reserved_micro=held)
        self.rows[asked.request_id] = row
        self._post(row, EntryKind.RESERVE, reserved=held)
        return Reserved(reserved_micro=held)

    def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """Refused in this order: not_open, hard_cap. Never lowers a reservation."""
        row = self._row(more.request_id, more.tenant_id)
        if row is None or row.cause is not None:
            return LedgerRefused(reason="not_open")
        held = row.reserved_micro
        if more.total_micro <= held:
            return Reserved(reserved_micro=held)
        floor = max(0, floor_micro(more.floor_micro, more.total_micro) - held)
        extra = granted_micro(self._limits(row), more.total_micro - held, floor)
        if isinstance(extra, LedgerRefused):
            return extra
        if extra > 0:
            row = self._keep(row, reserved_micro=held + extra)
            self._post(row, EntryKind.TOP_UP, reserved=extra)
        return Reserved(reserved_micro=held + extra)

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
        changed = self._keep(
            row,
            cause=word.cause,
            provisional=False,
            delivered_tokens=word.delivered_tokens,
            timings=word.timings,
            ended_ms=word.ended_ms,
        )
        freeing = EntryKind.RELEASE if row.cause is None else None
        return self._close(row, word.cause, ended=changed, freeing=freeing)

    def expire(self, word: Expire) -> Settled | LedgerRefused:
        """The sweeper's word, provisional: LOST if any witness heard of work, else NOT_STARTED.

        Refused: not_open. A request that has ended stays as it ended.
        """
        row = self.rows.get(word.request_id)
        if row is None or row.cause is not None:
            return LedgerRefused(reason="not_open")
        cause = provisional_cause(metered(self._said(word.request_id)))
        changed = self._keep(row, cause=cause, provisional=True, ended_ms=word.ended_ms)
        return self._close(row, cause, ended=changed, freeing=EntryKind.EXPIRE)

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
        return self._close(row, cause, ended=self._keep(row, cause=cause))

    def adjust(self, word: Adjust) -> Adjusted | LedgerRefused:
        """An operator's word. Refused in this order: id_reused, no_account, then by its kind.

        A credit: too_much, where it would leave less than a prepaid account has used. A refund:
        no_request (unknown or still open), too_much. An adjustment: hard_cap. A reprice:
        no_request, no_price, hard_cap.
        """
        before = self.adjusted.get(word.id)
        if before is not None:
            return before[1] if before[0] == word else LedgerRefused(reason="id_reused")
        account = self.accounts.get(word.tenant_id)
        if account is None:
            return LedgerRefused(reason="no_account")
        delta = self._adjustable(account, word)
        if isinstance(delta, LedgerRefused):
            return delta
        answer = self._enter(word, delta)
        self.adjusted[word.id] = (word, answer)
        return answer

    def _adjustable(self, account: Account, word: Adjust) -> int | LedgerRefused:
        """What it changes, which is done already to the request it is about."""
        if word.kind is AdjustmentKind.CREDIT:
            return self._credit(account, word.amount_micro)
        if word.kind is AdjustmentKind.ADJUSTMENT:
            return self._adjustment(account, word.amount_micro)
        return self._correct_bill(word)

    def _enter(self, word: Adjust, delta: int) -> Adjusted:
        is_credit = word.kind is AdjustmentKind.CREDIT
        account = self._write(
            word.tenant_id,
            EntryKind(word.kind.value),
            request_id=word.request_id,
            credit=delta if is_credit else 0,
            posted_micro=0 if is_credit else delta,
            adjustment_id=word.id,
            reason=word.reason,
            author=word.author,
        )
        return Adjusted(
            entry=account.entries,
            delta_micro=delta,
            posted_micro=account.posted_micro,
            credit_micro=account.credit_micro,
        )

    def _credit(self, account: Account, amount: int) -> int | LedgerRefused:
        used = account.posted_micro + account.reserved_micro
        if account.prepaid and amount < 0 and account.credit_micro + amount < used:
            return LedgerRefused(
                reason="too_much",
                limit="credit",
                reserved_micro=account.reserved_micro,
                posted_micro=account.posted_micro,
                hard_cap_micro=account.credit_micro,
                fits_micro=max(0, account.credit_micro - used),
            )
        return amount

    def _adjustment(self, account: Account, amount: int) -> int | LedgerRefused:
        return granted_micro(account_limits(account), amount, amount) if amount > 0 else amount

    def _correct_bill(self, word: Adjust) -> int | LedgerRefused:
        row = self._row(word.request_id, word.tenant_id)
        if row is None or row.cause is None:
            return LedgerRefused(reason="no_request")
        delta = (
            self._refund(row, word)
            if word.kind is AdjustmentKind.REFUND
            else self._reprice(row, row.cause, word.price_id)
        )
        if isinstance(delta, LedgerRefused):
            return delta
        self._keep(row, adjusted_micro=row.adjusted_micro + delta)
        self._count_in_windows(row, posted_micro=delta)
        return delta

    def _refund(self, row: Row, word: Adjust) -> int | LedgerRefused:
        if word.amount_micro > row.net_micro:
            return LedgerRefused(reason="too_much", fits_micro=max(0, row.net_micro))
        return -word.amount_micro

    def _reprice(self, row: Row, cause: EndCause, price_id: str) -> int | LedgerRefused:
        price = self.prices.get(price_id)
        if price is None:
            return LedgerRefused(reason="no_price")
        delta = self._due(row, cause, price) - row.net_micro
        return granted_micro(self._limits(row), delta, delta) if delta > 0 else delta

    def _allowed(self, asked: Reserve) -> int | LedgerRefused:
        """How much may be held for it."""
        account = self.accounts.get(asked.tenant_id)
        if account is None:
            return LedgerRefused(reason="no_account")
        if asked.price_id not in self.prices:
            return LedgerRefused(reason="no_price")
        floor = floor_micro(asked.floor_micro, asked.amount_micro)
        limits = self._limits(Row(asked=asked, day=self.today, reserved_micro=0))
        return granted_micro(limits, asked.amount_micro, floor)

    def _never_reserved(self, word: Settle) -> Settled | LedgerRefused:
        if not is_release(word) or word.request_id in self.rows:
            return LedgerRefused(reason="not_open")
        self.refusals.setdefault(word.request_id, LedgerRefused(reason="not_open"))
        return Settled(billed_micro=0, metered=Usage(), cause=EndCause.NOT_STARTED)

    def _close(
        self,
        before: Row,
        cause: EndCause,
        *,
        ended: Row | None = None,
        freeing: EntryKind | None = None,
    ) -> Settled:
        """Post the difference between the bill as it stands and as it now should be.

        `ended` is the row with the word's own changes. `freeing` says that the reservation is
        still held, and what freeing it for nothing is called.
        """
        row = self._count(ended or before)
        due = self._due(row, cause, self.prices[row.asked.price_id])
        bill = min(due, self._affordable(row, due, is_open=freeing is not None))
        limit = bill if bill < due else row.bill_limit_micro
        row = self._keep(row, billed_micro=bill, bill_limit_micro=limit)
        if freeing is not None:
            kind = EntryKind.SETTLE if bill > 0 else freeing
            covered = min(bill, row.reserved_micro)
            self._post(row, kind, reserved=-row.reserved_micro, posted_micro=covered)
            if bill > covered:
                self._post(row, EntryKind.OVERAGE, posted_micro=bill - covered)
        elif told(row) != told(before):
            self._post(row, EntryKind.CORRECTION, posted_micro=bill - before.billed_micro)
            if row.net_micro < 0:
                self._take_back(row)
        return Settled(billed_micro=bill, metered=row.metered, cause=cause)

    def _take_back(self, row: Row) -> None:
        """No request costs less than nothing, though its bill falls after it was given back."""
        excess = -row.net_micro
        row = self._keep(row, adjusted_micro=row.adjusted_micro + excess)
        self._post(row, EntryKind.REFUND, posted_micro=excess, reason=TAKEN_BACK)

    def _count(self, row: Row) -> Row:
        said = self._said(row.asked.request_id)
        return self._keep(
            row,
            metered=metered(said),
            accepted_tokens=accepted_tokens(said),
            attempts=max((attempt for attempt, _, _ in said), default=0),
        )

    def _due(self, row: Row, cause: EndCause, price: Price) -> int:
        """What the request costs, but for what a hard limit may take off it now."""
        usage = billable(
            cause,
            row.metered,
            accepted_tokens=row.accepted_tokens,
            max_tokens=row.asked.max_tokens * row.asked.choices,
        )
        due = billed_micro(cause, price, usage)
        return due if row.bill_limit_micro is None else min(due, row.bill_limit_micro)

    def _affordable(self, row: Row, due: int, *, is_open: bool) -> int:
        """The most that hard limits let it be billed.

        A request that has ended holds nothing any more: others may have taken its room.
        """
        limits = self._limits(row)
        if not limits:
            return due
        if is_open:
            return row.reserved_micro
        room = min(limit.room_micro for limit in limits)
        return max(row.billed_micro, min(row.reserved_micro, row.billed_micro + room))

    def _limits(self, row: Row) -> list[Limit]:
        """What bounds a request, in the order in which it refuses."""
        asked = row.asked
        limits = account_limits(self.accounts[asked.tenant_id])
        for cap in self._caps_on(row):
            if cap.hard_micro is not None:
                window = self.windows.get(_place(cap, row.day), Window())
                limits.append(
                    Limit(
                        name=cap.limit,
                        cap_micro=cap.hard_micro,
                        posted_micro=window.posted_micro,
                        reserved_micro=window.reserved_micro,
                    )
                )
        return limits

    def _caps_on(self, row: Row) -> list[Cap]:
        return sorted(
            (
                cap
                for cap in self.caps.values()
                if cap.tenant_id == row.asked.tenant_id
                and counts(cap, key_id=row.asked.key_id, day=row.day)
            ),
            key=order,
        )

    def _counted(self, cap: Cap) -> Window:
        """What a new cap's current window holds already."""
        start = window_start(cap.period, self.today)
        mine = [
            row
            for row in self.rows.values()
            if row.asked.tenant_id == cap.tenant_id
            and cap.key_id in ("", row.asked.key_id)
            and window_start(cap.period, row.day) == start
        ]
        held = sum(row.reserved_micro for row in mine if row.cause is None)
        return posted(Window(), cap, reserved=held, posted=sum(row.net_micro for row in mine))

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

    def _post(
        self,
        row: Row,
        kind: EntryKind,
        *,
        reserved: int = 0,
        posted_micro: int = 0,
        reason: str = "",
    ) -> None:
        asked = row.asked
        self._write(
            asked.tenant_id,
            kind,
            request_id=asked.request_id,
            reserved=reserved,
            posted_micro=posted_micro,
            reason=reason,
        )
        self._count_in_windows(row, reserved=reserved, posted_micro=posted_micro)

    def _count_in_windows(self, row: Row, *, reserved: int = 0, posted_micro: int = 0) -> None:
        for cap in self._caps_on(row):
            place = _place(cap, row.day)
            self.windows[place] = posted(
                self.windows.get(place, Window()), cap, reserved=reserved, posted=posted_micro
            )

    def _write(
        self,
        tenant_id: str,
        kind: EntryKind,
        *,
        request_id: str,
        reserved: int = 0,
        posted_micro: int = 0,
        credit: int = 0,
        adjustment_id: str = "",
        reason: str = "",
        author: str = "",
    ) -> Account:
        account = self.accounts[tenant_id]
        account = msgspec.structs.replace(
            account,
            reserved_micro=account.reserved_micro + reserved,
            posted_micro=account.posted_micro + posted_micro,
            credit_micro=account.credit_micro + credit,
            entries=account.entries + 1,
        )
        self.accounts[tenant_id] = account
        self.entries.append(
            Entry(
                tenant_id=tenant_id,
                seq=account.entries,
                request_id=request_id,
                kind=kind,
                reserved_delta_micro=reserved,
                posted_delta_micro=posted_micro,
                credit_delta_micro=credit,
                reserved_micro=account.reserved_micro,
                posted_micro=account.posted_micro,
                credit_micro=account.credit_micro,
                adjustment_id=adjustment_id,
                reason=reason,
                author=author,
            )
        )
        return account


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


def floor_micro(floor: int | None, amount: int) -> int:
    """The least that will do, of an amount asked for."""
    return amount if floor is None else floor


def account_limits(account: Account) -> list[Limit]:
    """The account's own, caps aside: its credit if it is prepaid, and its lifetime cap."""
    credit = account.credit_micro if account.prepaid else None
    return [
        Limit(
            name=name,
            cap_micro=cap,
            posted_micro=account.posted_micro,
            reserved_micro=account.reserved_micro,
        )
        for name, cap in (("credit", credit), ("account.total", account.hard_cap_micro))
        if cap is not None
    ]


def granted_micro(limits: list[Limit], wanted: int, floor: int) -> int | LedgerRefused:
    """How much of `wanted` fits under every limit, if that is `floor` at least.

    Else the first limit in whose way the floor is, and what would have fitted under all.
    """
    room = min((limit.room_micro for limit in limits), default=wanted)
    if room >= floor:
        return min(wanted, room)
    first = next(limit for limit in limits if limit.room_micro < floor)
    return LedgerRefused(
        reason="hard_cap",
        limit=first.name,
        reserved_micro=first.reserved_micro,
        posted_micro=first.posted_micro,
        hard_cap_micro=first.cap_micro,
        fits_micro=max(0, room),
    )


def provisional_cause(usage: Usage) -> EndCause:
    """The sweeper's verdict. It rises from NOT_STARTED to LOST when a witness comes late."""
    return EndCause.NOT_STARTED if usage == Usage() else EndCause.LOST


def told(row: Row) -> tuple[object, ...]:
    """What a bill, a rollup or a person reads of an ended request: a change of it has an entry."""
    return row.cause, row.metered, row.accepted_tokens, row.delivered_tokens, row.billed_micro


def _place(cap: Cap, day: date) -> WindowKey:
    return cap.tenant_id, cap.key_id, cap.period, window_start(cap.period, day)
