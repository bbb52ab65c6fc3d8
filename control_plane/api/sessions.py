"""Sessions: who is in, from where, since when; and putting them out."""

import msgspec
from litestar import delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from control_plane.access.caller import Caller
from control_plane.access.roles import Permission
from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.services import Services
from core.errors import Code, refuse
from store import sessions
from store.audit_log import record
from store.sessions import SessionRow


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """Those that are alive, in order of id; `after` asks for the next ones, null at the end."""

    sessions: list[SessionRow]
    after: str | None


class EndedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Whose it was."""

    id: str
    user_id: str


@get("/sessions")
async def list_sessions(
    services: NamedDependency[Services],
    caller: NamedDependency[Caller],
    user_id: Filter = "",
    after: After = "",
    limit: Limit = ROWS,
) -> SessionList:
    """One's own; everybody's, or those of `user_id`, for who may read users."""
    if not caller.may(Permission.USERS_READ):
        user_id = caller.user_id or ""
    idle_ms = services.settings.session_idle_ms
    async with services.postgres.connection() as conn:
        rows = await sessions.sessions_page(
            conn, user_id=user_id, idle_ms=idle_ms, after=after, limit=limit
        )
    return SessionList(sessions=rows, after=rows[-1].id if len(rows) == limit else None)


@delete("/sessions/{session:str}", status_code=200)
async def end_session(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
    session: FromPath[str],
) -> EndedSession:
    """Over at once. One's own; anybody's for who may change users."""
    owner = "" if caller.may(Permission.USERS_WRITE) else caller.user_id or ""
    async with services.postgres.transaction() as conn:
        user_id = await sessions.end_session(conn, session, user_id=owner)
        if user_id is None:
            raise refuse(Code.NOT_FOUND, f"there is no session {session!r}")
        detail = {"user": user_id}
        await record(conn, actor=actor, action="session.end", subject=session, detail=detail)
    return EndedSession(id=session, user_id=user_id)
