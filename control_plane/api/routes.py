"""Routes: a public model name leads to a deployment. One write moves all traffic."""

from typing import Annotated

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.names import ModelName
from control_plane.api.paging import ROWS, After, Limit
from control_plane.auth import ADMIN
from control_plane.services import Services
from core.errors import Code, refuse
from store import registry
from store.audit_log import record
from store.registry import RouteRow

OUTPUT_TOKENS_MAX = 2**31 - 1


class PutRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_output_tokens` 0 leaves an answer's length to the context alone."""

    deployment: str
    max_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=OUTPUT_TOKENS_MAX)] = 0


class RouteBody(msgspec.Struct, frozen=True, kw_only=True):
    """The route as it is now."""

    model: str
    deployment: str
    max_output_tokens: int
    version: int


class DeletedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the change that removed it."""

    model: str
    version: int


class RouteList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of public name; `after` asks for the next ones, null at the end."""

    routes: list[RouteRow]
    after: str | None


@put("/routes/{model:path}")
async def put_route(
    services: NamedDependency[Services], model: FromPath[str], data: JSONBody[PutRoute]
) -> RouteBody:
    """404 for an unknown deployment. Served once the model has a price in force."""
    public = _public_name(model)
    async with services.postgres.transaction() as conn:
        if await registry.deployment(conn, data.deployment) is None:
            message = f"there is no deployment {data.deployment!r}"
            raise refuse(Code.NOT_FOUND, message, param="deployment")
        version = await registry.put_route(
            conn,
            model=public,
            deployment=data.deployment,
            max_output_tokens=data.max_output_tokens,
        )
        detail = msgspec.to_builtins(data)
        await record(conn, actor=ADMIN, action="route.put", subject=public, detail=detail)
    await services.announcer.route(public, version)
    return RouteBody(
        model=public,
        deployment=data.deployment,
        max_output_tokens=data.max_output_tokens,
        version=version,
    )


@get("/routes")
async def list_routes(
    services: NamedDependency[Services], after: After = "", limit: Limit = ROWS
) -> RouteList:
    """All of them, priced or not."""
    async with services.postgres.connection() as conn:
        rows = await registry.routes_page(conn, after=after, limit=limit)
    return RouteList(routes=rows, after=rows[-1].model if len(rows) == limit else None)


@delete("/routes/{model:path}", status_code=200)
async def delete_route(services: NamedDependency[Services], model: FromPath[str]) -> DeletedRoute:
    """What runs goes on; nothing new is routed there."""
    public = _public_name(model)
    async with services.postgres.transaction() as conn:
        version = await registry.delete_route(conn, public)
        if version is None:
            raise refuse(Code.NOT_FOUND, f"there is no route {public!r}")
        await record(conn, actor=ADMIN, action="route.delete", subject=public, detail={})
    await services.announcer.route(public, version)
    return DeletedRoute(model=public, version=version)


def _public_name(path: str) -> str:
    # Names may hold slashes, as in `org/model`; the router hands over a path with one in front.
    name = path.removeprefix("/")
    try:
        return msgspec.convert(name, ModelName)
    except msgspec.ValidationError as error:
        raise refuse(Code.UNPROCESSABLE, f"model: {error}", param="model") from error
