"""What tiers, tenants and keys say of limits: read, and replaced as a whole.

A tier speaks for its tenants, for their keys, and for models; what a tenant or a key says
itself goes before. In force everywhere within a second.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from litestar import Response, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.etags import content_hash, require_match, tagged
from control_plane.api.names import ModelName, TierName
from control_plane.api.tenants import required, required_for_change
from control_plane.auth import AnyRequest
from control_plane.services import Services
from core.allowance import NOTHING_SAID, Allowance, SaidRow, Subject, layered, said_by
from core.errors import Code, refuse
from store import limits, tenants
from store.audit_log import record
from store.postgres import Connection

MODELS_MAX = 256  # each gateway keeps them all

ModelLimits = Annotated[dict[ModelName, Allowance], msgspec.Meta(max_length=MODELS_MAX)]


class TierLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For each tenant of the tier, each key of such a tenant, and each tenant on a model."""

    tenants: Allowance = NOTHING_SAID
    keys: Allowance = NOTHING_SAID
    models: ModelLimits = {}


class OwnLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's or a key's: for all that it does, and for what it does on a model."""

    all: Allowance = NOTHING_SAID
    models: ModelLimits = {}


class BothLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What it says itself, and what holds in the end: its own before its tier's."""

    own: OwnLimits
    effective: OwnLimits


@get("/tiers/{tier:str}/limits")
async def read_tier_limits(services: NamedDependency[Services], tier: FromPath[str]) -> TierLimits:
    """Of a tier that nobody spoke of: nothing."""
    async with services.postgres.connection() as conn:
        rows = await limits.said_of(conn, ["tier", "tier_key"], tier)
    models = said_by(rows, "tier")
    keys = said_by(rows, "tier_key").get("", NOTHING_SAID)
    return TierLimits(tenants=models.pop("", NOTHING_SAID), keys=keys, models=models)


@put("/tiers/{tier:str}/limits")
async def put_tier_limits(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tier: FromPath[str],
    data: JSONBody[TierLimits],
) -> TierLimits:
    """For all its tenants at once. 422 for a model that is none."""
    _check_tier(tier)
    async with services.postgres.transaction() as conn:
        await limits.lock_tier(conn, tier)
        await _say(conn, "tier", tier, data.tenants, data.models)
        await limits.say(conn, "tier_key", tier, data.keys)
        await limits.touch_tier(conn, tier)
        await _record(conn, f"tier:{tier}", data, actor=actor)
    return data


@get("/tenants/{tenant:str}/limits")
async def read_tenant_limits(
    services: NamedDependency[Services], tenant: FromPath[str]
) -> Response[BothLimits]:
    """404 for an unknown id."""
    async with services.postgres.connection() as conn:
        both = await _of_tenant(conn, tenant)
    return tagged(both, content_hash(both.own))


@put("/tenants/{tenant:str}/limits")
async def put_tenant_limits(
    request: AnyRequest,
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[OwnLimits],
) -> Response[BothLimits]:
    """What is left out is the tier's again."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        require_match(request, content_hash((await _of_tenant(conn, tenant)).own))
        version = await tenants.touch_tenant(conn, tenant)
        await _say(conn, "tenant", tenant, data.all, data.models)
        await _record(conn, tenant, data, actor=actor)
        both = await _of_tenant(conn, tenant)
    await services.announcer.tenant(tenant, version)
    return tagged(both, content_hash(both.own))


@get("/keys/{key:str}/limits")
async def read_key_limits(
    services: NamedDependency[Services], key: FromPath[str]
) -> Response[BothLimits]:
    """404 for an unknown id. Its tenant's limits bind it besides."""
    async with services.postgres.connection() as conn:
        both = await _of_key(conn, await _tenant_of(conn, key), key)
    return tagged(both, content_hash(both.own))


@put("/keys/{key:str}/limits")
async def put_key_limits(
    request: AnyRequest,
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    key: FromPath[str],
    data: JSONBody[OwnLimits],
) -> Response[BothLimits]:
    """As a tenant's."""
    async with services.postgres.transaction() as conn:
        tenant = await _tenant_of(conn, key)
        await required_for_change(conn, tenant)
        require_match(request, content_hash((await _of_key(conn, tenant, key)).own))
        version = await tenants.touch_key(conn, key)
        await _say(conn, "key", key, data.all, data.models)
        await _record(conn, key, data, actor=actor)
        both = await _of_key(conn, tenant, key)
    await services.announcer.key(tenant, key, version)
    return tagged(both, content_hash(both.own))


async def _of_tenant(conn: Connection, tenant: str) -> BothLimits:
    row = await required(conn, tenant)
    own = await limits.said_of(conn, ["tenant"], tenant)
    return _both(said_by(own, "tenant"), said_by(await _said_by_tier(conn, row.tier), "tier"))


async def _of_key(conn: Connection, tenant: str, key: str) -> BothLimits:
    row = await required(conn, tenant)
    own = await limits.said_of(conn, ["key"], key)
    return _both(said_by(own, "key"), said_by(await _said_by_tier(conn, row.tier), "tier_key"))


async def _said_by_tier(conn: Connection, tier: str) -> list[SaidRow]:
    return await limits.said_of(conn, ["tier", "tier_key"], tier)


def _both(own: Mapping[str, Allowance], tier: Mapping[str, Allowance]) -> BothLimits:
    return BothLimits(own=_shown(own), effective=_shown(layered(own, tier)))


def _shown(by_model: Mapping[str, Allowance]) -> OwnLimits:
    models = {name: said for name, said in by_model.items() if name}
    return OwnLimits(all=by_model.get("", NOTHING_SAID), models=models)


async def _say(
    conn: Connection,
    subject: Subject,
    id_: str,
    whole: Allowance,
    models: Mapping[str, Allowance],
) -> None:
    await _require_models(conn, sorted(models))
    await limits.say(conn, subject, id_, whole)
    await limits.say_of_models(conn, subject, id_, models)


async def _require_models(conn: Connection, names: Sequence[str]) -> None:
    """A limit under a name that nobody can ask for would look like one and be none."""
    for name in await limits.unknown_models(conn, names):
        message = f"there is no model {name!r}, and no route of that name"
        raise refuse(Code.UNPROCESSABLE, message, param=f"models.{name}")


async def _record(
    conn: Connection, subject: str, data: TierLimits | OwnLimits, *, actor: str
) -> None:
    detail = msgspec.to_builtins(data)
    await record(conn, actor=actor, action="limits.set", subject=subject, detail=detail)


async def _tenant_of(conn: Connection, key: str) -> str:
    row = await tenants.key_by_id(conn, key)
    if row is None:
        raise refuse(Code.NOT_FOUND, f"there is no key {key!r}")
    return row.tenant_id


def _check_tier(tier: str) -> None:
    try:
        msgspec.convert(tier, TierName)
    except msgspec.ValidationError as error:
        raise refuse(Code.NOT_FOUND, f"{tier!r} is not the name of a tier") from error
