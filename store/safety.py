"""Safety policies by version, whose they are, and what they did.

Versions are written once. A change of what holds for a tenant is a change of the tenant: it
takes a number from the `tenancy` clock, so gateways read it as they read any other.
"""

from collections.abc import Sequence

import msgspec
from psycopg.types.json import Jsonb

from core.safety.policy import Action, Policy, Rule, Stage
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row
from store.tenants import touch_tenant

NEWEST = 0  # instead of a version's number
FROM_NEWEST = 2**63 - 1
HITS_AT_ONCE = 1_000

_sql = load("safety")


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One version. `hold_chars` is how far a stream is behind at most."""

    name: str
    version: int
    rules: tuple[Rule, ...]
    hold_chars: int
    created_ms: int


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Whose policy a tenant has; no version is the newest."""

    policy: str
    version: int | None
    keep_text: bool


class NewHit(msgspec.Struct, frozen=True, kw_only=True):
    """A place where a rule matched. `text` only where the tenant has it kept."""

    at_ms: int
    tenant_id: str
    request_id: str
    policy: str
    policy_version: int
    rule: str
    stage: Stage
    action: Action
    choice: int
    chars: int
    text: str | None


class HitRow(NewHit, frozen=True, kw_only=True):
    """As it is kept."""

    id: int


async def put_policy(conn: Connection, name: str, policy: Policy, hold_chars: int) -> PolicyRow:
    """A new version, unless the newest says the same. Its followers are touched by the caller."""
    await conn.execute(_sql["lock_policy"], {"name": name})
    newest = await policy_by_name(conn, name)
    if newest is not None and newest.rules == policy.rules:
        return newest
    version = 1 if newest is None else newest.version + 1
    rules = Jsonb(msgspec.to_builtins(policy.rules))
    values = {"name": name, "version": version, "rules": rules, "hold_chars": hold_chars}
    await conn.execute(_sql["create_policy_version"], values)
    made = await policy_by_name(conn, name, version)
    assert made is not None, "it was written a moment ago"
    return made


async def policy_by_name(conn: Connection, name: str, version: int = NEWEST) -> PolicyRow | None:
    """The newest version, or the one asked for."""
    async with conn.cursor(row_factory=struct_row(PolicyRow)) as cursor:
        await cursor.execute(_sql["policy"], {"name": name, "version": version})
        return await cursor.fetchone()


async def policies_page(conn: Connection, *, after: str = "", limit: int) -> list[PolicyRow]:
    """The newest version of each, in order of name."""
    async with conn.cursor(row_factory=struct_row(PolicyRow)) as cursor:
        await cursor.execute(_sql["policies_page"], {"after": after, "limit": limit})
        return await cursor.fetchall()


async def touch_followers(conn: Connection, policy: str) -> dict[str, int]:
    """Have gateways read again who has this policy's newest version; by id, their versions.

    Each takes a number of its own: readers page through changes by number.
    """
    cursor = await conn.execute(_sql["followers"], {"policy": policy})
    return {row[0]: await touch_tenant(conn, row[0]) for row in await cursor.fetchall()}


async def assign_policy(conn: Connection, tenant_id: str, assignment: Assignment) -> int:
    """The tenant's new version. Tenant and policy exist, or the database refuses."""
    values = {"tenant_id": tenant_id, **msgspec.structs.asdict(assignment)}
    await conn.execute(_sql["assign_policy"], values)
    return await touch_tenant(conn, tenant_id)


async def unassign_policy(conn: Connection, tenant_id: str) -> int | None:
    """The tenant's new version; None where it had no policy."""
    cursor = await conn.execute(_sql["unassign_policy"], {"tenant_id": tenant_id})
    if await cursor.fetchone() is None:
        return None
    return await touch_tenant(conn, tenant_id)


async def assignment(conn: Connection, tenant_id: str) -> Assignment | None:
    """What a tenant has, as it was assigned."""
    async with conn.cursor(row_factory=struct_row(Assignment)) as cursor:
        await cursor.execute(_sql["assignment"], {"tenant_id": tenant_id})
        return await cursor.fetchone()


async def record_hits(conn: Connection, hits: Sequence[NewHit]) -> None:
    """Append them."""
    async with conn.cursor() as cursor:
        await cursor.executemany(_sql["record_hit"], [msgspec.structs.asdict(h) for h in hits])


async def hits_page(
    conn: Connection,
    *,
    tenant_id: str = "",
    request_id: str = "",
    before: int = FROM_NEWEST,
    limit: int,
) -> list[HitRow]:
    """Newest first."""
    values = {"tenant_id": tenant_id, "request_id": request_id, "before": before, "limit": limit}
    async with conn.cursor(row_factory=struct_row(HitRow)) as cursor:
        await cursor.execute(_sql["hits_page"], values)
        return await cursor.fetchall()


async def forget_hits(conn: Connection, *, kept_days: int, limit: int = HITS_AT_ONCE) -> int:
    """Drop the oldest that are past their time; fewer than `limit` is all of them."""
    values = {"kept_days": kept_days, "limit": limit}
    return (await conn.execute(_sql["forget_hits"], values)).rowcount
