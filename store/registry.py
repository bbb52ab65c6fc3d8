"""Models, their immutable versions, deployments, and the routes from public names to them.

Versions are named by the hash of their content; registering one twice is the same version.
The routing view for gateways is read elsewhere, in `store.routing_view`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from psycopg.types.json import Jsonb

from core.route_table import EVERYBODY, RouteTable, Target, placed_targets
from core.worker_spec import LauncherKind, WorkerSpec
from store.changes import next_change
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("registry")


class VersionState(StrEnum):
    """Life of a model version. A retired one takes no new deployment."""

    STAGED = "staged"
    READY = "ready"
    RETIRED = "retired"


class DesiredState(StrEnum):
    """What an operator wants of a deployment's replicas."""

    RUNNING = "running"
    DRAINING = "draining"


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable but for `state`."""

    version: str
    model: str
    family: str
    context_tokens: int
    state: VersionState
    manifest: dict[str, Any]
    created_ms: int


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One version in one region, under the name that workers are started with."""

    name: str
    version: str
    region: str
    desired_state: DesiredState
    created_ms: int
    replicas_desired: int | None = None  # null: nobody manages their number
    replicas_warm: int = 0  # asleep beside them
    launcher: LauncherKind = LauncherKind.EXTERNAL
    spec: WorkerSpec = WorkerSpec()


class ModelAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The only public names that a key of a tenant may ask for; `key` '' is all of its keys."""

    key: str
    models: tuple[str, ...]


async def model_family(conn: Connection, model: str) -> str | None:
    """None for a model never registered."""
    row = await (await conn.execute(_sql["model_family"], {"name": model})).fetchone()
    return None if row is None else str(row[0])


async def register_version(
    conn: Connection,
    *,
    version: str,
    model: str,
    family: str,
    context_tokens: int,
    state: VersionState,
    manifest: dict[str, Any],
) -> bool:
    """Whether it was new. The caller has checked that `version` is the manifest's hash."""
    await conn.execute(_sql["create_model"], {"name": model, "family": family})
    row = await (
        await conn.execute(
            _sql["create_version"],
            {
                "version": version,
                "model": model,
                "context_tokens": context_tokens,
                "state": state,
                "manifest": Jsonb(manifest),
            },
        )
    ).fetchone()
    return row is not None


async def model_version(conn: Connection, version: str) -> ModelVersion | None:
    """By its hash."""
    async with conn.cursor(row_factory=struct_row(ModelVersion)) as cursor:
        await cursor.execute(_sql["model_version"], {"version": version})
        return await cursor.fetchone()


async def model_versions_page(
    conn: Connection, *, model: str = "", after: str = "", limit: int
) -> list[ModelVersion]:
    """In order of hash, after `after`."""
    async with conn.cursor(row_factory=struct_row(ModelVersion)) as cursor:
        await cursor.execute(
            _sql["model_versions_page"], {"model": model, "after": after, "limit": limit}
        )
        return await cursor.fetchall()


async def set_version_state(conn: Connection, version: str, state: VersionState) -> bool:
    """Whether there is such a version."""
    values = {"version": version, "state": state}
    row = await (await conn.execute(_sql["set_version_state"], values)).fetchone()
    return row is not None


async def version_in_use(conn: Connection, version: str) -> bool:
    """Whether a public name leads to it."""
    row = await (await conn.execute(_sql["version_in_use"], {"version": version})).fetchone()
    return row is not None


async def create_deployment(conn: Connection, *, name: str, version: str, region: str) -> bool:
    """False when the name is taken."""
    values = {"name": name, "version": version, "region": region}
    row = await (await conn.execute(_sql["create_deployment"], values)).fetchone()
    return row is not None


async def deployment(conn: Connection, name: str) -> Deployment | None:
    """By its name."""
    async with conn.cursor(row_factory=struct_row(Deployment)) as cursor:
        await cursor.execute(_sql["deployment"], {"name": name})
        return await cursor.fetchone()


async def deployments_page(conn: Connection, *, after: str = "", limit: int) -> list[Deployment]:
    """In order of name, after `after`."""
    async with conn.cursor(row_factory=struct_row(Deployment)) as cursor:
        await cursor.execute(_sql["deployments_page"], {"after": after, "limit": limit})
        return await cursor.fetchall()


async def set_desired_state(conn: Connection, name: str, state: DesiredState) -> bool:
    """Whether there is such a deployment. Its replicas hear of it with their next beat."""
    values = {"name": name, "desired_state": state}
    row = await (await conn.execute(_sql["set_desired_state"], values)).fetchone()
    return row is not None


async def hold_deployment(conn: Connection, name: str) -> None:
    """Nobody else changes it until this transaction ends."""
    await conn.execute(_sql["hold_deployment"], {"name": name})


