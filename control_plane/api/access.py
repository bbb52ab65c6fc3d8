"""Allow-lists: the only public names that a tenant's keys, or one of them, may ask for.

What is not on a list is for its caller a name that does not exist, on every path. The lists are
part of the tenant's and the key's rows: a change holds from the next request on, at once where
Valkey hears of it and within a second where not.
"""

from typing import Annotated

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.names import ModelName
from control_plane.api.tenants import required, required_for_change
from control_plane.services import Services
from core.errors import Code, refuse
from store import registry, tenants
from store.audit_log import record
from store.postgres import Connection
from store.registry import ModelAccess

NAMES_MAX = 1000


class PutAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole list; an empty one allows nothing. Names need not exist yet."""

    models: Annotated[tuple[ModelName, ...], msgspec.Meta(max_length=NAMES_MAX)]


class AccessList(msgspec.Struct, frozen=True, kw_only=True):
    """The tenant's own, with `key` "", then those of its keys. Without one, any name is allowed."""

    access: list[ModelAccess]


@get("/tenants/{tenant:str}/models")
async def list_access(services: NamedDependency[Services], tenant: FromPath[str]) -> AccessList:
    """All lists that bind some key of the tenant."""
    async with services.postgres.connection() as conn:
        await required(conn, tenant)
        return AccessList(access=await registry.model_access(conn, tenant))


@put("/tenants/{tenant:str}/models")
async def put_access(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[PutAccess],
) -> ModelAccess:
    """For all keys of the tenant, those with lists of their own too."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        version = await tenants.touch_tenant(conn, tenant)
        access = await _put(conn, tenant, "", data, actor=actor)
    await services.announcer.tenant(tenant, version)
    return access


@delete("/tenants/{tenant:str}/models", status_code=200)
async def delete_access(
    services: NamedDependency[Services], actor: NamedDependency[str], tenant: FromPath[str]
) -> AccessList:
    """The lists that are left. 404 where there was none."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        version = await tenants.touch_tenant(conn, tenant)
        left = await _delete(conn, tenant, "", actor=actor)
    await services.announcer.tenant(tenant, version)
    return left


@put("/keys/{key:str}/models")
async def put_key_access(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    key: FromPath[str],
    data: JSONBody[PutAccess],
) -> ModelAccess:
    """For this key, within what its tenant may ask for."""
    async with services.postgres.transaction() as conn:
        tenant = await _tenant_of(conn, key)
        version = await tenants.touch_key(conn, key)
        access = await _put(conn, tenant, key, data, actor=actor)
    await services.announcer.key(tenant, key, version)
    return access


@delete("/keys/{key:str}/models", status_code=200)
async def delete_key_access(
    services: NamedDependency[Services], actor: NamedDependency[str], key: FromPath[str]
) -> AccessList:
    """The lists that are left. 404 where there was none."""
    async with services.postgres.transaction() as conn:
        tenant = await _tenant_of(conn, key)
        version = await tenants.touch_key(conn, key)
        left = await _delete(conn, tenant, key, actor=actor)
    await services.announcer.key(tenant, key, version)
    return left


async def _put(
    conn: Connection, tenant: str, key: str, data: PutAccess, *, actor: str
) -> ModelAccess:
    access = ModelAccess(key=key, models=tuple(dict.fromkeys(data.models)))
    await registry.put_access(conn, tenant, access)
    detail = {"tenant": tenant, "models": list(access.models)}
    await record(conn, actor=actor, action="access.put", subject=key or tenant, detail=detail)
    return access


async def _delete(conn: Connection, tenant: str, key: str, *, actor: str) -> AccessList:
    if not await registry.delete_access(conn, tenant, key):
        raise refuse(Code.NOT_FOUND, f"{key or tenant!r} has no list of models")
    detail = {"tenant": tenant}
    await record(conn, actor=actor, action="access.delete", subject=key or tenant, detail=detail)
    return AccessList(access=await registry.model_access(conn, tenant))


async def _tenant_of(conn: Connection, key: str) -> str:
    row = await tenants.key_by_id(conn, key)
    if row is None:
        raise refuse(Code.NOT_FOUND, f"there is no key {key!r}")
    await required_for_change(conn, row.tenant_id)
    return row.tenant_id
