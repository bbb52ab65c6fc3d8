"""The audit log: who changed what, newest first."""

from typing import Annotated

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from control_plane.api.paging import ROWS, Filter, Limit
from control_plane.services import Services
from store.audit_log import FROM_NEWEST, AuditRecord, audit_page

Before = Annotated[int, QueryParameter(ge=0, le=FROM_NEWEST)]


class AuditList(msgspec.Struct, frozen=True, kw_only=True):
    """`before` asks for older ones, null at the end."""

    records: list[AuditRecord]
    before: int | None


@get("/audit-log")
async def list_audit_log(
    services: NamedDependency[Services],
    subject: Filter = "",
    before: Before = FROM_NEWEST,
    limit: Limit = ROWS,
) -> AuditList:
    """All changes, or those of one id or name."""
    async with services.postgres.connection() as conn:
        rows = await audit_page(conn, subject=subject, before=before, limit=limit)
    return AuditList(records=rows, before=rows[-1].id if len(rows) == limit else None)
