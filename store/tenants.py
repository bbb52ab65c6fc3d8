"""Tenants and their API keys: written by the control plane, cached by gateways.

Every change takes a number from the `tenancy` clock as the row's version. A key's text is
never here, only its keyed digest.
"""

from collections.abc import Mapping

import msgspec

from core.allowance import NOTHING_SAID, Allowance, OutputPolicy
from core.ids import KeyId, TenantId
from core.tenancy import KeyRecord, Tenant
from store.accounts import open_account, set_hard_cap
from store.changes import next_change
from store.limits import say
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row
from store.tenant_rows import ChangedRow, Changes, FoundRow, TenantRow

CHANGES_MAX = 1000

_sql = load("tenants")


class NewTenant(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant is made of; `salt` is 16 random bytes and never changes."""

    id: TenantId
    name: str
    salt: bytes
    allowance: Allowance = NOTHING_SAID  # what is its own of limits
    output_policy: OutputPolicy = "clamp"
    overload_output_tokens: int = 0
    weight: int
    hard_cap_micro: int | None
    price_book: str = "list"  # known, or the database refuses
    tier: str = "standard"
    billed: bool = True
    disabled: bool


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key for people. `public` is the part of its text that may be shown."""

    id: KeyId
    tenant_id: TenantId
    name: str
    public: str
    version: int
    created_ms: int
    revoked_ms: int | None


async def create_tenant(conn: Connection, new: NewTenant) -> bool:
    """The tenant and its account. False when the name is taken: nothing was made."""
    values = msgspec.structs.asdict(new)
    allowance = values.pop("allowance")
    version = await next_change(conn, "tenancy")
    cursor = await conn.execute(_sql["create_tenant"], values | {"version": version})
    if await cursor.fetchone() is None:
        return False
    await say(conn, "tenant", new.id, allowance)
    await open_account(conn, new.id, new.hard_cap_micro)
    return True


async def tenant_by_id(conn: Connection, tenant_id: str) -> Tenant | None:
    """Disabled ones too."""
    found = await _tenants(conn, "tenant_by_id", {"id": tenant_id})
    return found[0] if found else None


async def tenant_id_by_name(conn: Connection, name: str) -> TenantId | None:
    """For telling who has the name already."""
    row = await (await conn.execute(_sql["tenant_id_by_name"], {"name": name})).fetchone()
    return None if row is None else TenantId(row[0])


async def knows_price_book(conn: Connection, book: str) -> bool:
    """Whether a tenant can pay by it."""
    return await (await conn.execute(_sql["price_book"], {"book": book})).fetchone() is not None


async def tenants_page(
    conn: Connection, *, name: str = "", after: str = "", limit: int
) -> list[Tenant]:
    """In order of name, after `after`; the one called `name` where that is given."""
    return await _tenants(conn, "tenants_page", {"name": name, "after": after, "limit": limit})


async def tenant_for_change(conn: Connection, tenant_id: str) -> Tenant | None:
    """As `tenant_by_id`, with other changers of it waiting until the transaction ends."""
    await conn.execute(_sql["lock_tenant"], {"id": tenant_id})
    return await tenant_by_id(conn, tenant_id)


async def change_tenant(conn: Connection, tenant: Tenant) -> Tenant:
    """Write all but its name, salt and limits; returns it as it is then, with a new version."""
    version = await next_change(conn, "tenancy")
    values = msgspec.structs.asdict(tenant) | {"version": version}
    await conn.execute(_sql["update_tenant"], values)
    await set_hard_cap(conn, tenant.id, tenant.hard_cap_micro)
    return await _there(conn, tenant.id)


async def touch_tenant(conn: Connection, tenant_id: str) -> int:
    """Have gateways read it again, with what belongs to it; returns its new version."""
    version = await next_change(conn, "tenancy")
    await conn.execute(_sql["touch_tenant"], {"id": tenant_id, "version": version})
    return version


async def create_key(
    conn: Connection, *, key_id: KeyId, tenant_id: str, name: str, public: str, digest: bytes
) -> int:
    """Returns the key's version. The tenant exists, or the database refuses."""
    version = await next_change(conn, "tenancy")
    names = {"id": key_id, "tenant_id": tenant_id, "name": name, "public": public}
    await conn.execute(_sql["create_key"], {**names, "digest": digest, "version": version})
    return version


async def key_by_id(conn: Connection, key_id: str) -> KeyRow | None:
    """Revoked ones too."""
    async with conn.cursor(row_factory=struct_row(KeyRow)) as cursor:
        await cursor.execute(_sql["key_by_id"], {"id": key_id})
        return await cursor.fetchone()


async def touch_key(conn: Connection, key_id: str) -> int:
    """As `touch_tenant`; returns the key's new version."""
    version = await next_change(conn, "tenancy")
    await conn.execute(_sql["touch_key"], {"id": key_id, "version": version})
    return version


async def keys_of_tenant(
    conn: Connection, tenant_id: str, *, after: str = "", limit: int
) -> list[KeyRow]:
    """In order of id, after `after`; revoked ones too."""
    values = {"tenant_id": tenant_id, "after": after, "limit": limit}
    async with conn.cursor(row_factory=struct_row(KeyRow)) as cursor:
        await cursor.execute(_sql["keys_of_tenant"], values)
        return await cursor.fetchall()


async def revoke_key(conn: Connection, key_id: str) -> KeyRow | None:
    """The key as it is now, or None for no such key. Revoking again keeps the first time."""
    version = await next_change(conn, "tenancy")
    async with conn.cursor(row_factory=struct_row(KeyRow)) as cursor:
        await cursor.execute(_sql["revoke_key"], {"id": key_id, "version": version})
        return await cursor.fetchone()


async def key_by_digest(conn: Connection, digest: bytes) -> tuple[KeyRecord, Tenant] | None:
    """The key and its tenant with its safety policy, revoked and disabled ones included."""
    async with conn.cursor(row_factory=struct_row(FoundRow)) as cursor:
        await cursor.execute(_sql["key_by_digest"], {"digest": digest})
        row = await cursor.fetchone()
    return None if row is None else row.found()


async def changes_since(conn: Connection, since: int, *, limit: int = CHANGES_MAX) -> Changes:
    """What changed after number `since`, at most `limit` of each kind, with safety policies.

    Start from `current_change(conn, "tenancy")`, read before the first row is cached.
    """
    values = {"since": since, "limit": limit}
    async with conn.cursor(row_factory=struct_row(ChangedRow)) as cursor:
        await cursor.execute(_sql["changed_since"], values)
        row = await cursor.fetchone()
    assert row is not None, "it has no source of rows that could be empty"
    changes = row.changes()
    version = changes.version
    for rows in (changes.keys, changes.tenants):
        if len(rows) == limit:
            version = min(version, rows[-1].version)
    return msgspec.structs.replace(changes, version=version)


async def _there(conn: Connection, tenant_id: str) -> Tenant:
    tenant = await tenant_by_id(conn, tenant_id)
    assert tenant is not None, "tenants are disabled, never deleted"
    return tenant


async def _tenants(conn: Connection, statement: str, values: Mapping[str, object]) -> list[Tenant]:
    async with conn.cursor(row_factory=struct_row(TenantRow)) as cursor:
        await cursor.execute(_sql[statement], values)
        return [row.tenant() for row in await cursor.fetchall()]
