"""Tenants' accounts: opened with the tenant, bounded by operators, changed only by the ledger.

Here are the terms (prepaid or not, hard cap, caps) and what can be read of an account. Setting a
bound refuses what is new from then on; what is held or posted already stays.
"""

from datetime import date

import msgspec

from core.accounts import Account
from core.caps import Period
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

FROM_NEWEST = 2**63 - 1

_sql = load("accounts")


class CapState(msgspec.Struct, frozen=True, kw_only=True):
    """A cap, and what it counts just now.

    `starts` is its window's first day, UTC, and 0001-01-01 where that is for good. `since` is
    the day it was set.
    """

    key_id: str  # "": the whole account
    period: Period
    soft_micro: int | None
    hard_micro: int | None
    since: date
    starts: date
    posted_micro: int
    reserved_micro: int
    soft_passed_ms: int | None


class PassedCap(msgspec.Struct, frozen=True, kw_only=True):
    """A soft cap that was passed in a window, to be told once. `soft_micro` is as it is now."""

    tenant_id: str
    key_id: str
    period: Period
    starts: date
    posted_micro: int
    reserved_micro: int
    soft_micro: int | None
    passed_ms: int


class EntryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One change of an account, and its balances afterwards. The last three are an operator's."""

    seq: int
    at_ms: int
    request_id: str
    kind: str
    reserved_delta_micro: int
    posted_delta_micro: int
    credit_delta_micro: int
    reserved_micro: int
    posted_micro: int
    credit_micro: int
    adjustment_id: str
    reason: str
    author: str


async def open_account(conn: Connection, tenant_id: str, hard_cap_micro: int | None) -> None:
    """Opening an account that is open changes nothing. The tenant's row exists already."""
    await conn.execute(
        _sql["open_account"], {"tenant_id": tenant_id, "hard_cap_micro": hard_cap_micro}
    )


async def account(conn: Connection, tenant_id: str) -> Account | None:
    """The balances as last committed."""
    async with conn.cursor(row_factory=struct_row(Account)) as cursor:
        await cursor.execute(_sql["account"], {"tenant_id": tenant_id})
        return await cursor.fetchone()


async def account_for_change(conn: Connection, tenant_id: str) -> Account | None:
    """As `account`, with the ledger waiting until the transaction ends: keep it short."""
    await conn.execute(_sql["lock_account"], {"tenant_id": tenant_id})
    return await account(conn, tenant_id)


async def set_hard_cap(conn: Connection, tenant_id: str, hard_cap_micro: int | None) -> None:
    """On all that is ever posted and reserved."""
    await conn.execute(
        _sql["set_hard_cap"], {"tenant_id": tenant_id, "hard_cap_micro": hard_cap_micro}
    )


async def set_prepaid(conn: Connection, tenant_id: str, *, prepaid: bool) -> None:
    """Whether the account's credit is a hard limit."""
    await conn.execute(_sql["set_prepaid"], {"tenant_id": tenant_id, "prepaid": prepaid})


async def set_cap(
    conn: Connection,
    tenant_id: str,
    key_id: str,
    period: Period,
    *,
    soft_micro: int | None,
    hard_micro: int | None,
) -> None:
    """On the account where `key_id` is "", else on that key.

    A new cap counts from its current window on, with what that already holds; one that is there
    goes on counting. The account and the key exist.
    """
    await conn.execute(
        _sql["set_cap"],
        {
            "tenant_id": tenant_id,
            "key_id": key_id,
            "period": period.value,
            "soft_micro": soft_micro,
            "hard_micro": hard_micro,
        },
    )


async def remove_cap(conn: Connection, tenant_id: str, key_id: str, period: Period) -> bool:
    """Its counters go with it. False when there is none."""
    place = {"tenant_id": tenant_id, "key_id": key_id, "period": period.value}
    row = await (await conn.execute(_sql["remove_cap"], place)).fetchone()
    assert row is not None, "a function's answer is a row"
    return bool(row[0])


async def caps_of(conn: Connection, tenant_id: str) -> list[CapState]:
    """The account's, then its keys'; of each the shorter first."""
    async with conn.cursor(row_factory=struct_row(CapState)) as cursor:
        await cursor.execute(_sql["caps"], {"tenant_id": tenant_id})
        return await cursor.fetchall()


async def take_passed_caps(conn: Connection, *, limit: int) -> list[PassedCap]:
    """Soft caps passed and not told yet. Each is given once, when the transaction commits."""
    async with conn.cursor(row_factory=struct_row(PassedCap)) as cursor:
        await cursor.execute(_sql["take_passed_caps"], {"limit": limit})
        return await cursor.fetchall()


async def entries_page(
    conn: Connection, tenant_id: str, *, before: int = FROM_NEWEST, limit: int
) -> list[EntryRow]:
    """Newest first."""
    values = {"tenant_id": tenant_id, "before": before, "limit": limit}
    async with conn.cursor(row_factory=struct_row(EntryRow)) as cursor:
        await cursor.execute(_sql["entries_page"], values)
        return await cursor.fetchall()


async def adjustment_is_recorded(conn: Connection, tenant_id: str, adjustment_id: str) -> bool:
    """Whether the audit log has it."""
    values = {"tenant_id": tenant_id, "adjustment_id": adjustment_id}
    cursor = await conn.execute(_sql["adjustment_recorded"], values)
    return await cursor.fetchone() is not None
