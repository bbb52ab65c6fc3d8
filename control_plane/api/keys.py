"""API keys: minted, listed, revoked. A key's text is in one answer and nowhere else."""

import secrets

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.names import KeyName
from control_plane.api.paging import ROWS, After, Limit
from control_plane.api.tenants import required
from control_plane.services import Services
from core.errors import Code, refuse
from core.ids import ENTROPY_BYTES, KeyId, key_id
from core.tenancy import KEY_ENTROPY_BYTES, key_digest, mint_key, public_part
from store import tenants
from store.audit_log import record


class CreateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`name` is for people; two keys may share one."""

    name: KeyName


class CreatedKey(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is the whole text, shown this once."""

    id: KeyId
    tenant_id: str
    name: str
    public: str
    key: str
    version: int


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of id; `after` asks for the next ones, null at the end."""

    keys: list[tenants.KeyRow]
    after: str | None


@post("/tenants/{tenant:str}/keys")
async def create_key(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[CreateKey],
) -> CreatedKey:
    """404 for an unknown tenant. Works at once: nobody can have cached its absence."""
    text = mint_key(secrets.token_bytes(KEY_ENTROPY_BYTES))
    new = key_id(secrets.token_bytes(ENTROPY_BYTES))
    digest = key_digest(services.settings.key_pepper.encode(), text)
    public = public_part(text)
    async with services.postgres.transaction() as conn:
        await required(conn, tenant)
        version = await tenants.create_key(
            conn, key_id=new, tenant_id=tenant, name=data.name, public=public, digest=digest
        )
        detail = {"tenant": tenant, "name": data.name, "public": public}
        await record(conn, actor=actor, action="key.create", subject=new, detail=detail)
    await services.announcer.key(tenant, new, version)
    return CreatedKey(
        id=new, tenant_id=tenant, name=data.name, public=public, key=text, version=version
    )


@get("/tenants/{tenant:str}/keys")
async def list_keys(
    services: NamedDependency[Services],
    tenant: FromPath[str],
    after: After = "",
    limit: Limit = ROWS,
) -> KeyList:
    """Revoked ones too."""
    async with services.postgres.connection() as conn:
        await required(conn, tenant)
        rows = await tenants.keys_of_tenant(conn, tenant, after=after, limit=limit)
    return KeyList(keys=rows, after=rows[-1].id if len(rows) == limit else None)


@delete("/keys/{key:str}", status_code=200)
async def revoke_key(
    services: NamedDependency[Services], actor: NamedDependency[str], key: FromPath[str]
) -> tenants.KeyRow:
    """Dead everywhere within a second; revoking again changes nothing."""
    async with services.postgres.transaction() as conn:
        row = await tenants.revoke_key(conn, key)
        if row is None:
            raise refuse(Code.NOT_FOUND, f"there is no key {key!r}")
        detail = {"tenant": row.tenant_id, "public": row.public}
        await record(conn, actor=actor, action="key.revoke", subject=key, detail=detail)
    await services.announcer.key(row.tenant_id, row.id, row.version)
    return row
