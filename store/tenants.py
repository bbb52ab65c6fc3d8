"""Tenants and their API keys: written by the control plane, cached by gateways.

Every change takes a number from the `tenancy` clock as the row's version. A key's text is
never here, only its keyed digest.
"""

from collections.abc import Mapping

import msgspec

from core.allowance import NOTHING_SAID, Allowance, OutputPolicy, SaidRow, layered, said_by
from core.ids import KeyId, TenantId
from core.tenancy import KeyRecord, Tenant
from store.accounts import open_account, set_hard_cap
from store.changes import current_change, next_change
from store.limits import say
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

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


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and tenants as they are now, and the number to ask from next time."""

    keys: tuple[KeyRecord, ...]
    tenants: tuple[Tenant, ...]
    version: int


class _TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    id: TenantId
    name: str
    salt: bytes
    said: list[SaidRow] | None
    output_policy: OutputPolicy
    overload_output_tokens: int
    weight: int
    price_book: str
    tier: str
    billed: bool
    disabled: bool
    version: int
    hard_cap_micro: int | None
    hard_capped: bool
    models: tuple[str, ...] | None

    def tenant(self) -> Tenant:
        said = self.said or []
        by_model = layered(said_by(said, "tenant"), said_by(said, "tier"))
        whole = by_model.pop("")
        return Tenant(
            id=self.id,
            name=self.name,
            salt=self.salt,
            limits=whole.limits,
            bounds=whole.bounds,
            key_allowance=said_by(said, "tier_key").get("", NOTHING_SAID),
            model_allowances=by_model,
            output_policy=self.output_policy,
            overload_output_tokens=self.overload_output_tokens,
            weight=self.weight,
            hard_cap_micro=self.hard_cap_micro,
            price_book=self.price_book,
            tier=self.tier,
            billed=self.billed,
            hard_capped=self.hard_capped,
            models=self.models,
            disabled=self.disabled,
            version=self.version,
        )


class _KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    id: KeyId
    tenant_id: TenantId
    name: str
    revoked: bool
    hard_capped: bool
    said: list[SaidRow] | None
    models: tuple[str, ...] | None
    version: int

    def key(self) -> KeyRecord:
        by_model = said_by(self.said or [], "key")
        return KeyRecord(
            id=self.id,
            tenant_id=self.tenant_id,
            name=self.name,
            revoked=self.revoked,
            hard_capped=self.hard_capped,
            allowance=by_model.pop("", NOTHING_SAID),
            model_allowances=by_model,
            models=self.models,
            version=self.version,
        )


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
    """The key and its tenant, revoked and disabled ones included."""
    async with conn.cursor(row_factory=struct_row(_KeyRow)) as cursor:
        await cursor.execute(_sql["key_by_digest"], {"digest": digest})
        row = await cursor.fetchone()
    if row is None:
        return None
    return row.key(), await _there(conn, row.tenant_id)


async def changes_since(conn: Connection, since: int, *, limit: int = CHANGES_MAX) -> Changes:
    """What changed after number `since`, at most `limit` of each kind.

    Start from `current_change(conn, "tenancy")`, read before the first row is cached.
    """
    # The clock first: a row that changes while we read is then told twice, never missed.
    version = await current_change(conn, "tenancy")
    values = {"since": since, "limit": limit}
    async with conn.cursor(row_factory=struct_row(_KeyRow)) as cursor:
        await cursor.execute(_sql["keys_changed_since"], values)
        keys = [row.key() for row in await cursor.fetchall()]
    tenants = await _tenants(conn, "tenants_changed_since", values)
    for rows in (keys, tenants):
        if len(rows) == limit:
            version = min(version, rows[-1].version)
    return Changes(keys=tuple(keys), tenants=tuple(tenants), version=version)


async def _there(conn: Connection, tenant_id: str) -> Tenant:
    tenant = await tenant_by_id(conn, tenant_id)
    assert tenant is not None, "tenants are disabled, never deleted"
    return tenant


async def _tenants(conn: Connection, statement: str, values: Mapping[str, object]) -> list[Tenant]:
    async with conn.cursor(row_factory=struct_row(_TenantRow)) as cursor:
        await cursor.execute(_sql[statement], values)
        return [row.tenant() for row in await cursor.fetchall()]
