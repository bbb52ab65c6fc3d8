"""Coming in and going out: by password, by invitation, and who one is.

`login` and `invitations/accept` are open to strangers, so both are counted by address before
they cost anything.
"""

from typing import Annotated

import msgspec
from litestar import Response, get, post
from litestar.datastructures import Cookie
from litestar.di import NamedDependency
from litestar.params import JSONBody

from control_plane.access.caller import Caller, CredentialKind
from control_plane.access.credentials import Kind, digest
from control_plane.access.passwords import LENGTH_MAX, weakness
from control_plane.api.user_bodies import UserBody, user_body
from control_plane.auth import COOKIE, AnyRequest, require_our_page
from control_plane.services import Services
from control_plane.signing_in import (
    WRONG,
    SignedIn,
    address_of,
    by_password,
    end_shown,
    let_in,
    refused,
)
from core.errors import Code, refuse
from store import sessions, users
from store.audit_log import record
from store.postgres import Connection
from store.users import User

Secret = Annotated[str, msgspec.Meta(min_length=1, max_length=4 * LENGTH_MAX)]
Email = Annotated[str, msgspec.Meta(min_length=1, max_length=254)]


class Login(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user knows."""

    email: Email
    password: Secret


class AcceptInvitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An invitation's text, and the password that its user wants."""

    invitation: Secret
    password: Secret


class ChangePassword(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both, so that a session left open is not enough to take somebody's place."""

    current: Secret
    password: Secret


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """How one may sign in here."""

    password: bool
    oidc: bool


class Me(msgspec.Struct, frozen=True, kw_only=True):
    """`user` is null for the admin token and for tokens that belong to nobody.

    `csrf` goes into `X-CSRF-Token` of every unsafe request with a session's cookie.
    """

    actor: str
    kind: CredentialKind
    credential_id: str | None
    permissions: list[str]
    csrf: str | None
    user: UserBody | None


class SignedOut(msgspec.Struct, frozen=True, kw_only=True):
    """Whose session is over."""

    actor: str


@get("/login")
async def ways_in(services: NamedDependency[Services]) -> Ways:
    """What a page for signing in offers."""
    return Ways(password=True, oidc=services.doors.oidc is not None)


@post("/login", status_code=200)
async def login(
    request: AnyRequest, services: NamedDependency[Services], data: JSONBody[Login]
) -> Response[Me]:
    """A session, in a cookie. 401 says the same for a wrong email and a wrong password."""
    require_our_page(request, services.settings.public_url)
    found = await by_password(services, request, email=data.email, password=data.password)
    services.metrics.sign_ins.labels("password").inc()
    return _inside(found)


@post("/invitations/accept", status_code=200)
async def accept_invitation(
    request: AnyRequest, services: NamedDependency[Services], data: JSONBody[AcceptInvitation]
) -> Response[Me]:
    """Once: it sets the password and signs in. 401 for one that is unknown, used or too old."""
    require_our_page(request, services.settings.public_url)
    doors, address = services.doors, address_of(request)
    attempt = await doors.gate.enter(doors.gate.address_name(address))
    hashed = digest(doors.pepper, Kind.INVITATION, data.invitation)
    async with services.postgres.connection() as conn:
        user_id = await users.user_of_invitation(conn, hashed)
        user = None if user_id is None else await users.user_by_id(conn, user_id)
    if user is None or user.disabled:
        await refused(services, attempt, user, "invitation", address=address)
        raise refuse(Code.INVALID_KEY, "this invitation is unknown, used or too old")
    async with doors.gate.excused(attempt):
        password = await _new_password(services, user, data.password)
    async with services.postgres.transaction() as conn:
        # The user first, as everywhere, so that two never wait for each other.
        now = await users.user_for_change(conn, user.id)
        if now is None or now.disabled or await users.take_invitation(conn, hashed) != user.id:
            raise refuse(Code.INVALID_KEY, "this invitation is unknown, used or too old")
        await _set_password(conn, now, password, how="invitation")
        inside = await let_in(conn, services, request, now, method="password", attempt=attempt)
    services.metrics.sign_ins.labels("invitation").inc()
    return _inside(inside)


@post("/logout", status_code=200)
async def logout(
    request: AnyRequest,
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
) -> Response[SignedOut]:
    """The session is over at once, and the cookie gone."""
    async with services.postgres.transaction() as conn:
        await end_shown(conn, services, request)
        subject = caller.user_id or actor
        detail = {"session": caller.credential_id}
        await record(conn, actor=actor, action="sign_out", subject=subject, detail=detail)
    gone = Cookie(
        key=COOKIE, value="", max_age=0, path="/", secure=True, httponly=True, samesite="lax"
    )
    return Response(SignedOut(actor=actor), cookies=[gone])


@get("/me")
async def read_me(services: NamedDependency[Services], caller: NamedDependency[Caller]) -> Me:
    """Who one is, what one may do, and the token that a page must say."""
    user = None
    if caller.user_id is not None:
        async with services.postgres.connection() as conn:
            user = await users.user_by_id(conn, caller.user_id)
    return _me(caller, user)


@post("/me/password", status_code=200)
async def change_password(
    request: AnyRequest,
    services: NamedDependency[Services],
    caller: NamedDependency[Caller],
    data: JSONBody[ChangePassword],
) -> Response[Me]:
    """Every session ends, and this browser has a new one. 401 for a wrong current password."""
    doors, address = services.doors, address_of(request)
    user = await _self(services, caller)
    names = doors.gate.names(user_id=user.id, email=user.email, address=address)
    attempt = await doors.gate.enter(names)
    async with doors.gate.excused(attempt):
        is_right = await doors.hasher.matches(user.password, data.current)
    if not is_right:
        await refused(services, attempt, user, "current password", address=address)
        raise refuse(Code.INVALID_KEY, "the current password is wrong")
    async with doors.gate.excused(attempt):
        password = await _new_password(services, user, data.password)
    async with services.postgres.transaction() as conn:
        now = await users.user_for_change(conn, user.id)
        if now is None or now.disabled or now.password != user.password:
            raise refuse(Code.INVALID_KEY, WRONG)  # it changed while we looked
        await _set_password(conn, now, password, how="change")
        inside = await let_in(conn, services, request, now, method="password", attempt=attempt)
    return _inside(inside)


def _inside(found: SignedIn) -> Response[Me]:
    # Nobody keeps a copy of what names a session.
    headers = {"cache-control": "no-store"}
    return Response(_me(found.caller, found.user), cookies=[found.cookie], headers=headers)


def _me(caller: Caller, user: User | None) -> Me:
    return Me(
        actor=caller.actor,
        kind=caller.kind,
        credential_id=caller.credential_id,
        permissions=sorted(caller.permissions),
        csrf=caller.csrf,
        user=None if user is None else user_body(user),
    )


async def _self(services: Services, caller: Caller) -> User:
    user = None
    if caller.user_id is not None:
        async with services.postgres.connection() as conn:
            user = await users.user_by_id(conn, caller.user_id)
    if user is None:
        raise refuse(Code.CONFLICT, "the admin token is nobody's, and has no password")
    return user


async def _new_password(services: Services, user: User, password: str) -> str:
    """Its hash. Raises RefusedError: 422 for one that anybody would guess."""
    fault = weakness(password, email=user.email, name=user.name)
    if fault is not None:
        raise refuse(Code.UNPROCESSABLE, fault, param="password")
    return await services.doors.hasher.hash(password)


async def _set_password(conn: Connection, user: User, password: str, *, how: str) -> None:
    await users.set_password(conn, user.id, password)
    await sessions.end_sessions(conn, user.id)
    detail = {"how": how}
    await record(conn, actor=user.email, action="user.password", subject=user.id, detail=detail)
