"""Users: made, listed, changed, disabled, and let in anew. Never deleted: the log names them.

Nobody gives more than they have: making, changing or resetting a user needs every permission
that the user has, before and after.
"""

import secrets
from typing import Annotated

import msgspec
from litestar import Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, UnsetType

from control_plane.access.caller import Caller
from control_plane.access.credentials import ID_BYTES, SECRET_BYTES, Kind, an_id, digest, mint
from control_plane.access.passwords import LENGTH_MAX, weakness
from control_plane.access.roles import NEVER_A_TOKENS, Role, may_give
from control_plane.api.etags import require_match, tagged
from control_plane.api.names import END, KeyName
from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.api.user_bodies import UserBody, user_body
from control_plane.auth import AnyRequest
from control_plane.errors import ExistsError
from control_plane.services import Services
from control_plane.signing_in import email_of
from core.errors import Code, refuse
from store import sessions, users
from store.audit_log import record
from store.postgres import Connection
from store.users import NewUser, User

EmailAddress = Annotated[
    str, msgspec.Meta(pattern=r"^[^\s@\x00-\x1f]+@[^\s@\x00-\x1f]+" + END, max_length=254)
]
Roles = Annotated[tuple[Role, ...], msgspec.Meta(max_length=len(Role))]
Password = Annotated[str, msgspec.Meta(min_length=1, max_length=4 * LENGTH_MAX)]


class CreateUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without a password an invitation is made, by which the user sets one."""

    email: EmailAddress
    name: KeyName
    roles: Roles
    password: Password | None = None


class PatchUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays. Other roles, or being disabled, end the user's sessions."""

    name: KeyName | UnsetType = UNSET
    roles: Roles | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET


class InvitedUser(msgspec.Struct, frozen=True, kw_only=True):
    """`invitation` is shown this once; null where the user has a password."""

    user: UserBody
    invitation: str | None


class UserList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of email; `after` asks for the next ones, null at the end."""

    users: list[UserBody]
    after: str | None


@post("/users")
async def create_user(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
    data: JSONBody[CreateUser],
) -> InvitedUser:
    """409 with `existing_id` when the email is taken."""
    email, roles = email_of(data.email), _distinct(data.roles)
    _require_may_give(caller, roles)
    hashed = None
    if data.password is not None:
        fault = weakness(data.password, email=email, name=data.name)
        if fault is not None:
            raise refuse(Code.UNPROCESSABLE, fault, param="password")
        hashed = await services.doors.hasher.hash(data.password)
    user_id = an_id("usr", secrets.token_bytes(ID_BYTES))
    new = NewUser(id=user_id, email=email, name=data.name, password=hashed, roles=roles)
    async with services.postgres.transaction() as conn:
        if not await users.create_user(conn, new):
            existing = await users.user_id_by_email(conn, email)
            assert existing is not None, "its email was taken a moment ago, and none is deleted"
            raise ExistsError(f"{email} is a user", param="email", existing_id=existing)
        invitation = None if hashed is not None else await _invite(conn, services, user_id)
        detail = {"email": email, "name": data.name, "roles": list(roles)}
        detail["invited"] = [] if invitation is None else [email]
        await record(conn, actor=actor, action="user.create", subject=user_id, detail=detail)
        user = await _found(conn, user_id)
    return InvitedUser(user=user_body(user), invitation=invitation)


@get("/users")
async def list_users(
    services: NamedDependency[Services],
    email: Filter = "",
    after: After = "",
    limit: Limit = ROWS,
) -> UserList:
    """All, or the one with `email`."""
    async with services.postgres.connection() as conn:
        rows = await users.users_page(conn, email=email_of(email), after=after, limit=limit)
    last = rows[-1].email if len(rows) == limit else None
    return UserList(users=[user_body(row) for row in rows], after=last)


@get("/users/{user:str}")
async def read_user(services: NamedDependency[Services], user: FromPath[str]) -> Response[UserBody]:
    """404 for an unknown id."""
    async with services.postgres.connection() as conn:
        found = await _found(conn, user)
    return tagged(user_body(found), found.version)


@patch("/users/{user:str}")
async def patch_user(
    request: AnyRequest,
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
    *,
    user: FromPath[str],
    data: JSONBody[PatchUser],
) -> Response[UserBody]:
    """In force with the next request of theirs, on every control plane."""
    async with services.postgres.transaction() as conn:
        before = await _for_change(conn, caller, user)
        require_match(request, before.version)
        given = {k: v for k, v in msgspec.structs.asdict(data).items() if v is not UNSET}
        if data.roles is not UNSET:
            given["roles"] = _distinct(data.roles)
            _require_may_give(caller, given["roles"])
        wanted = msgspec.structs.replace(before, **given)
        await users.change_user(conn, wanted)
        if wanted.disabled:
            await users.drop_invitation(conn, user)
        if wanted.disabled or set(wanted.roles) != set(before.roles):
            await sessions.end_sessions(conn, user)
        detail = {name: [_old(before, name), _old(wanted, name)] for name in sorted(given)}
        await record(conn, actor=actor, action="user.change", subject=user, detail=detail)
        after = await _found(conn, user)
    return tagged(user_body(after), after.version)


@post("/users/{user:str}/reset", status_code=200)
async def reset_user(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
    user: FromPath[str],
) -> InvitedUser:
    """Password, sessions and link to a provider are over, nobody waits; a new invitation."""
    async with services.postgres.transaction() as conn:
        before = await _for_change(conn, caller, user)
        if before.disabled:
            raise refuse(Code.CONFLICT, f"{user!r} is disabled")
        await users.set_password(conn, user, None)
        await users.forget_identities(conn, user)
        await sessions.end_sessions(conn, user)
        await services.doors.gate.forget_user(conn, user)
        invitation = await _invite(conn, services, user)
        await record(conn, actor=actor, action="user.reset", subject=user, detail={})
        after = await _found(conn, user)
    return InvitedUser(user=user_body(after), invitation=invitation)


async def _invite(conn: Connection, services: Services, user_id: str) -> str:
    text = mint(Kind.INVITATION, secrets.token_bytes(SECRET_BYTES))
    hashed = digest(services.doors.pepper, Kind.INVITATION, text)
    await users.invite(conn, user_id, digest=hashed, life_ms=services.settings.invitation_ms)
    return text


async def _found(conn: Connection, user_id: str) -> User:
    return _there(await users.user_by_id(conn, user_id), user_id)


async def _for_change(conn: Connection, caller: Caller, user_id: str) -> User:
    found = _there(await users.user_for_change(conn, user_id), user_id)
    _require_may_give(caller, tuple(Role(role) for role in found.roles))
    return found


def _there(user: User | None, user_id: str) -> User:
    if user is None:
        raise refuse(Code.NOT_FOUND, f"there is no user {user_id!r}")
    return user


def _distinct(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    return tuple(role for role in Role if role in roles)


def _require_may_give(caller: Caller, roles: tuple[Role, ...]) -> None:
    if not may_give(caller.permissions | NEVER_A_TOKENS, roles):
        message = "a user with these roles may do more than you may"
        raise refuse(Code.FORBIDDEN, message, param="roles")


def _old(user: User, name: str) -> object:
    value = getattr(user, name)
    return list(value) if isinstance(value, tuple) else value
