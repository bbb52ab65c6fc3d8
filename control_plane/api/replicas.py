"""Replicas as they last reported themselves."""

import msgspec
from litestar import get
from litestar.di import NamedDependency

from control_plane.api.paging import ROWS, After, Limit
from control_plane.services import Services
from store import fleet
from store.fleet import ReplicaRow


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of id; `after` asks for the next ones, null at the end."""

    replicas: list[ReplicaRow]
    after: str | None


@get("/replicas")
async def list_replicas(
    services: NamedDependency[Services], after: After = "", limit: Limit = ROWS
) -> ReplicaList:
    """Every region, and those stopped or lost in the last day."""
    async with services.postgres.connection() as conn:
        rows = await fleet.replicas_page(conn, after=after, limit=limit)
    return ReplicaList(replicas=rows, after=rows[-1].replica_id if len(rows) == limit else None)
