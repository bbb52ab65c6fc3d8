"""Deployments: one model version in one region, under the name workers are started with.

How many replicas it has is written here, by a person or by the scaler, and made true by
`control_plane.launchers`.
"""

from typing import Annotated

import msgspec
from litestar import get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.names import DeploymentName, RegionName
from control_plane.api.paging import ROWS, After, Limit
from control_plane.errors import ExistsError
from control_plane.services import Services
from core.errors import Code, refuse
from core.worker_spec import LauncherKind, WorkerSpec
from store import fleet, launches, registry, scaling
from store.audit_log import record
from store.postgres import Connection
from store.registry import Deployment, DesiredState, VersionState

REPLICAS_MAX = 1000
DEPLOYMENT_DRAINS = "its deployment drains"

Replicas = Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]


class CreateDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment keeps its version for life: another version is another deployment."""

    name: DeploymentName
    version: str
    region: RegionName
    replicas_desired: Replicas | None = None
    launcher: LauncherKind = LauncherKind.EXTERNAL
    spec: WorkerSpec = WorkerSpec()


class PatchDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`draining` lets replicas finish what runs; they hear of it with their next beat.

    What is left out stays. `replicas_desired` null: nobody manages their number. `spec` is
    replaced whole, and concerns replicas that are started from now on.
    """

    desired_state: DesiredState | msgspec.UnsetType = msgspec.UNSET
    replicas_desired: Replicas | msgspec.UnsetType | None = msgspec.UNSET
    launcher: LauncherKind | msgspec.UnsetType = msgspec.UNSET
    spec: WorkerSpec | msgspec.UnsetType = msgspec.UNSET


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
        await registry.set_launching(conn, data.name, launcher=data.launcher, spec=data.spec)
        await registry.set_replicas_desired(conn, data.name, data.replicas_desired)
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
    """Gateways place nothing more on a draining deployment from their next view on.

    409 for another launcher while replicas run that the present one has started, and for a count
    where a scaling policy says it.
    """
    detail = msgspec.to_builtins(data)
    if not detail:
        raise refuse(Code.UNPROCESSABLE, "nothing is asked to change")
    async with services.postgres.transaction() as conn:
        await registry.hold_deployment(conn, name)  # what is left out stays, whoever else writes
        before = await _found(conn, name)
        await _change(conn, before, data)
        action = "deployment.state" if set(detail) == {"desired_state"} else "deployment.change"
        await record(conn, actor=actor, action=action, subject=name, detail=detail)
        return await _found(conn, name)


async def _change(conn: Connection, before: Deployment, data: PatchDeployment) -> None:
    name = before.name
    if isinstance(data.desired_state, DesiredState):
        await registry.set_desired_state(conn, name, data.desired_state)
        if data.desired_state is DesiredState.RUNNING:
            await fleet.undo_drains(conn, name, reason=DEPLOYMENT_DRAINS)
    if not isinstance(data.replicas_desired, msgspec.UnsetType):
        await _check_ungoverned(conn, before, data.replicas_desired)
        await registry.set_replicas_desired(conn, name, data.replicas_desired)
    launcher = before.launcher if isinstance(data.launcher, msgspec.UnsetType) else data.launcher
    if launcher is not before.launcher and await launches.any_of(conn, name):
        message = f"replicas run that the {before.launcher} launcher has started: stop them first"
        raise refuse(Code.CONFLICT, message, param="launcher")
    spec = before.spec if isinstance(data.spec, msgspec.UnsetType) else data.spec
    await registry.set_launching(conn, name, launcher=launcher, spec=spec)


async def _check_ungoverned(conn: Connection, before: Deployment, count: int | None) -> None:
    """The scaler would undo it within seconds, and nobody would know why."""
    if count == before.replicas_desired:
        return
    policy = await scaling.governing(conn, before.name)
    if policy is not None:
        message = f"the scaling policy {policy} says how many: change that, or delete it first"
        raise refuse(Code.CONFLICT, message, param="replicas_desired")


async def _found(conn: Connection, name: str) -> Deployment:
    found = await registry.deployment(conn, name)
    if found is None:
        raise refuse(Code.NOT_FOUND, f"there is no deployment {name!r}")
    return found
