"""Tenants' accounts: opened with the tenant, capped by operators, changed only by the ledger."""

from core.ledger import Account
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("accounts")


async def open_account(conn: Connection, tenant_id: str, hard_cap_micro: int | None) -> None:
    """Opening an account that is open changes nothing. The tenant's row exists already."""
    await conn.execute(
        _sql["open_account"], {"tenant_id": tenant_id, "hard_cap_micro": hard_cap_micro}
    )


async def set_hard_cap(conn: Connection, tenant_id: str, hard_cap_micro: int | None) -> None:
    """Refuses what is new from now on; what is already held or posted stays."""
    await conn.execute(
        _sql["set_hard_cap"], {"tenant_id": tenant_id, "hard_cap_micro": hard_cap_micro}
    )


async def account(conn: Connection, tenant_id: str) -> Account | None:
    """The balances as last committed."""
    async with conn.cursor(row_factory=struct_row(Account)) as cursor:
        await cursor.execute(_sql["account"], {"tenant_id": tenant_id})
        return await cursor.fetchone()
