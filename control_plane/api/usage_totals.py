"""Totals of usage: any period, told apart by any of its dimensions, from the sums alone.

The sums follow the rows by themselves; they can be taken anew, for an operator in doubt.
"""

import base64
import binascii
import time
from typing import Annotated, get_args

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody, QueryParameter

from control_plane.api.paging import ROWS, Filter, Limit, MsOrNow
from control_plane.services import Services
from control_plane.usage_jobs import catch_up
from core.errors import Code, refuse
from store.audit_log import record
from store.rollups import rebuild
from store.tenants import tenant_by_id
from store.usage_totals import (
    DAY_MS,
    Bucket,
    Dimension,
    Total,
    TotalKey,
    TotalsQuery,
    month_starts_ms,
    usage_totals,
)

By = Annotated[str, QueryParameter(max_length=100)]
AfterKey = Annotated[str, QueryParameter(max_length=2000)]

BUCKETS: frozenset[Bucket] = frozenset(get_args(Bucket)) - {""}
DIMENSIONS: frozenset[Dimension] = frozenset(get_args(Dimension))


class TotalBody(Total, frozen=True, kw_only=True):
    """Means are over the requests for which the latency is known; null where there are none."""

    first_token_ms_mean: float | None
    inter_token_ms_mean: float | None


class TotalList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of time, then of the other dimensions. `after` asks for more, null at the end.

    What ended before `fresh_as_of_ms` is in it, to within the length of a transaction.
    """

    totals: list[TotalBody]
    from_ms: int
    to_ms: int
    fresh_as_of_ms: int
    entries_behind: int
    after: str | None


@get("/usage/totals")
async def read_usage_totals(
    services: NamedDependency[Services],
    *,
    by: By = "",
    from_ms: MsOrNow = None,
    to_ms: MsOrNow = None,
    tenant_id: Filter = "",
    key_id: Filter = "",
    model: Filter = "",
    version: Filter = "",
    cause: Filter = "",
    after: AfterKey = "",
    limit: Limit = ROWS,
) -> TotalList:
    """Of this month up to now, unless the period is given, in whole hours."""
    bucket, dimensions = _by(by)
    today_ms = time.time_ns() // 1_000_000 // DAY_MS * DAY_MS
    to_ms = today_ms + DAY_MS if to_ms is None else to_ms
    from_ms = min(month_starts_ms(today_ms, today_ms)[0], to_ms) if from_ms is None else from_ms
    try:
        query = TotalsQuery(
            from_ms=from_ms,
            to_ms=to_ms,
            bucket=bucket,
            by=dimensions,
            tenant_id=tenant_id,
            key_id=key_id,
            model=model,
            version=version,
            cause=cause,
        )
    except ValueError as error:
        raise refuse(Code.UNPROCESSABLE, str(error), param="from_ms") from error
    await catch_up(services)
    # Not from the pool that heartbeats need: a year of everybody's hours takes its time.
    async with services.books.connection() as conn:
        found = await usage_totals(conn, query, after=_key(after), limit=limit)
    return TotalList(
        totals=[_body(total) for total in found.totals],
        from_ms=from_ms,
        to_ms=to_ms,
        fresh_as_of_ms=found.freshness.fresh_as_of_ms,
        entries_behind=found.freshness.entries_behind,
        after=_after(found.totals[-1]) if len(found.totals) == limit else None,
    )


class RebuildUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose sums to take anew."""

    tenant_id: str


class RebuiltUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The entry of the tenant's account that its sums now stand at."""

    tenant_id: str
    entry: int


@post("/usage/totals/rebuild", status_code=200)
async def rebuild_usage_totals(
    services: NamedDependency[Services], actor: NamedDependency[str], data: JSONBody[RebuildUsage]
) -> RebuiltUsage:
    """Of the months whose requests are still there; the others keep theirs."""
    async with services.postgres.transaction() as conn:
        if await tenant_by_id(conn, data.tenant_id) is None:
            raise refuse(Code.NOT_FOUND, f"there is no tenant {data.tenant_id!r}")
        subject = data.tenant_id
        await record(conn, actor=actor, action="usage.rebuild", subject=subject, detail={})
    entry = await rebuild(services.books, data.tenant_id)
    return RebuiltUsage(tenant_id=data.tenant_id, entry=entry)


def _by(text: str) -> tuple[Bucket, frozenset[Dimension]]:
    """`day,tenant,model`: at most one measure of time."""
    words = set(filter(None, text.split(",")))
    buckets = BUCKETS & words
    dimensions = DIMENSIONS & words
    if words - buckets - dimensions or len(buckets) > 1:
        known = ", ".join(sorted(DIMENSIONS))
        message = f"`by` is one of hour, day, month, and any of {known}"
        raise refuse(Code.UNPROCESSABLE, message, param="by")
    return next(iter(buckets), ""), dimensions


def _body(total: Total) -> TotalBody:
    return TotalBody(
        **msgspec.structs.asdict(total),
        first_token_ms_mean=_mean_ms(total.first_token_us, total.first_token_count),
        inter_token_ms_mean=_mean_ms(total.inter_token_us, total.inter_token_count),
    )


def _mean_ms(sum_us: int, count: int) -> float | None:
    return sum_us / count / 1000 if count else None


def _after(last: Total) -> str:
    key = msgspec.convert(last, TotalKey, from_attributes=True)
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).decode()


def _key(after: str) -> TotalKey | None:
    if not after:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(after.encode()), type=TotalKey)
    except (binascii.Error, msgspec.DecodeError, UnicodeError) as error:
        message = "This is not an `after` that we gave."
        raise refuse(Code.UNPROCESSABLE, message, param="after") from error
