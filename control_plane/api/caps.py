"""Caps on what an account or one of its keys spends: set, read, taken away.

A hard cap refuses what would pass it, a soft one is told in the log. Gateways learn of a hard
one within a second; the ledger keeps it from the next reservation on.
"""

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.amounts import Amount
from control_plane.api.tenants import required, required_for_change
from control_plane.services import Services
from core.caps import Period
from core.errors import Code, refuse
from store import accounts, tenants
from store.accounts import CapState
from store.audit_log import record
from store.postgres import Connection


class PutCap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of it: null is no cap of that kind."""

    soft_micro: Amount | None = None
    hard_micro: Amount | None = None


class CapList(msgspec.Struct, frozen=True, kw_only=True):
    """The account's, then its keys'; of each the shorter first."""

    caps: list[CapState]


@get("/tenants/{tenant:str}/caps")
async def list_caps(services: NamedDependency[Services], tenant: FromPath[str]) -> CapList:
    """With what each has counted in its current window."""
    async with services.postgres.connection() as conn:
        await required(conn, tenant)
        return CapList(caps=await accounts.caps_of(conn, tenant))


@put("/tenants/{tenant:str}/caps/{period:str}")
async def put_cap(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    period: FromPath[str],
    data: JSONBody[PutCap],
) -> CapState:
    """Counts from its current window on, with what that already holds."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        version = await tenants.touch_tenant(conn, tenant)
        cap = await _set(conn, tenant, "", _period(period), data, actor=actor)
    await services.announcer.tenant(tenant, version)
    return cap


@delete("/tenants/{tenant:str}/caps/{period:str}", status_code=200)
async def delete_cap(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    period: FromPath[str],
) -> CapList:
    """The caps that are left. 404 when there is no such cap."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        version = await tenants.touch_tenant(conn, tenant)
        left = await _remove(conn, tenant, "", _period(period), actor=actor)
    await services.announcer.tenant(tenant, version)
    return left


@get("/keys/{key:str}/caps")
async def list_key_caps(services: NamedDependency[Services], key: FromPath[str]) -> CapList:
    """Its own; its account's bind it too."""
    async with services.postgres.connection() as conn:
        caps = await accounts.caps_of(conn, await _tenant_of(conn, key))
    return CapList(caps=[cap for cap in caps if cap.key_id == key])


@put("/keys/{key:str}/caps/{period:str}")
async def put_key_cap(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    key: FromPath[str],
    period: FromPath[str],
    data: JSONBody[PutCap],
) -> CapState:
    """As an account's."""
    async with services.postgres.transaction() as conn:
        tenant = await _tenant_of(conn, key)
        await required_for_change(conn, tenant)
        version = await tenants.touch_key(conn, key)
        cap = await _set(conn, tenant, key, _period(period), data, actor=actor)
    await services.announcer.key(tenant, key, version)
    return cap


@delete("/keys/{key:str}/caps/{period:str}", status_code=200)
async def delete_key_cap(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    key: FromPath[str],
    period: FromPath[str],
) -> CapList:
    """As an account's."""
    async with services.postgres.transaction() as conn:
        tenant = await _tenant_of(conn, key)
        await required_for_change(conn, tenant)
        version = await tenants.touch_key(conn, key)
        left = await _remove(conn, tenant, key, _period(period), actor=actor)
    await services.announcer.key(tenant, key, version)
    return left


async def _set(
    conn: Connection, tenant: str, key: str, period: Period, data: PutCap, *, actor: str
) -> CapState:
    soft, hard = data.soft_micro, data.hard_micro
    if soft is None and hard is None:
        message = "A cap is soft, hard or both; DELETE takes it away."
        raise refuse(Code.UNPROCESSABLE, message, param="hard_micro")
    if soft is not None and hard is not None and soft > hard:
        message = "A soft cap over the hard one would never be passed."
        raise refuse(Code.UNPROCESSABLE, message, param="soft_micro")
    await accounts.set_cap(conn, tenant, key, period, soft_micro=soft, hard_micro=hard)
    detail = {"tenant": tenant, "period": period, "soft_micro": soft, "hard_micro": hard}
    await record(conn, actor=actor, action="cap.set", subject=key or tenant, detail=detail)
    (cap,) = [
        cap
        for cap in await accounts.caps_of(conn, tenant)
        if (cap.key_id, cap.period) == (key, period)
    ]
    return cap


async def _remove(
    conn: Connection, tenant: str, key: str, period: Period, *, actor: str
) -> CapList:
    if not await accounts.remove_cap(conn, tenant, key, period):
        raise refuse(Code.NOT_FOUND, f"{key or tenant!r} has no cap for {period!r}")
    detail = {"tenant": tenant, "period": period}
    await record(conn, actor=actor, action="cap.remove", subject=key or tenant, detail=detail)
    caps = await accounts.caps_of(conn, tenant)
    return CapList(caps=[cap for cap in caps if cap.key_id == key])


async def _tenant_of(conn: Connection, key: str) -> str:
    row = await tenants.key_by_id(conn, key)
    if row is None:
        raise refuse(Code.NOT_FOUND, f"there is no key {key!r}")
    return row.tenant_id


def _period(text: str) -> Period:
    try:
        return Period(text)
    except ValueError as error:
        message = f"there is no period {text!r}: day, month or total"
        raise refuse(Code.NOT_FOUND, message, param="period") from error
