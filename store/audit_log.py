"""Who changed what: written in the transaction of the change, never altered (by trigger).

`store.audit` is something else: it reads the live system's books.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from psycopg.types.json import Jsonb

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

FROM_NEWEST = 2**63 - 1
EVER_MS = 9_999_999_999_999  # the year 2286

_sql = load("audit_log")


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `detail` never holds a secret."""

    id: int
    at_ms: int
    actor: str
    action: str
    subject: str
    detail: dict[str, Any]


async def record(
    conn: Connection, *, actor: str, action: str, subject: str, detail: Mapping[str, Any]
) -> None:
    """Append one line. `action` reads `tenant.create`; `subject` is the id that was changed."""
    await conn.execute(
        _sql["record"],
        {"actor": actor, "action": action, "subject": subject, "detail": Jsonb(dict(detail))},
    )


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """All that are given hold together. `action` `tenant` is also `tenant.create`."""

    subject: str = ""
    actor: str = ""
    action: str = ""
    from_ms: int = 0
    to_ms: int = EVER_MS


ALL = AuditFilter()


async def audit_page(
    conn: Connection, shown: AuditFilter = ALL, *, before: int = FROM_NEWEST, limit: int
) -> list[AuditRecord]:
    """Newest first."""
    values = msgspec.structs.asdict(shown) | {"before": before, "limit": limit}
    async with conn.cursor(row_factory=struct_row(AuditRecord)) as cursor:
        await cursor.execute(_sql["audit_page"], values)
        return await cursor.fetchall()