async def set_replicas_desired(conn: Connection, name: str, count: int | None) -> bool:
    """Whether there is such a deployment. None: nobody manages their number any more."""
    values = {"name": name, "replicas_desired": count}
    row = await (await conn.execute(_sql["set_replicas_desired"], values)).fetchone()
    return row is not None


async def set_replicas_warm(conn: Connection, name: str, count: int) -> None:
    """How many are to be kept asleep beside those that serve."""
    await conn.execute(_sql["set_replicas_warm"], {"name": name, "replicas_warm": count})


async def set_launching(
    conn: Connection, name: str, *, launcher: LauncherKind, spec: WorkerSpec
) -> None:
    """Who starts its replicas, and with what. Those that run go on as they were started."""
    values = {"name": name, "launcher": launcher, "spec": Jsonb(msgspec.to_builtins(spec))}
    await conn.execute(_sql["set_launching"], values)


async def put_route(
    conn: Connection, *, model: str, deployment: str, max_output_tokens: int
) -> int:
    """Lead everybody's name to a deployment. Returns the route's new version."""
    return await put_table(
        conn,
        RouteTable(
            model=model,
            targets=(Target(deployment=deployment),),
            max_output_tokens=max_output_tokens,
        ),
    )


async def put_table(conn: Connection, table: RouteTable) -> int:
    """Write it in the place of what stands there. Returns its new version.

    The caller has found no fault in it; an unknown deployment the database refuses.
    """
    version = await next_change(conn, "routing")
    place = {"tenant": table.tenant, "model": table.model}
    values = {
        **place,
        "alias": table.alias,
        "targets": Jsonb(msgspec.to_builtins(table.targets)),
        "fallbacks": Jsonb(msgspec.to_builtins(table.fallbacks)),
        "max_output_tokens": table.max_output_tokens,
        "version": version,
    }
    await conn.execute(_sql["put_route"], values)
    await conn.execute(_sql["clear_route_targets"], place)
    placed = list(placed_targets(table))
    lists = {
        "paths": [path for path, _ in placed],
        "deployments": [target.deployment for _, target in placed],
        "providers": [target.provider for _, target in placed],
    }
    await conn.execute(_sql["add_route_targets"], place | lists)
    return version


async def delete_route(conn: Connection, model: str, tenant: str = EVERYBODY) -> int | None:
    """The version of the deletion, or None when there was no such route."""
    version = await next_change(conn, "routing")
    place = {"tenant": tenant, "model": model}
    row = await (await conn.execute(_sql["delete_route"], place)).fetchone()
    return None if row is None else version


async def route(conn: Connection, model: str, tenant: str = EVERYBODY) -> RouteTable | None:
    """The table of exactly this name and tenant."""
    found = await _routes(conn, "route", {"tenant": tenant, "model": model})
    return found[0] if found else None


async def routes_page(
    conn: Connection, *, tenant: str = EVERYBODY, after: str = "", limit: int
) -> list[RouteTable]:
    """Everybody's, or those of one tenant: in order of public name, after `after`."""
    return await _routes(conn, "routes_page", {"tenant": tenant, "after": after, "limit": limit})


async def all_routes(conn: Connection) -> tuple[RouteTable, ...]:
    """Every table there is."""
    return tuple(await _routes(conn, "all_routes", None))


async def hold_routes(conn: Connection) -> int:
    """Whoever changes a route waits until this transaction ends: what is read then stands."""
    return await next_change(conn, "routing")


async def provider_in_use(conn: Connection, provider: str) -> bool:
    """Whether a table leads to it."""
    row = await (await conn.execute(_sql["provider_in_use"], {"provider": provider})).fetchone()
    return row is not None


async def put_access(conn: Connection, tenant: str, access: ModelAccess) -> None:
    """Allow these models alone. The caller touches the tenant or the key, which carry it."""
    values = {"tenant": tenant, "key": access.key, "models": list(access.models)}
    await conn.execute(_sql["put_access"], values)


async def delete_access(conn: Connection, tenant: str, key: str = "") -> bool:
    """Whether there was a list. The caller touches the tenant or the key."""
    values = {"tenant": tenant, "key": key}
    return await (await conn.execute(_sql["delete_access"], values)).fetchone() is not None


async def model_access(conn: Connection, tenant: str) -> list[ModelAccess]:
    """The tenant's own list first, if it has one, then those of its keys."""
    async with conn.cursor(row_factory=struct_row(ModelAccess)) as cursor:
        await cursor.execute(_sql["access"], {"tenant": tenant})
        return await cursor.fetchall()


async def _routes(
    conn: Connection, statement: str, values: Mapping[str, object] | None
) -> list[RouteTable]:
    async with conn.cursor(row_factory=struct_row(RouteTable)) as cursor:
        await cursor.execute(_sql[statement], values)
        return await cursor.fetchall()
