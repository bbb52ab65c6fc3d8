"""Sessions of users who signed in: by a digest of a secret, within an idle and a last bound.

Whatever ends a user's right to be in (disabled, another password, other roles) deletes their
sessions in its own transaction, so that no control plane lets one in afterwards.
"""

from typing import Literal

import msgspec

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

FORGET_MAX = 1000
USER_AGENT_MAX = 200

Method = Literal["password", "oidc"]

_sql = load("sessions")


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """`life_ms` is its absolute bound; the idle one is asked at each look."""

    digest: bytes
    id: str
    user_id: str
    method: Method
    address: str
    user_agent: str
    life_ms: int


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is alive, and its user as they are now."""

    id: str
    user_id: str
    email: str
    name: str
    roles: tuple[str, ...]
    stale: bool


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session for people."""

    id: str
    user_id: str
    email: str
    method: Method
    address: str
    user_agent: str
    created_ms: int
    seen_ms: int
    expires_ms: int


async def open_session(conn: Connection, new: NewSession, *, keep: int) -> None:
    """Of a user's sessions the `keep` newest go on."""
    values = msgspec.structs.asdict(new) | {
        "life_s": new.life_ms / 1000,
        "user_agent": new.user_agent[:USER_AGENT_MAX],
    }
    await conn.execute(_sql["open_session"], values)
    await conn.execute(_sql["trim_sessions"], {"user_id": new.user_id, "keep": keep})


async def session_by_digest(
    conn: Connection, digest: bytes, *, idle_ms: int, touch_ms: int
) -> OpenSession | None:
    """None for one that is unknown, over, idle for too long, or of a disabled user."""
    values = {"digest": digest, "idle_s": idle_ms / 1000, "touch_s": touch_ms / 1000}
    async with conn.cursor(row_factory=struct_row(OpenSession)) as cursor:
        await cursor.execute(_sql["session_by_digest"], values)
        return await cursor.fetchone()


async def touch_session(conn: Connection, digest: bytes) -> None:
    """It was just used."""
    await conn.execute(_sql["touch_session"], {"digest": digest})


async def sessions_page(
    conn: Connection, *, user_id: str = "", idle_ms: int, after: str = "", limit: int
) -> list[SessionRow]:
    """Those that are alive, in order of id; one user's where that is given."""
    values = {"user_id": user_id, "idle_s": idle_ms / 1000, "after": after, "limit": limit}
    async with conn.cursor(row_factory=struct_row(SessionRow)) as cursor:
        await cursor.execute(_sql["sessions_page"], values)
        return await cursor.fetchall()


async def end_session(conn: Connection, session_id: str, *, user_id: str = "") -> str | None:
    """Whose it was; None for no such session, or none of `user_id` where that is given."""
    values = {"id": session_id, "user_id": user_id}
    row = await (await conn.execute(_sql["end_session"], values)).fetchone()
    return None if row is None else str(row[0])


async def end_session_by_digest(conn: Connection, digest: bytes) -> str | None:
    """As `end_session`, for whoever shows it."""
    row = await (await conn.execute(_sql["end_session_by_digest"], {"digest": digest})).fetchone()
    return None if row is None else str(row[0])


async def end_sessions(conn: Connection, user_id: str) -> int:
    """All of a user's; how many ended."""
    return (await conn.execute(_sql["end_sessions"], {"user_id": user_id})).rowcount


async def forget(conn: Connection, *, idle_ms: int) -> int:
    """Delete what is over, a bounded number at a time: sessions, and old invitations."""
    values = {"idle_s": idle_ms / 1000, "limit": FORGET_MAX}
    gone = (await conn.execute(_sql["forget_sessions"], values)).rowcount
    return gone + (await conn.execute(_sql["forget_invitations"])).rowcount
