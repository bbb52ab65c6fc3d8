"""Differences between records of one thing, as the reconciler has found them."""

from typing import Annotated

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from control_plane.api.paging import ROWS, Limit
from control_plane.services import Services
from core.errors import Code, refuse
from core.reconcile import Kind
from store import differences
from store.audit_log import record
from store.differences import FROM_NEWEST, Difference

NOTE_CHARACTERS_MAX = 1_000

Before = Annotated[int, QueryParameter(ge=0, le=FROM_NEWEST)]


class DifferenceList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first; `before` asks for older ones, null at the end."""

    differences: list[Difference]
    before: int | None


class CloseDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`note`: what was done about it."""

    note: Annotated[str, msgspec.Meta(min_length=1, max_length=NOTE_CHARACTERS_MAX)]


class CloseKind(CloseDifference, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`upto`: the newest id that was seen; what came since stays open."""

    kind: Kind
    upto: Annotated[int, msgspec.Meta(ge=1, le=FROM_NEWEST)]


class ClosedKind(msgspec.Struct, frozen=True, kw_only=True):
    """How many; at most 10,000 at a time."""

    closed: int


class ClosedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """It is not told again unless it grows."""

    id: int
    kind: Kind
    subject: str


@get("/reconciliation")
async def list_differences(
    services: NamedDependency[Services],
    kind: FromQuery[Kind | None] = None,
    *,
    open: FromQuery[bool] = True,  # noqa: A002 - the query's own word
    before: Before = FROM_NEWEST,
    limit: Limit = ROWS,
) -> DifferenceList:
    """What is open, or everything that was told of and is still kept, of one kind or of all."""
    async with services.postgres.connection() as conn:
        rows = await differences.page(
            conn, kind=kind or "", is_open=open, before=before, limit=limit
        )
    return DifferenceList(differences=rows, before=rows[-1].id if len(rows) == limit else None)


@post("/reconciliation/{difference:int}/close", status_code=200)
async def close_difference(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    difference: FromPath[int],
    data: JSONBody[CloseDifference],
) -> ClosedDifference:
    """404 for one that is not open."""
    async with services.postgres.transaction() as conn:
        closed = await differences.close(conn, difference, data.note)
        if closed is None:
            raise refuse(Code.NOT_FOUND, f"there is no open difference {difference}")
        detail = {"kind": closed.kind, "subject": closed.subject, "note": data.note}
        await record(
            conn, actor=actor, action="difference.close", subject=str(difference), detail=detail
        )
    return ClosedDifference(id=difference, kind=closed.kind, subject=closed.subject)


@post("/reconciliation/close", status_code=200)
async def close_kind(
    services: NamedDependency[Services], actor: NamedDependency[str], data: JSONBody[CloseKind]
) -> ClosedKind:
    """All of one kind, as when a lost disk has left thousands."""
    async with services.postgres.transaction() as conn:
        count = await differences.close_kind(conn, data.kind, data.upto, data.note)
        detail = msgspec.to_builtins(data) | {"closed": count}
        await record(conn, actor=actor, action="difference.close", subject=data.kind, detail=detail)
    return ClosedKind(closed=count)
