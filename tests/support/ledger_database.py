"""A database made ready for the ledger: prices, and tenants of a test's own."""

import secrets
from typing import Any

from core.pricing import ListedPrice
from store.accounts import open_account
from store.group_commit import GroupCommitConfig
from store.ledger import Ledger
from store.postgres import Postgres, PostgresConfig
from store.prices import seed_prices
from tests.support.ledger_commands import PRICES


async def a_tenant(pg: Postgres, *, hard_cap_micro: int | None = None) -> str:
    """A tenant of this test's own with an account, in a database that has our prices."""
    tenant_id = f"ten_{secrets.token_hex(12)}"
    async with pg.transaction() as conn:
        await seed_prices(conn, [ListedPrice(model=p.id, effective_ms=0, price=p) for p in PRICES])
        await conn.execute(
            "INSERT INTO tenants (id, name, salt, version) VALUES (%s, %s, %s, 0)",
            (tenant_id, tenant_id, secrets.token_bytes(16)),
        )
        await open_account(conn, tenant_id, hard_cap_micro)
    return tenant_id


def an_impatient_ledger(url: str, **bounds: Any) -> Ledger:
    """One whose bounds a test can wait for."""
    postgres = PostgresConfig(database_url=url, application_name="impatient", connect_timeout_s=1)
    return Ledger(GroupCommitConfig(postgres=postgres, **bounds), lanes=1)
