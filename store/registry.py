"""Models, their immutable versions, deployments, and the routes from public names to them.

Versions are named by the hash of their content; registering one twice is the same version.
The routing view for gateways is read elsewhere, in `store.routing_view`.
"""

from enum import StrEnum
from typing import Any

import msgspec
from psycopg.types.json import Jsonb

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


class RouteRow(msgspec.Struct, frozen=True, kw_only=True):
    """A public model name and where it leads. `max_output_tokens` 0 is up to the context."""

    model: str
    deployment: str
    max_output_tokens: int
    version: int
    created_ms: int


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


async def put_route(
    conn: Connection, *, model: str, deployment: str, max_output_tokens: int
) -> int:
    """Lead a public name to a deployment. Returns the route's new version."""
    version = await next_change(conn, "routing")
    values = {
        "model": model,
        "deployment": deployment,
        "max_output_tokens": max_output_tokens,
        "version": version,
    }
    await conn.execute(_sql["put_route"], values)
    return version


async def delete_route(conn: Connection, model: str) -> int | None:
    """The version of the deletion, or None when there was no such route."""
    version = await next_change(conn, "routing")
    row = await (await conn.execute(_sql["delete_route"], {"model": model})).fetchone()
    return None if row is None else version


async def routes_page(conn: Connection, *, after: str = "", limit: int) -> list[RouteRow]:
    """In order of public name, after `after`."""
    async with conn.cursor(row_factory=struct_row(RouteRow)) as cursor:
        await cursor.execute(_sql["routes_page"], {"after": after, "limit": limit})
        return await cursor.fetchall()
