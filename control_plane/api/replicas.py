"""Replicas as they last reported themselves, and the drain of one of them."""

from typing import Annotated

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.services import Services
from core.errors import Code, refuse
from store import fleet
from store.audit_log import record
from store.fleet import ReplicaRow
from store.postgres import Connection

DRAIN_MS_MAX = 86_400_000
REASON_CHARS_MAX = 200
BY_OPERATOR = "an operator drains it"

DrainMs = Annotated[int, msgspec.Meta(ge=0, le=DRAIN_MS_MAX)]
Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=REASON_CHARS_MAX)]


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of id; `after` asks for the next ones, null at the end."""

    replicas: list[ReplicaRow]
    after: str | None


class DrainReplica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`within_ms` null is `HEADWORKS_REPLICA_DRAIN_MS`."""

    within_ms: DrainMs | None = None
    reason: Reason = BY_OPERATOR


@get("/replicas")
async def list_replicas(
    services: NamedDependency[Services],
    deployment: Filter = "",
    after: After = "",
    limit: Limit = ROWS,
) -> ReplicaList:
    """Every region, and those stopped or lost in the last day."""
    async with services.postgres.connection() as conn:
        rows = await fleet.replicas_page(conn, deployment=deployment, after=after, limit=limit)
    return ReplicaList(replicas=rows, after=rows[-1].replica_id if len(rows) == limit else None)


@get("/replicas/{replica:str}")
async def read_replica(services: NamedDependency[Services], replica: FromPath[str]) -> ReplicaRow:
    """404 for an unknown id."""
    async with services.postgres.connection() as conn:
        return await _found(conn, replica)


@post("/replicas/{replica:str}/drain", status_code=200)
async def drain_replica(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    replica: FromPath[str],
    data: JSONBody[DrainReplica],
) -> ReplicaRow:
    """Gateways place nothing more on it; its worker finishes what runs, within the time, and ends.

    Asked again, the earlier deadline holds. 409 for one that has ended.
    """
    within_ms = data.within_ms
    if within_ms is None:
        within_ms = services.settings.replica_drain_ms
    async with services.postgres.transaction() as conn:
        found = await _found(conn, replica)
        if not await fleet.begin_drain(conn, replica, reason=data.reason, within_ms=within_ms):
            raise refuse(Code.CONFLICT, f"{replica} is {found.state}")
        detail = {"within_ms": within_ms, "reason": data.reason}
        await record(conn, actor=actor, action="replica.drain", subject=replica, detail=detail)
        return await _found(conn, replica)


@delete("/replicas/{replica:str}/drain", status_code=200)
async def undrain_replica(
    services: NamedDependency[Services], actor: NamedDependency[str], replica: FromPath[str]
) -> ReplicaRow:
    """Take it back before its worker has heard. 409 when it has, or there is no drain."""
    async with services.postgres.transaction() as conn:
        found = await _found(conn, replica)
        if not await fleet.undo_drain(conn, replica):
            why = f"is {found.state}" if found.drain_reason else "does not drain"
            raise refuse(Code.CONFLICT, f"{replica} {why}")
        await record(conn, actor=actor, action="replica.undrain", subject=replica, detail={})
        return await _found(conn, replica)


async def _found(conn: Connection, replica: str) -> ReplicaRow:
    found = await fleet.replica(conn, replica)
    if found is None:
        raise refuse(Code.NOT_FOUND, f"there is no replica {replica!r}")
    return found
