"""Model versions: registered under the hash of their content, listed, read, retired.

The hash is computed again here, so that a version cannot claim to be what it is not.
"""

import msgspec
from litestar import get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from litestar.response import Response

from artifacts.manifest import Manifest, contents_of, version_hash
from control_plane.api.names import ModelName
from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.services import Services
from core.errors import Code, RefusedError, refuse
from store import registry, rollouts
from store.audit_log import record
from store.postgres import Connection
from store.registry import ModelVersion, VersionState

TOKENS_MAX = 2**31 - 1


class RegisterModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`staged` keeps a version out of deployments until it is made `ready`."""

    manifest: Manifest
    state: VersionState = VersionState.READY


class PatchModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing else about a version can change."""

    state: VersionState


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of version; `after` asks for the next ones, null at the end."""

    models: list[ModelVersion]
    after: str | None


@post("/models")
async def register_model(
    services: NamedDependency[Services], actor: NamedDependency[str], data: JSONBody[RegisterModel]
) -> Response[ModelVersion]:
    """201; 200 when this very content is registered, under whatever name; 409 for a new family."""
    manifest = data.manifest
    check_manifest(manifest)
    async with services.postgres.transaction() as conn:
        known = await registry.model_version(conn, manifest.version)
        if known is not None:
            return Response(known, status_code=200)
        version = await _register(conn, manifest, data.state, actor=actor)
    return Response(version, status_code=201)


@get("/models")
async def list_models(
    services: NamedDependency[Services], model: Filter = "", after: After = "", limit: Limit = ROWS
) -> ModelList:
    """All versions, or those of one model."""
    async with services.postgres.connection() as conn:
        rows = await registry.model_versions_page(conn, model=model, after=after, limit=limit)
    return ModelList(models=rows, after=rows[-1].version if len(rows) == limit else None)


@get("/models/{version:str}")
async def read_model(services: NamedDependency[Services], version: FromPath[str]) -> ModelVersion:
    """404 for an unknown hash."""
    async with services.postgres.connection() as conn:
        return await _found(conn, version)


@patch("/models/{version:str}")
async def patch_model(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    version: FromPath[str],
    data: JSONBody[PatchModel],
) -> ModelVersion:
    """409 for retiring a version that a public name still leads to, or a rollout needs."""
    async with services.postgres.transaction() as conn:
        # Nobody leads a name to it meanwhile, by hand or by a rollout that begins.
        await registry.hold_routes(conn)
        await _found(conn, version)
        if data.state != VersionState.READY and await registry.version_in_use(conn, version):
            raise refuse(Code.CONFLICT, f"a route leads to version {version}", param="state")
        if data.state != VersionState.READY:
            await _check_not_rolled_out(conn, version)
        await registry.set_version_state(conn, version, data.state)
        detail = {"state": data.state}
        await record(conn, actor=actor, action="model.state", subject=version, detail=detail)
        return await _found(conn, version)


def check_manifest(manifest: Manifest) -> None:
    """Raises RefusedError when the manifest is not of the content it names."""
    try:
        msgspec.convert(manifest.name, ModelName)
    except msgspec.ValidationError as error:
        raise _unsound(f"name: {error}", "manifest.name") from error
    if not 0 < manifest.context_tokens <= TOKENS_MAX:
        raise _unsound("a context has at least one token", "manifest.context_tokens")
    if not manifest.files:
        raise _unsound("a version has files", "manifest.files")
    expected = version_hash(contents_of(manifest))
    if manifest.version != expected:
        raise _unsound(f"this content has the hash {expected}", "manifest.version")


def _unsound(message: str, param: str) -> RefusedError:
    return refuse(Code.UNPROCESSABLE, message, param=param)


async def _register(
    conn: Connection, manifest: Manifest, state: VersionState, *, actor: str
) -> ModelVersion:
    family = await registry.model_family(conn, manifest.name)
    if family is not None and family != manifest.family:
        message = f"model {manifest.name!r} is of family {family!r}"
        raise refuse(Code.CONFLICT, message, param="manifest.family")
    await registry.register_version(
        conn,
        version=manifest.version,
        model=manifest.name,
        family=manifest.family,
        context_tokens=manifest.context_tokens,
        state=state,
        manifest=msgspec.to_builtins(manifest),
    )
    detail = {"model": manifest.name, "source": manifest.source, "state": state}
    await record(
        conn, actor=actor, action="model.register", subject=manifest.version, detail=detail
    )
    return await _found(conn, manifest.version)


async def _check_not_rolled_out(conn: Connection, version: str) -> None:
    rollout = await rollouts.needing_version(conn, version)
    if rollout is not None:
        message = f"the rollout {rollout!r} needs version {version}"
        raise refuse(Code.CONFLICT, message, param="state")


async def _found(conn: Connection, version: str) -> ModelVersion:
    found = await registry.model_version(conn, version)
    if found is None:
        raise refuse(Code.NOT_FOUND, f"there is no model version {version!r}")
    return found
