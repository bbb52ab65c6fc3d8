"""Routes: a public model name leads to a table of targets. One write moves all traffic.

The short form, `{"deployment": …}`, is a table of one target. Nothing is overwritten silently:
an answer holds what was replaced, and what is more than a short form is replaced only by who
names its version.
"""

from typing import Annotated

import msgspec
from litestar import Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.etags import NOTHING, require_match, tagged
from control_plane.api.names import ModelName
from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.api.tenants import required
from control_plane.auth import AnyRequest
from control_plane.route_writes import check_unmoved, leads, write_table
from control_plane.services import Services
from core.errors import Code, refuse
from core.route_table import (
    EVERYBODY,
    TOKENS_MAX,
    Fallback,
    RouteTable,
    Target,
    fault,
)
from store import registry
from store.audit_log import record
from store.postgres import Connection


class PutRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `deployment` alone, `targets` with `fallbacks`, or an `alias`: one of the three.

    `max_output_tokens` 0 leaves an answer's length to the target. `if_version` is what the
    caller believes to replace, 0 for nothing.
    """

    deployment: str = ""
    alias: str = ""
    targets: tuple[Target, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    max_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0
    if_version: Annotated[int, msgspec.Meta(ge=0)] | None = None


class RouteBody(msgspec.Struct, frozen=True, kw_only=True):
    """The table as it is now. `deployment` is said of one that is nothing but that."""

    model: str
    tenant: str
    deployment: str
    alias: str
    targets: tuple[Target, ...]
    fallbacks: tuple[Fallback, ...]
    max_output_tokens: int
    version: int
    created_ms: int


class WrittenRoute(RouteBody, frozen=True, kw_only=True):
    """And what it replaced, null for nothing."""

    replaced: RouteBody | None


class DeletedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the change that removed it."""

    model: str
    version: int


class RouteList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of public name; `after` asks for the next ones, null at the end."""

    routes: list[RouteBody]
    after: str | None


@put("/routes/{model:path}")
async def put_route(
    request: AnyRequest,
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    *,
    model: FromPath[str],
    data: JSONBody[PutRoute],
    tenant: Filter = EVERYBODY,
) -> Response[WrittenRoute]:
    """404 for what it leads to and is not there, 409 for what would be overwritten unseen.

    409 also while a rollout moves the name.

    Served once the model has a price in force.
    """
    table = _table(_public_name(model), tenant, data)
    async with services.postgres.transaction() as conn:
        await registry.hold_routes(conn)
        await _check_tenant(conn, tenant)
        before = await registry.route(conn, table.model, tenant)
        require_match(request, _version(before))
        _check_replaced(before, data.if_version, plain=table.is_plain)
        await check_unmoved(conn, table.model, tenant)
        version = await write_table(
            conn, table, before=before, actor=actor, short=bool(data.deployment)
        )
        written = await registry.route(conn, table.model, tenant)
    assert written is not None
    await services.announcer.route(table.model, version)
    replaced = None if before is None else _body(before)
    answer = WrittenRoute(**msgspec.structs.asdict(_body(written)), replaced=replaced)
    return tagged(answer, _version(written))


@get("/routes")
async def list_routes(
    services: NamedDependency[Services],
    after: After = "",
    limit: Limit = ROWS,
    tenant: Filter = EVERYBODY,
) -> RouteList:
    """Everybody's, or a tenant's own; priced or not."""
    async with services.postgres.connection() as conn:
        await _check_tenant(conn, tenant)
        tables = await registry.routes_page(conn, tenant=tenant, after=after, limit=limit)
    last = tables[-1].model if len(tables) == limit else None
    return RouteList(routes=[_body(table) for table in tables], after=last)


@get("/routes/{model:path}")
async def read_route(
    services: NamedDependency[Services], model: FromPath[str], tenant: Filter = EVERYBODY
) -> Response[RouteBody]:
    """404 where there is none of exactly this name and tenant."""
    public = _public_name(model)
    async with services.postgres.connection() as conn:
        table = await registry.route(conn, public, tenant)
    if table is None:
        raise refuse(Code.NOT_FOUND, f"there is no route {public!r}")
    return tagged(_body(table), _version(table))


@delete("/routes/{model:path}", status_code=200)
async def delete_route(
    request: AnyRequest,
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    model: FromPath[str],
    tenant: Filter = EVERYBODY,
) -> DeletedRoute:
    """What runs goes on; nothing new is routed there.

    409 while an alias leads to it, or a rollout moves it.
    """
    public = _public_name(model)
    async with services.postgres.transaction() as conn:
        await registry.hold_routes(conn)
        require_match(request, _version(await registry.route(conn, public, tenant)))
        version = await registry.delete_route(conn, public, tenant)
        if version is None:
            raise refuse(Code.NOT_FOUND, f"there is no route {public!r}")
        await check_unmoved(conn, public, tenant)
        left = await registry.all_routes(conn)
        for table in left:
            if table.alias == public and not leads(left, table):
                message = f"the alias {table.model!r} leads to {public!r}"
                raise refuse(Code.CONFLICT, message, param="model")
        detail = {"tenant": tenant}
        await record(conn, actor=actor, action="route.delete", subject=public, detail=detail)
    await services.announcer.route(public, version)
    return DeletedRoute(model=public, version=version)


def _version(table: RouteTable | None) -> int:
    return NOTHING if table is None else table.version


def _table(public: str, tenant: str, data: PutRoute) -> RouteTable:
    """What is asked for, if it can be."""
    if sum(map(bool, (data.deployment, data.alias, data.targets))) != 1:
        message = "a route is a deployment, a table of targets, or an alias"
        raise refuse(Code.UNPROCESSABLE, message, param="deployment")
    if data.deployment and data.fallbacks:
        message = "a route with fallbacks says its targets"
        raise refuse(Code.UNPROCESSABLE, message, param="fallbacks")
    short = (Target(deployment=data.deployment),) if data.deployment else ()
    table = RouteTable(
        model=public,
        tenant=tenant,
        alias=data.alias,
        targets=short or data.targets,
        fallbacks=data.fallbacks,
        max_output_tokens=data.max_output_tokens,
    )
    found = fault(table)
    if found is not None:
        raise refuse(Code.UNPROCESSABLE, found.message, param=found.param)
    return table


def _check_replaced(before: RouteTable | None, if_version: int | None, *, plain: bool) -> None:
    """Two operators, or two scripts, do not overwrite each other's tables unseen."""
    standing = 0 if before is None else before.version
    if if_version is None:
        if before is None or (plain and before.is_plain):
            return
        message = f"a table of version {standing} stands there: say so with if_version"
    elif if_version == standing:
        return
    else:
        message = f"what stands there is of version {standing}"
    raise refuse(Code.CONFLICT, message, param="if_version")


async def _check_tenant(conn: Connection, tenant: str) -> None:
    if tenant != EVERYBODY:
        await required(conn, tenant)


def _body(table: RouteTable) -> RouteBody:
    return RouteBody(
        model=table.model,
        tenant=table.tenant,
        deployment=table.targets[0].deployment if table.is_plain else "",
        alias=table.alias,
        targets=table.targets,
        fallbacks=table.fallbacks,
        max_output_tokens=table.max_output_tokens,
        version=table.version,
        created_ms=table.created_ms,
    )


def _public_name(path: str) -> str:
    # Names may hold slashes, as in `org/model`; the router hands over a path with one in front.
    name = path.removeprefix("/")
    try:
        return msgspec.convert(name, ModelName)
    except msgspec.ValidationError as error:
        raise refuse(Code.UNPROCESSABLE, f"model: {error}", param="model") from error
