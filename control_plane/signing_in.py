"""Signing in: what every way of it has in common, and the way by password.

A refusal says the same whatever was wrong, and takes the same work. Each sign-in has a session
with an id of its own: whatever the browser showed before is over.
"""

import secrets

import msgspec
from litestar.datastructures import Cookie

from control_plane.access.caller import Caller, user_permissions
from control_plane.access.credentials import (
    ID_BYTES,
    SECRET_BYTES,
    Kind,
    an_id,
    csrf_token,
    digest,
    mint,
)
from control_plane.access.gate import Attempt
from control_plane.auth import COOKIE, AnyRequest
from control_plane.services import Services
from core.errors import Code, refuse
from store import sessions, users
from store.audit_log import record
from store.postgres import Connection
from store.sessions import Method, NewSession
from store.users import User

ANYBODY = "anonymous"  # the actor of what nobody has proved to be
NOBODY = "unknown"  # the subject where no user is meant; what was typed may be a password
WRONG = "the email or the password is wrong, or this user may not sign in"


class SignedIn(msgspec.Struct, frozen=True, kw_only=True):
    """Who is in, and the cookie that says so."""

    user: User
    caller: Caller
    cookie: Cookie


def address_of(request: AnyRequest) -> str:
    """Where the request came from; behind a proxy, what a trusted one says."""
    return "" if request.client is None else request.client.host


def email_of(text: str) -> str:
    """As it is stored."""
    return text.strip().lower()


async def by_password(
    services: Services, request: AnyRequest, *, email: str, password: str
) -> SignedIn:
    """Raises RefusedError: 401 for a wrong pair, 429 for too many of them, 503 for a crowd."""
    doors, address, email = services.doors, address_of(request), email_of(email)
    async with services.postgres.connection() as conn:
        user_id = await users.user_id_by_email(conn, email)
    attempt = await doors.gate.enter(
        doors.gate.names(user_id=user_id, email=email, address=address)
    )
    # Behind the gate, and asked for nobody too: how long it takes tells nothing of an email.
    async with services.postgres.connection() as conn:
        user = await users.user_by_id(conn, user_id or NOBODY)
    hashed = None if user is None else user.password
    async with doors.gate.excused(attempt):
        is_right = await doors.hasher.matches(hashed, password)
    if user is None or hashed is None or not is_right or user.disabled:
        await refused(services, attempt, user, _reason(user, is_right=is_right), address=address)
        raise refuse(Code.INVALID_KEY, WRONG)
    if doors.hasher.is_outdated(hashed):
        async with doors.gate.excused(attempt):
            again = await doors.hasher.hash(password)
        async with services.postgres.transaction() as conn:
            await users.rehash(conn, user.id, before=hashed, password=again)
            hashed = again
    async with services.postgres.transaction() as conn:
        now = await users.user_for_change(conn, user.id)
        if now is None or now.disabled or now.password != hashed:
            raise refuse(Code.INVALID_KEY, WRONG)  # it changed while we looked
        return await let_in(conn, services, request, now, method="password", attempt=attempt)


async def let_in(
    conn: Connection,
    services: Services,
    request: AnyRequest,
    user: User,
    *,
    method: Method,
    attempt: Attempt | None,
) -> SignedIn:
    """A new session for a user who has proved to be one. `user` is read for change."""
    doors, settings, address = services.doors, services.settings, address_of(request)
    if attempt is not None:
        await doors.gate.forgive(conn, attempt)
    await end_shown(conn, services, request)
    text = mint(Kind.SESSION, secrets.token_bytes(SECRET_BYTES))
    session_id = an_id("ses", secrets.token_bytes(ID_BYTES))
    new = NewSession(
        digest=digest(doors.pepper, Kind.SESSION, text),
        id=session_id,
        user_id=user.id,
        method=method,
        address=address,
        user_agent=request.headers.get("user-agent", ""),
        life_ms=settings.session_life_ms,
    )
    await sessions.open_session(conn, new, keep=settings.sessions_max)
    await users.signed_in(conn, user.id)
    detail = {"method": method, "address": address, "session": session_id}
    await record(conn, actor=user.email, action="sign_in", subject=user.id, detail=detail)
    caller = Caller(
        actor=user.email,
        kind="session",
        permissions=user_permissions(user.roles),
        user_id=user.id,
        credential_id=session_id,
        csrf=csrf_token(doors.pepper, text),
    )
    cookie = session_cookie(text, life_ms=settings.session_life_ms)
    return SignedIn(user=user, caller=caller, cookie=cookie)


async def end_shown(conn: Connection, services: Services, request: AnyRequest) -> None:
    """End the session that the request shows, if it shows one."""
    shown = request.cookies.get(COOKIE, "")
    if shown:
        hashed = digest(services.doors.pepper, Kind.SESSION, shown)
        await sessions.end_session_by_digest(conn, hashed)


async def refused(
    services: Services, attempt: Attempt, user: User | None, reason: str, *, address: str
) -> None:
    """Into the audit log: that somebody was not let in, and why; never what they typed."""
    services.metrics.sign_ins.labels("refused").inc()
    detail = {"reason": reason, "address": address, "locked_ms": attempt.locked_ms}
    subject = NOBODY if user is None else user.id
    async with services.postgres.transaction() as conn:
        await record(conn, actor=ANYBODY, action="sign_in.refused", subject=subject, detail=detail)


def session_cookie(text: str, *, life_ms: int) -> Cookie:
    """`__Host-`: for this host alone, over TLS, and out of reach of scripts.

    Lax, for a browser that comes back from an identity provider to show it.
    """
    return Cookie(
        key=COOKIE,
        value=text,
        max_age=life_ms // 1000,
        path="/",
        secure=True,
        httponly=True,
        samesite="lax",
    )


def _reason(user: User | None, *, is_right: bool) -> str:
    if user is None:
        return "no such user"
    if user.password is None:
        return "no password"
    return "disabled" if is_right else "password"
