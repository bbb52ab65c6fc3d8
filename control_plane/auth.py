"""Who may call: operators by whatever they show, our own processes with internal tokens.

    Authorization: Bearer …  the break-glass token, or an API token
    Cookie: __Host-headworks a session, with proof for unsafe methods that a page of ours asks

Not tenants: their keys open the gateway only. What a caller may do is decided by the table in
`control_plane.access.roles`, before the body or the path of the call is looked at.
"""

import hmac
import time
from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from control_plane.access import origins, roles
from control_plane.access.caller import ADMIN, Caller, token_scope, user_permissions
from control_plane.access.credentials import Kind, csrf_token, digest
from control_plane.doors import SEEN_EVERY_MS
from control_plane.services import Services
from core import internal_token
from core.errors import Code, refuse
from store import admin_tokens, sessions

AUDIENCE = "control-plane"
COOKIE = "__Host-headworks"
CSRF_HEADER = "x-csrf-token"
RENEWAL_HEADER = "hx-request"  # of a page that renews itself, which is nobody's use of it

Connection = ASGIConnection[Any, Any, Any, Any]
AnyRequest = Request[Any, Any, Any]


def admin_guard(break_glass: str) -> Guard:
    """Lets in who may make this call: 401 for nobody we know, 403 for somebody who may not."""
    expected = break_glass.encode()

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        caller = await _identify(connection, expected)
        permission = roles.needed(_method(connection), connection.scope["path_template"])
        if permission is None:
            raise refuse(Code.FORBIDDEN, "nobody has been given this call: it is closed")
        if not caller.may(permission):
            raise refuse(Code.FORBIDDEN, f"this needs the permission {permission.value!r}")
        connection.state.caller = caller

    return guard


def caller(request: AnyRequest) -> Caller:
    """Who makes this call; of a guarded one."""
    found: Caller = request.state.caller
    return found


def actor(request: AnyRequest) -> str:
    """Whom the audit log names for a change made by this request."""
    return caller(request).actor


def fleet_guard(secret: bytes) -> Guard:
    """Lets in a live internal token for this audience; refuses everything else with 401."""

    def guard(connection: Connection, _: BaseRouteHandler) -> None:
        now_ms = time.time_ns() // 1_000_000
        token = bearer(connection)
        if internal_token.verify(secret, token, audience=AUDIENCE, now_ms=now_ms) is None:
            raise refuse(Code.INVALID_KEY, f"this needs an internal token for {AUDIENCE}")

    return guard


def bearer(connection: Connection) -> str:
    """The bearer token, or "" where there is none."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def require_our_page(connection: Connection, public_url: str) -> None:
    """Raises RefusedError where a browser says that another site's page asks."""
    fault = origins.fault(
        origin=connection.headers.get("origin"),
        fetch_site=connection.headers.get("sec-fetch-site"),
        host=connection.headers.get("host", ""),
        public_url=public_url,
    )
    if fault is not None:
        raise refuse(Code.FORBIDDEN, fault)


def require_proof(connection: Connection, csrf: str, public_url: str) -> None:
    """Raises RefusedError for a session's request that no page of ours says it makes.

    A cookie travels with any page's request; what a page of ours says does not.
    """
    require_our_page(connection, public_url)
    if not {"origin", "sec-fetch-site"} & set(connection.headers):
        raise refuse(Code.FORBIDDEN, "a session needs Origin or Sec-Fetch-Site beside it")
    said = connection.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(said.encode(), csrf.encode()):
        message = f"a session needs its CSRF token in {CSRF_HEADER}; GET /admin/me tells it"
        raise refuse(Code.FORBIDDEN, message)


def _method(connection: Connection) -> str:
    return str(connection.scope.get("method", ""))


async def _identify(connection: Connection, break_glass: bytes) -> Caller:
    """What is shown as a bearer token goes before a cookie, and is not made good by one."""
    if "authorization" in connection.headers:
        token = bearer(connection)
        if hmac.compare_digest(token.encode(), break_glass):
            return ADMIN  # works while Postgres is away
        found = await _by_token(connection.app.state.services, token)
    else:
        found = await _by_session(connection, connection.cookies.get(COOKIE, ""))
    if found is None:
        message = "this needs the admin token or an API token as a bearer token, or a session"
        raise refuse(Code.INVALID_KEY, message)
    return found


async def _by_token(services: Services, text: str) -> Caller | None:
    if not text.startswith(Kind.TOKEN):
        return None
    hashed = digest(services.doors.pepper, Kind.TOKEN, text)
    async with services.postgres.connection() as conn:
        token = await admin_tokens.token_by_digest(conn, hashed, touch_ms=SEEN_EVERY_MS)
    if token is None:
        return None
    if token.stale:
        async with services.postgres.transaction() as conn:
            await admin_tokens.touch_token(conn, token.id)
    owner = ADMIN.permissions if token.owner_roles is None else user_permissions(token.owner_roles)
    return Caller(
        actor=f"token:{token.name}/{token.id}",
        kind="token",
        permissions=roles.token_permissions(token_scope(token.permissions), owner),
        user_id=token.user_id,
        credential_id=token.id,
    )


async def _by_session(connection: Connection, text: str) -> Caller | None:
    services: Services = connection.app.state.services
    if not text.startswith(Kind.SESSION):
        return None
    hashed = digest(services.doors.pepper, Kind.SESSION, text)
    async with services.postgres.connection() as conn:
        session = await sessions.session_by_digest(
            conn, hashed, idle_ms=services.settings.session_idle_ms, touch_ms=SEEN_EVERY_MS
        )
    if session is None:
        return None
    csrf = csrf_token(services.doors.pepper, text)
    if _method(connection) not in origins.SAFE_METHODS:
        require_proof(connection, csrf, services.settings.public_url)
    if session.stale and RENEWAL_HEADER not in connection.headers:
        async with services.postgres.transaction() as conn:
            await sessions.touch_session(conn, hashed)
    return Caller(
        actor=session.email,
        kind="session",
        permissions=user_permissions(session.roles),
        user_id=session.user_id,
        credential_id=session.id,
        csrf=csrf,
    )
