"""Accepted requests: what each asked, holds and was billed, and what witnesses said of it.

What a request costs is a function of its end cause, the witnesses' words and what was asked for
(`core.money.billable`), whatever order they came in.
"""

from datetime import date

import msgspec

from core.metering import RequestTimings, Reserve
from core.money import EndCause, Price, billable, billed_micro
from core.protocol import Usage
from core.witnesses import Heard, Said, accepted_tokens, merge, metered


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


class Requests:
    """Every one that was accepted; and all that was heard, of whatever request."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.heard: dict[tuple[str, int, str], Heard] = {}  # by request, attempt, source

    def find(self, request_id: str, tenant_id: str) -> Row | None:
        """The tenant's own: another's is not there."""
        row = self.rows.get(request_id)
        return row if row is not None and row.asked.tenant_id == tenant_id else None

    def keep(self, row: Row, **changes: object) -> Row:
        """Replace the row by itself with these changes; returns it."""
        row = msgspec.structs.replace(row, **changes)
        self.rows[row.asked.request_id] = row
        return row

    def hear(self, request_id: str, attempt: int, source: str, heard: Heard) -> None:
        """Add a source's word to what it has said."""
        key = (request_id, attempt, source)
        before = self.heard.get(key)
        self.heard[key] = heard if before is None else merge(before, heard)

    def said(self, request_id: str) -> list[Said]:
        """All that was heard of it."""
        return [(*key[1:], heard) for key, heard in self.heard.items() if key[0] == request_id]

    def recount(self, row: Row) -> Row:
        """Keep the row with the totals that follow from what was heard."""
        said = self.said(row.asked.request_id)
        return self.keep(
            row,
            metered=metered(said),
            accepted_tokens=accepted_tokens(said),
            attempts=max((attempt for attempt, _, _ in said), default=0),
        )


def due_micro(row: Row, cause: EndCause, price: Price) -> int:
    """What the request costs, but for what a hard limit may take off it now."""
    usage = billable(
        cause,
        row.metered,
        accepted_tokens=row.accepted_tokens,
        max_tokens=row.asked.max_tokens * row.asked.choices,
    )
    due = billed_micro(cause, price, usage)
    return due if row.bill_limit_micro is None else min(due, row.bill_limit_micro)


def provisional_cause(usage: Usage) -> EndCause:
    """The sweeper's verdict. It rises from NOT_STARTED to LOST when a witness comes late."""
    return EndCause.NOT_STARTED if usage == Usage() else EndCause.LOST


def told(row: Row) -> tuple[object, ...]:
    """What a bill, a rollup or a person reads of an ended request: a change of it has an entry."""
    return row.cause, row.metered, row.accepted_tokens, row.delivered_tokens, row.billed_micro
