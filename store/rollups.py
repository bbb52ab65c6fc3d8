"""Sums of usage by the hour and the day, kept from the log of its changes.

Every change of a request's usage has an entry, and an account's entries are numbered without a
gap in the order of their commits. So for each account one number says what the sums hold; they
and the number move in one transaction, by a bounded count of entries. A crash loses nothing and
counts nothing twice, and any number of control planes may work at once, each on accounts that
no other holds. The ledger is only read: nothing here locks what the token path locks.
"""

import msgspec

from store.postgres import Connection, Postgres
from store.queries import load
from store.rows import struct_row

TENANTS_MAX = 200  # in one transaction
ENTRIES_MAX = 20_000  # of them all together: about half a second

_sql = load("rollups")


class Rolled(msgspec.Struct, frozen=True, kw_only=True):
    """What was brought into the sums. `missing`: endings whose row is gone, which is a fault."""

    entries: int = 0
    requests: int = 0
    missing: int = 0


class Freshness(msgspec.Struct, frozen=True, kw_only=True):
    """The sums hold everything that was written before `fresh_as_of_ms` (Unix), or about then."""

    entries_behind: int
    fresh_as_of_ms: int


async def roll_up(
    pg: Postgres, *, tenants_max: int = TENANTS_MAX, entries_max: int = ENTRIES_MAX
) -> Rolled:
    """One transaction's worth. No entries: nothing is behind, or others are at it.

    Raises:
        StoreAwayError: Repeat it.
    """
    async with pg.transaction() as conn:
        await conn.execute(_sql["know_accounts"])
        cursor = await conn.execute(_sql["take_accounts"], {"tenants_max": tenants_max})
        tenants = [tenant_id for (tenant_id,) in await cursor.fetchall()]
        if not tenants:
            return Rolled()
        async with conn.cursor(row_factory=struct_row(Rolled)) as rolled:
            await rolled.execute(_sql["roll_up"], {"tenants": tenants, "entries_max": entries_max})
            row = await rolled.fetchone()
            assert row is not None, "an aggregate has a row"
            return row


async def freshness(conn: Connection, tenant_id: str = "") -> Freshness:
    """Of one tenant's sums, or of all."""
    async with conn.cursor(row_factory=struct_row(Freshness)) as cursor:
        await cursor.execute(_sql["freshness"], {"tenant_id": tenant_id})
        row = await cursor.fetchone()
        assert row is not None, "an aggregate has a row"
        return row


async def rebuild(pg: Postgres, tenant_id: str) -> int:
    """Take a tenant's sums anew from its rows, and return the entry they then stand at.

    Months whose rows are gone keep what they have. It reads all of the tenant's rows, so `pg`
    is one with long bounds.

    Raises:
        StoreAwayError: Also when a round held the tenant. Repeat it.
    """
    async with pg.transaction() as conn:
        await conn.execute(_sql["one_snapshot"])
        cursor = await conn.execute(_sql["take_account"], {"tenant_id": tenant_id})
        row = await cursor.fetchone()
        if row is None:
            return 0
        at = {"tenant_id": tenant_id, "seq": row[0]}
        for statement in ("forget_sums", "sum_anew", "move_to"):
            await conn.execute(_sql[statement], at)
        return int(row[0])


async def differences(conn: Connection, tenant_id: str) -> list[str]:
    """Sums that differ from what the rows add up to, for a person. None, if nothing is behind."""
    cursor = await conn.execute(_sql["differences"], {"tenant_id": tenant_id})
    return [" ".join(map(str, row)) for row in await cursor.fetchall()]
