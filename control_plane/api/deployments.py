"""Deployments: one model version in one region, under the name workers are started with."""

import msgspec
from litestar import get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.names import DeploymentName, RegionName
from control_plane.api.paging import ROWS, After, Limit
from control_plane.errors import ExistsError
from control_plane.services import Services
from core.errors import Code, refuse
from store import registry
from store.audit_log import record
from store.postgres import Connection
from store.registry import Deployment, DesiredState, VersionState


class CreateDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment keeps its version for life: another version is another deployment."""

    name: DeploymentName
    version: str
    region: RegionName


class PatchDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`draining` lets replicas finish what runs; they hear of it with their next beat."""

    desired_state: DesiredState


class DeploymentList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of name; `after` asks for the next ones, null at the end."""

    deployments: list[Deployment]
    after: str | None


@post("/deployments")
async def create_deployment(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    data: JSONBody[CreateDeployment],
) -> Deployment:
    """404 for an unknown version, 409 for one that is not ready, or for a name that is taken."""
    async with services.postgres.transaction() as conn:
        version = await registry.model_version(conn, data.version)
        if version is None:
            message = f"there is no model version {data.version!r}"
            raise refuse(Code.NOT_FOUND, message, param="version")
        if version.state != VersionState.READY:
            raise refuse(Code.CONFLICT, f"the version is {version.state}", param="version")
        if not await registry.create_deployment(
            conn, name=data.name, version=data.version, region=data.region
        ):
            raise ExistsError(
                f"a deployment named {data.name!r} exists", param="name", existing_id=data.name
            )
        detail = msgspec.to_builtins(data)
        await record(
            conn, actor=actor, action="deployment.create", subject=data.name, detail=detail
        )
        return await _found(conn, data.name)


@get("/deployments")
async def list_deployments(
    services: NamedDependency[Services], after: After = "", limit: Limit = ROWS
) -> DeploymentList:
    """All of them, in every region."""
    async with services.postgres.connection() as conn:
        rows = await registry.deployments_page(conn, after=after, limit=limit)
    return DeploymentList(deployments=rows, after=rows[-1].name if len(rows) == limit else None)


@get("/deployments/{name:str}")
async def read_deployment(services: NamedDependency[Services], name: FromPath[str]) -> Deployment:
    """404 for an unknown name."""
    async with services.postgres.connection() as conn:
        return await _found(conn, name)


@patch("/deployments/{name:str}")
async def patch_deployment(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[PatchDeployment],
) -> Deployment:
    """Gateways place nothing more on a draining deployment from their next view on."""
    async with services.postgres.transaction() as conn:
        await _found(conn, name)
        await registry.set_desired_state(conn, name, data.desired_state)
        detail = msgspec.to_builtins(data)
        await record(conn, actor=actor, action="deployment.state", subject=name, detail=detail)
        return await _found(conn, name)


async def _found(conn: Connection, name: str) -> Deployment:
    found = await registry.deployment(conn, name)
    if found is None:
        raise refuse(Code.NOT_FOUND, f"there is no deployment {name!r}")
    return found
