"""The audit log: who changed what, newest first."""

from typing import Annotated

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from control_plane.api.paging import ROWS, Filter, Limit, Ms
from control_plane.services import Services
from store.audit_log import EVER_MS, FROM_NEWEST, AuditFilter, AuditRecord, audit_page

# `actor` is who asks.
ActorIs = Annotated[str, QueryParameter(name="actor", max_length=200)]
Before = Annotated[int, QueryParameter(ge=0, le=FROM_NEWEST)]


class AuditList(msgspec.Struct, frozen=True, kw_only=True):
    """`before` asks for older ones, null at the end."""

    records: list[AuditRecord]
    before: int | None


@get("/audit-log")
async def list_audit_log(
    services: NamedDependency[Services],
    *,
    subject: Filter = "",
    actor_is: ActorIs = "",
    action: Filter = "",
    from_ms: Ms = 0,
    to_ms: Ms = EVER_MS,
    before: Before = FROM_NEWEST,
    limit: Limit = ROWS,
) -> AuditList:
    """All that happened, or what all filters hold for. `action=tenant` has `tenant.create` too."""
    shown = AuditFilter(
        subject=subject,
        actor=actor_is,
        action=action,
        from_ms=from_ms,
        to_ms=min(to_ms, EVER_MS),
    )
    async with services.postgres.connection() as conn:
        rows = await audit_page(conn, shown, before=before, limit=limit)
    return AuditList(records=rows, before=rows[-1].id if len(rows) == limit else None)
