"""Usage rows: what each request used, cost, and how long it took."""

import re

import msgspec
from litestar import get
from litestar.di import NamedDependency

from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.services import Services
from core.errors import Code, refuse
from store.usage import UsageRow, usage_of, usage_page

EVER_MS = 2**53 - 1

_CURSOR = re.compile(r"(\d{1,16})\.([\w-]{1,100})")


class UsageList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first; `after` asks for older ones, null at the end."""

    usage: list[UsageRow]
    after: str | None


@get("/usage")
async def list_usage(
    services: NamedDependency[Services],
    request_id: Filter = "",
    tenant_id: Filter = "",
    after: After = "",
    limit: Limit = ROWS,
) -> UsageList:
    """One request's, one tenant's, or everybody's. None is an empty list, not 404."""
    before_ms, before_id = _place(after)
    async with services.postgres.connection() as conn:
        if request_id:
            row = await usage_of(conn, request_id)
            rows = [row] if row is not None and tenant_id in ("", row.tenant_id) else []
            return UsageList(usage=rows, after=None)
        rows = await usage_page(
            conn, tenant_id, before_ms=before_ms, before_id=before_id, limit=limit
        )
    last = f"{rows[-1].created_ms}.{rows[-1].request_id}" if len(rows) == limit else None
    return UsageList(usage=rows, after=last)


def _place(after: str) -> tuple[int, str]:
    """Many requests begin in one millisecond, so a place is that and the last one's id."""
    if not after:
        return EVER_MS, ""
    match = _CURSOR.fullmatch(after)
    if match is None:
        raise refuse(Code.UNPROCESSABLE, "This is not an `after` that we gave.", param="after")
    return int(match[1]), match[2]
