"""Usage: requests one by one, what each used, cost and how long it took; and totals of them."""

import re

import msgspec
from litestar import get
from litestar.di import NamedDependency

from control_plane.api.paging import ROWS, After, Filter, Limit, Ms
from control_plane.services import Services
from control_plane.usage_jobs import catch_up
from core.errors import Code, refuse
from store.usage import EVER_MS, Place, UsageFilter, UsageRow, usage_of, usage_page

_CURSOR = re.compile(r"(\d{1,16})\.([\w-]{0,100})")


class UsageList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first; `after` asks for older ones, null at the end."""

    usage: list[UsageRow]
    after: str | None


@get("/usage")
async def list_usage(
    services: NamedDependency[Services],
    *,
    request_id: Filter = "",
    tenant_id: Filter = "",
    key_id: Filter = "",
    model: Filter = "",
    version: Filter = "",
    cause: Filter = "",
    from_ms: Ms = 0,
    to_ms: Ms = EVER_MS,
    after: After = "",
    limit: Limit = ROWS,
) -> UsageList:
    """One request's, one tenant's, or everybody's. None is an empty list, not 404."""
    shown = UsageFilter(
        tenant_id=tenant_id,
        key_id=key_id,
        model=model,
        version=version,
        cause=cause,
        from_ms=from_ms,
    )
    place = _place(after, to_ms)
    if not request_id and (not tenant_id or key_id or model or version or cause):
        await catch_up(services)  # such a page is found by the sums
    async with services.postgres.connection() as conn:
        if request_id:
            row = await usage_of(conn, request_id)
            return UsageList(usage=[row] if row and _fits(row, shown, to_ms) else [], after=None)
        page = await usage_page(conn, shown, place, limit=limit)
    older = page.older
    return UsageList(
        usage=page.rows, after=None if older is None else f"{older.before_ms}.{older.before_id}"
    )


def _place(after: str, to_ms: int) -> Place:
    """Many requests begin in one millisecond, so a place is that and the last one's id."""
    if not after:
        return Place(to_ms)
    match = _CURSOR.fullmatch(after)
    if match is None:
        raise refuse(Code.UNPROCESSABLE, "This is not an `after` that we gave.", param="after")
    return min(Place(int(match[1]), match[2]), Place(to_ms))


def _fits(row: UsageRow, shown: UsageFilter, to_ms: int) -> bool:
    fields = ("tenant_id", "key_id", "model", "version", "cause")
    return shown.from_ms <= row.created_ms < to_ms and all(
        getattr(shown, field) in ("", getattr(row, field)) for field in fields
    )
