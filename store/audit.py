"""What Postgres knows of the live system, gathered for `check`. It judges nothing.

Full scans: for an operator who doubts, through connections of their own with longer bounds,
never for a dashboard. The ledger's own rules are in `store.ledger_audit`.
"""

import msgspec

from store import differences, ledger_audit
from store.differences import FROM_NEWEST, Difference
from store.ledger_audit import LedgerAudit
from store.postgres import Connection
from store.queries import load
from store.rows import Row, struct_row

ROWS_MAX = 20  # of each kind: enough to start looking

_sql = load("audit")


class OpenReservation(msgspec.Struct, frozen=True, kw_only=True):
    """Money held now. The gateway's fields are None for one that never took a lease."""

    request_id: str
    tenant_id: str
    gateway_id: str
    reserved_micro: int
    age_ms: int
    lease_ms: int | None
    gateway_silent_ms: int | None


class OldestReservation(msgspec.Struct, frozen=True, kw_only=True):
    """The one that has been held longest, whoever holds it."""

    request_id: str
    gateway_id: str
    age_ms: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's incarnation, and how many reservations name it."""

    id: str
    region: str
    lease_ms: int
    retired: bool
    silent_ms: int
    reservations: int


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """Everything read at about one moment. Lists hold at most `ROWS_MAX`."""

    ledger: LedgerAudit
    reservations: list[OpenReservation]
    oldest: OldestReservation | None
    leases: list[Lease]
    orphans: int  # requests known to witnesses alone
    differences: list[Difference]  # open ones that the reconciler has told of


async def read_books(conn: Connection) -> Books:
    """Raises StoreAwayError."""
    oldest = await _rows(conn, "oldest_reservation", OldestReservation)
    row = await (await conn.execute(_sql["orphans"])).fetchone()
    assert row is not None, "an aggregate has a row"
    return Books(
        ledger=await ledger_audit.audit(conn),
        reservations=await _rows(conn, "open_reservations", OpenReservation),
        oldest=oldest[0] if oldest else None,
        leases=await _rows(conn, "leases", Lease),
        orphans=int(row[0]),
        differences=await differences.page(conn, before=FROM_NEWEST, limit=ROWS_MAX),
    )


async def _rows(
    conn: Connection, statement: str, kind: type[Row], limit: int = ROWS_MAX
) -> list[Row]:
    async with conn.cursor(row_factory=struct_row(kind)) as cursor:
        await cursor.execute(_sql[statement], {"limit": limit})
        return await cursor.fetchall()
