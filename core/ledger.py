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

import msgspec

from core.accounts import Accounts, EntryKind
from core.caps import FOR_GOOD, Cap, Period
from core.corrections import Corrections
from core.grants import Limit, floor_micro, granted_micro
from core.keys import Keys
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
from core.money import EndCause, Price
from core.protocol import Usage
from core.requests import Requests, Row, due_micro, provisional_cause, told
from core.spending import Spending
from core.witnesses import Heard, heard_from, metered

TAKEN_BACK = "its bill has fallen below what was given back"  # why a refund posts above 0


class Expire(msgspec.Struct, frozen=True, kw_only=True):
    """The sweeper ends a request whose gateway is silent."""

    request_id: str
    ended_ms: int


class Book:
    """Every account and request. The simulator's ledger; a second opinion for the tests.

    Commands come one at a time. A batch in `store` is some order of its commands. `today` is
    the day of the database's clock.
    """

    def __init__(self, prices: Iterable[Price], *, today: date = FOR_GOOD) -> None:
        self.prices: Mapping[str, Price] = {price.id: price for price in prices}
        self.today = today
        self.now_ms = 0  # of the database's clock too: for idempotency keys alone
        self.refusals: dict[str, LedgerRefused] = {}
        self._accounts, self._spending, self._requests = Accounts(), Spending(), Requests()
        self._keys = Keys()
        self._corrections = Corrections(self.prices, self._accounts, self._spending, self._requests)
        # The parts' own, for those who look into the book.
        self.accounts, self.entries = self._accounts.by_tenant, self._accounts.entries
        self.caps, self.windows = self._spending.caps, self._spending.windows
        self.rows, self.heard = self._requests.rows, self._requests.heard

    def open_account(self, tenant_id: str, hard_cap_micro: int | None) -> None:
        """Opening an account that is open changes nothing."""
        self._accounts.open(tenant_id, hard_cap_micro)

    def set_terms(
        self, tenant_id: str, *, hard_cap_micro: int | None, prepaid: bool = False
    ) -> None:
        """The operator's word: it refuses what is new, and changes nothing else.

        A limit may be set under what is posted and reserved: then that only falls, until there
        is room again.
        """
        self._accounts.set_terms(tenant_id, hard_cap_micro=hard_cap_micro, prepaid=prepaid)

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
        cap = Cap(
            tenant_id=tenant_id,
            key_id=key_id,
            period=period,
            soft_micro=soft_micro,
            hard_micro=hard_micro,
            since=self.today,
        )
        self._spending.set_cap(cap, self.rows.values(), today=self.today)

    def remove_cap(self, tenant_id: str, key_id: str, period: Period) -> None:
        """Its counters go with it."""
        self._spending.remove_cap(tenant_id, key_id, period)

    def reserve(self, asked: Reserve) -> Reserved | LedgerRefused:
        """Hold the amount, or what there is room for. The same words again: what it now holds.

        Refused in this order: id_reused, what it was refused before, what its idempotency key
        stands in the way of, no_account, no_price, hard_cap. The last three are remembered for
        the id.
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
        taken = self._keys.refused(asked, self.rows, now_ms=self.now_ms)
        if taken is not None:
            return LedgerRefused(reason=taken)
        held = self._allowed(asked)
        if isinstance(held, LedgerRefused):
            self.refusals[asked.request_id] = held
            return held
        self._keys.claim(asked, self.rows, now_ms=self.now_ms)
        row = Row(asked=asked, day=self.today, reserved_micro=held)
        self.rows[asked.request_id] = row
        self._post(row, EntryKind.RESERVE, reserved=held)
        return Reserved(reserved_micro=held)

    def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """Refused in this order: not_open, hard_cap. Never lowers a reservation."""
        row = self._requests.find(more.request_id, more.tenant_id)
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
            row = self._requests.keep(row, reserved_micro=held + extra)
            self._post(row, EntryKind.TOP_UP, reserved=extra)
        return Reserved(reserved_micro=held + extra)

    def settle(self, word: Settle) -> Settled | LedgerRefused:
        """The gateway's word: fixes the cause unless an earlier one of its words has.

        Refused: not_open. A release of an id that was never reserved closes the id instead: a
        reserve still on its way is then refused, so that nothing stays held for nobody.
        """
        row = self._requests.find(word.request_id, word.tenant_id)
        if row is None:
            return self._never_reserved(word)
        for said in word.attempts:
            heard = Heard(usage=said.usage, replica_id=said.replica_id, at_ms=word.ended_ms)
            self._requests.hear(word.request_id, said.attempt, "gateway", heard)
        settled = self._end(row, word)
        for before in self._keys.answer(word):
            self._reverse(before, word)
        return settled

    def expire(self, word: Expire) -> Settled | LedgerRefused:
        """The sweeper's word, provisional: LOST if any witness heard of work, else NOT_STARTED.

        Refused: not_open. A request that has ended stays as it ended.
        """
        row = self.rows.get(word.request_id)
        if row is None or row.cause is not None:
            return LedgerRefused(reason="not_open")
        cause = provisional_cause(metered(self._requests.said(word.request_id)))
        changed = self._requests.keep(row, cause=cause, provisional=True, ended_ms=word.ended_ms)
        return self._close(row, cause, ended=changed, freeing=EntryKind.EXPIRE)

    def reconcile(self, witness: Witness) -> Settled | None:
        """Take a witness's totals and post what they change.

        None: the request is still open, or not known yet; its settlement will count them.
        """
        self._requests.hear(
            witness.request_id, witness.attempt, witness.source, heard_from(witness)
        )
        row = self.rows.get(witness.request_id)
        if row is None or row.cause is None:
            return None
        cause = row.cause
        if row.provisional:
            cause = provisional_cause(metered(self._requests.said(witness.request_id)))
        return self._close(row, cause, ended=self._requests.keep(row, cause=cause))

    def adjust(self, word: Adjust) -> Adjusted | LedgerRefused:
        """See `Corrections.adjust`."""
        return self._corrections.adjust(word)

    def _end(self, row: Row, word: Settle) -> Settled:
        if row.cause is not None and not row.provisional:
            return self._close(row, row.cause)
        changed = self._requests.keep(
            row,
            cause=word.cause,
            provisional=False,
            delivered_tokens=word.delivered_tokens,
            timings=word.timings,
            ended_ms=word.ended_ms,
        )
        freeing = EntryKind.RELEASE if row.cause is None else None
        return self._close(row, word.cause, ended=changed, freeing=freeing)

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
        row = self._requests.recount(ended or before)
        due = due_micro(row, cause, self.prices[row.asked.price_id])
        bill = min(due, self._affordable(row, due, is_open=freeing is not None))
        limit = bill if bill < due else row.bill_limit_micro
        row = self._requests.keep(row, billed_micro=bill, bill_limit_micro=limit)
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

    def _reverse(self, request_id: str, word: Settle) -> None:
        """An attempt costs nothing any more, now that its key has another's answer.

        Its bill can only fall from here on, whatever is heard of it yet. One that has not ended
        is the holder's own, which lets it go unbilled.
        """
        row = self.rows[request_id]
        if row.cause is None:
            return
        row = self._requests.keep(row, bill_limit_micro=row.billed_micro)
        if row.net_micro > 0:
            self._corrections.adjust(reversal(row, word.request_id))

    def _take_back(self, row: Row) -> None:
        """No request costs less than nothing, though its bill falls after it was given back."""
        excess = -row.net_micro
        row = self._requests.keep(row, adjusted_micro=row.adjusted_micro + excess)
        self._post(row, EntryKind.REFUND, posted_micro=excess, reason=TAKEN_BACK)

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
        return self._spending.limits(self.accounts[row.asked.tenant_id], row)

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
        self._accounts.write(
            asked.tenant_id,
            kind,
            request_id=asked.request_id,
            reserved=reserved,
            posted_micro=posted_micro,
            reason=reason,
        )
        self._spending.count(row, reserved=reserved, posted_micro=posted_micro)


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


def reversal(row: Row, answered_by: str) -> Adjust:
    """What gives back an attempt's bill to who has paid for its key's answer."""
    return Adjust(
        id=f"idempotency {row.asked.request_id}",
        tenant_id=row.asked.tenant_id,
        kind=AdjustmentKind.REFUND,
        amount_micro=row.net_micro,
        request_id=row.asked.request_id,
        reason=f"its idempotency key was answered by {answered_by}",
        author="headworks",
    )


def is_release(word: Settle) -> bool:
    """Whether this frees a reservation and says that nothing was done for it."""
    return word.cause is EndCause.NOT_STARTED and not word.attempts
