"""Totals of usage for people: any period, at any level of detail, from the sums alone.

They cost what the sums of the period are, not what the requests were: hours are read for hours
and for a part of a day, days for everything longer.
"""

from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from store.postgres import Connection
from store.queries import load
from store.rollups import Freshness, freshness
from store.rows import struct_row
from store.usage import HOUR_MS

DAY_MS = 24 * HOUR_MS
TIMES_MS_MAX = 253_370_764_800_000  # the year 9999: as far as a calendar goes

Dimension = Literal["tenant", "key", "model", "version", "cause", "class"]
Bucket = Literal["", "hour", "day", "month"]

_sql = load("usage_totals")
_requests = load("usage")


class TotalKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a total is of. "" (0) where it is not told apart by that."""

    bucket_ms: int = 0  # the start of its hour, day or month, UTC
    tenant_id: str = ""
    key_id: str = ""
    model: str = ""
    version: str = ""
    cause: str = ""
    service_class: str = ""


class Total(TotalKey, frozen=True, kw_only=True):
    """Sums over ended requests. They cost `billed_micro + adjusted_micro`."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    cache_write_5m_tokens: int
    cache_write_1h_tokens: int
    output_tokens: int
    reasoning_tokens: int
    accepted_tokens: int
    delivered_tokens: int
    billed_micro: int
    adjusted_micro: int
    first_token_count: int  # requests whose time to the first token is known
    first_token_us: int
    inter_token_count: int
    inter_token_us: int


class TotalsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Whole hours, from the first (included) to the last (not). "" is any."""

    from_ms: int
    to_ms: int
    bucket: Bucket = ""
    by: frozenset[Dimension] = frozenset()
    tenant_id: str = ""
    key_id: str = ""
    model: str = ""
    version: str = ""
    cause: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a period that no sums make up."""
        if not 0 <= self.from_ms <= self.to_ms <= TIMES_MS_MAX:
            raise ValueError("the period ends before it begins, or outside of all calendars")
        if self.from_ms % HOUR_MS or self.to_ms % HOUR_MS:
            raise ValueError("the period is not made up of whole hours")


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """In order of their keys; with as many as were asked for there may be more."""

    totals: list[Total]
    freshness: Freshness


async def usage_totals(
    conn: Connection, query: TotalsQuery, *, after: TotalKey | None = None, limit: int = 100
) -> Totals:
    """Totals after the key. It opens a transaction of its own on the connection."""
    span_ms = _span_ms(query)
    values = {
        name: value
        for name, value in msgspec.structs.asdict(query).items()
        if name not in ("by", "bucket")
    }
    values |= {f"by_{name}": name in query.by for name in _DIMENSIONS}
    values |= {
        "bucket": "span" if query.bucket == _SPANS.get(span_ms) else query.bucket,
        "bounds_ms": month_starts_ms(query.from_ms, query.to_ms) if query.bucket == "month" else [],
        "span_ms": span_ms,
        "by_time": span_ms == HOUR_MS and not (query.tenant_id or query.key_id),
        "limit": limit,
    }
    last = after or TotalKey(bucket_ms=-1)
    values |= {name: getattr(last, field) for name, field in zip(_AFTER, _KEY_FIELDS, strict=True)}
    async with conn.transaction():
        await conn.execute(_requests["plan_for_each"])
        await conn.execute(_sql["room_for_groups"])
        fresh = await freshness(conn, query.tenant_id)
        async with conn.cursor(row_factory=struct_row(Total)) as cursor:
            await cursor.execute(_sql["usage_totals"], values)
            return Totals(totals=await cursor.fetchall(), freshness=fresh)


def month_starts_ms(from_ms: int, to_ms: int) -> list[int]:
    """The starts of the months that the period touches, UTC.

    >>> month_starts_ms(1_798_700_000_000, 1_798_800_000_000)
    [1796083200000, 1798761600000]
    """
    start = datetime.fromtimestamp(from_ms / 1000, UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    starts = [int(start.timestamp()) * 1000]
    while True:
        start = (start + timedelta(days=31)).replace(day=1)
        starts_ms = int(start.timestamp()) * 1000
        if starts_ms >= to_ms:
            return starts
        starts.append(starts_ms)


def _span_ms(query: TotalsQuery) -> int:
    whole_days = query.from_ms % DAY_MS == 0 and query.to_ms % DAY_MS == 0
    return DAY_MS if whole_days and query.bucket != "hour" else HOUR_MS


_SPANS: dict[int, Bucket] = {HOUR_MS: "hour", DAY_MS: "day"}
_DIMENSIONS = ("tenant", "key", "model", "version", "cause", "class")
_KEY_FIELDS = tuple(field.name for field in msgspec.structs.fields(TotalKey))
_AFTER = ("after_ms", *(f"after_{name}" for name in _DIMENSIONS))
