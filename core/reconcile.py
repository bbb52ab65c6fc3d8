"""What the reconciler makes of records that tell of one thing and do not agree.

    found, not known ─► noticed ─ its patience later ─► open ─┬─ recounted ──► corrected
                                                              ├─ found no more ► gone
                                                              └─ by a person ──► closed

A difference is known by its kind and its subject, and is told once however often it is found:
again only when it has grown. One that a person closed stays closed until it grows. All
reconcilers must agree on this, for any of them may look next.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

WINDOW_MS_MIN = 100
WINDOW_MS_MAX = 3_600_000


class Kind(StrEnum):
    """What does not agree. The first can be recounted; the rest are for a person."""

    UNCOUNTED = "uncounted"  # a usage row and its witnesses: a word was heard and not counted
    MISBILLED = "misbilled"  # a bill and the policy of its end cause
    MISPOSTED = "misposted"  # a bill and the entries that posted it
    OVERDELIVERED = "overdelivered"  # more tokens delivered than metered
    CONTRADICTED = "contradicted"  # a journal's exact word and a higher one
    STILL_HELD = "still_held"  # a request that has ended, and its reservation
    UNKNOWN_REQUEST = "unknown_request"  # a witness's word on what was never reserved
    UNCONFIRMED = "unconfirmed"  # an ended request that no journal has confirmed
    BALANCE = "balance"  # an account and its last entry
    HELD = "held"  # an account's reserved sum and its open reservations
    CHAIN = "chain"  # an entry and the one before it
    OPEN_TOO_LONG = "open_too_long"  # a reservation, and the longest a request may take
    SPOOL = "spool"  # a gateway's words that wait on its disk
    REFUSED_WORDS = "refused_words"  # a gateway's words that the ledger did not take


REQUEST_KINDS = frozenset(
    {
        Kind.UNCOUNTED,
        Kind.MISBILLED,
        Kind.MISPOSTED,
        Kind.OVERDELIVERED,
        Kind.CONTRADICTED,
        Kind.STILL_HELD,
        Kind.UNKNOWN_REQUEST,
        Kind.UNCONFIRMED,
    }
)
# What entries have posted is asked only of what is about to be recounted.
LOOKED_FOR = REQUEST_KINDS - {Kind.MISPOSTED}
ACCOUNT_KINDS = frozenset({Kind.BALANCE, Kind.HELD})
# That nothing came says nothing when nobody was there to hear it.
OVERDUE_KINDS = frozenset({Kind.UNKNOWN_REQUEST, Kind.UNCONFIRMED})
# Seen whole in every round, for their tables are small.
STATE_KINDS = frozenset({Kind.OPEN_TOO_LONG, Kind.SPOOL, Kind.REFUSED_WORDS})
# That it is not found any more says nothing: what was refused is on some disk.
LASTING = frozenset({Kind.CHAIN, Kind.REFUSED_WORDS})


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A difference as it is seen now. `detail` is for a person and tells both sides."""

    kind: Kind
    subject: str  # a request, tenant, gateway, or `tenant/entry`
    detail: str
    measure: int = 0  # one that grows is told again


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The last that was written down of a kind and subject: open, or closed by a person."""

    id: int
    kind: Kind
    subject: str
    measure: int
    is_open: bool


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written down."""

    new: tuple[Found, ...] = ()
    grown: tuple[tuple[Known, Found], ...] = ()  # open ones, with what they are now
    gone: tuple[Known, ...] = ()


def judge(found: Iterable[Found], known: Iterable[Known]) -> Verdict:
    """Compare what was found with what is known of all that was looked at."""
    seen = {(item.kind, item.subject): item for item in found}
    before = {(item.kind, item.subject): item for item in known}
    new, grown = [], []
    for name, item in seen.items():
        last = before.get(name)
        if last is None or (not last.is_open and item.measure > last.measure):
            new.append(item)
        elif last.is_open and item.measure > last.measure:
            grown.append((last, item))
    gone = tuple(
        item
        for name, item in before.items()
        if item.is_open and name not in seen and item.kind not in LASTING
    )
    return Verdict(new=tuple(new), grown=tuple(grown), gone=gone)


def next_window_ms(span_ms: int, *, rows: int, rows_max: int) -> int:
    """How much time the slice after one of `span_ms` spans, to hold about `rows_max` rows.

    A slice must read all of its span to find where it begins, so a long span of many rows
    would be read many times over; short ones of none would take for ever after a long pause.

    >>> next_window_ms(4_000, rows=100, rows_max=100), next_window_ms(4_000, rows=9, rows_max=100)
    (2000, 8000)
    """
    if rows >= rows_max:
        return max(WINDOW_MS_MIN, span_ms // 2)
    if rows * 2 < rows_max:
        span_ms *= 2
    return max(WINDOW_MS_MIN, min(WINDOW_MS_MAX, span_ms))
