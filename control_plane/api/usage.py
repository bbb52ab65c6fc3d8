"""Usage rows: what each request used, cost, and how long it took."""

from typing import Annotated

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from control_plane.api.paging import ROWS, Filter, Limit
from control_plane.services import Services
from store.audit import recent_usage
from store.postgres import Connection
from store.usage import UsageRow, usage_of, usage_page

EVER_MS = 2**53 - 1

BeforeMs = Annotated[int, QueryParameter(ge=0, le=EVER_MS)]


class UsageList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first; `before_ms` asks for older ones of a tenant, null at the end."""

    usage: list[UsageRow]
    before_ms: int | None


@get("/usage")
async def list_usage(
    services: NamedDependency[Services],
    request_id: Filter = "",
    tenant_id: Filter = "",
    before_ms: BeforeMs = EVER_MS,
    limit: Limit = ROWS,
) -> UsageList:
    """One request's, one tenant's, or the newest of all. None is an empty list, not 404."""
    async with services.postgres.connection() as conn:
        if request_id:
            row = await usage_of(conn, request_id)
            rows = [row] if row is not None and tenant_id in ("", row.tenant_id) else []
        else:
            rows = await _page(conn, tenant_id, before_ms, limit)
    more = len(rows) == limit and tenant_id and not request_id
    return UsageList(usage=rows, before_ms=rows[-1].created_ms if more else None)


async def _page(conn: Connection, tenant_id: str, before_ms: int, limit: int) -> list[UsageRow]:
    if tenant_id:
        return await usage_page(conn, tenant_id, before_ms=before_ms, limit=limit)
    return await recent_usage(conn, limit=limit)
