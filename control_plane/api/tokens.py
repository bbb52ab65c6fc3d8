"""API tokens: a part of what their owner may do, for programs. Shown once, revoked at once.

A token made with the admin token belongs to the installation. What its owner may no longer do,
the token may not either.
"""

import secrets
from typing import Annotated

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.access.caller import Caller
from control_plane.access.credentials import ID_BYTES, SECRET_BYTES, Kind, an_id, digest, mint
from control_plane.access.roles import NEVER_A_TOKENS, ROLES, Permission, Role
from control_plane.api.names import END
from control_plane.api.paging import ROWS, After, Limit
from control_plane.services import Services
from core.errors import Code, refuse
from store import admin_tokens
from store.admin_tokens import NewToken, TokenRow
from store.audit_log import record

LIFE_MS_MAX = 10 * 366 * 86_400_000

# A name is in the audit log's actor, between `token:` and `/`.
TokenName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*" + END, max_length=63)
]
LifeMs = Annotated[int, msgspec.Meta(ge=1000, le=LIFE_MS_MAX)]
Scope = Annotated[tuple[Permission, ...], msgspec.Meta(min_length=1, max_length=len(Permission))]


class CreateToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either a role or single permissions. `life_ms` null: until it is revoked."""

    name: TokenName
    role: Role | None = None
    permissions: Scope | None = None
    life_ms: LifeMs | None = None


class CreatedToken(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is the whole token, shown this once."""

    token: TokenRow
    text: str


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of id, revoked ones too; `after` asks for the next ones, null at the end."""

    tokens: list[TokenRow]
    after: str | None


@post("/tokens")
async def create_token(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
    data: JSONBody[CreateToken],
) -> CreatedToken:
    """403 for more than one may do oneself, 409 where one has too many."""
    scope = _scope(caller, data)
    text = mint(Kind.TOKEN, secrets.token_bytes(SECRET_BYTES))
    new = NewToken(
        id=an_id("tok", secrets.token_bytes(ID_BYTES)),
        digest=digest(services.doors.pepper, Kind.TOKEN, text),
        user_id=caller.user_id,
        name=data.name,
        permissions=tuple(sorted(scope)),
        created_by=actor,
        life_ms=data.life_ms,
    )
    async with services.postgres.transaction() as conn:
        if await admin_tokens.count_tokens(conn, caller.user_id) >= services.settings.tokens_max:
            message = f"there are {services.settings.tokens_max} tokens: revoke one first"
            raise refuse(Code.CONFLICT, message)
        await admin_tokens.create_token(conn, new)
        detail = {
            "name": data.name,
            "permissions": list(new.permissions),
            "life_ms": data.life_ms,
        }
        await record(conn, actor=actor, action="token.create", subject=new.id, detail=detail)
        (token,) = await admin_tokens.tokens_page(conn, token_id=new.id, limit=1)
    return CreatedToken(token=token, text=text)


@get("/tokens")
async def list_tokens(
    services: NamedDependency[Services],
    caller: NamedDependency[Caller],
    after: After = "",
    limit: Limit = ROWS,
) -> TokenList:
    """One's own; everybody's for who may read users."""
    owner = "" if caller.may(Permission.USERS_READ) else caller.user_id or ""
    async with services.postgres.connection() as conn:
        rows = await admin_tokens.tokens_page(conn, user_id=owner, after=after, limit=limit)
    return TokenList(tokens=rows, after=rows[-1].id if len(rows) == limit else None)


@delete("/tokens/{token:str}", status_code=200)
async def revoke_token(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
    token: FromPath[str],
) -> TokenRow:
    """Dead at once. One's own; anybody's for who may change users. Again changes nothing."""
    owner = "" if caller.may(Permission.USERS_WRITE) else caller.user_id or ""
    async with services.postgres.transaction() as conn:
        row = await admin_tokens.revoke_token(conn, token, user_id=owner)
        if row is None:
            raise refuse(Code.NOT_FOUND, f"there is no token {token!r}")
        detail = {"name": row.name}
        await record(conn, actor=actor, action="token.revoke", subject=token, detail=detail)
    return row


def _scope(caller: Caller, data: CreateToken) -> frozenset[Permission]:
    if (data.role is None) == (data.permissions is None):
        message = "a token has either a role or permissions"
        raise refuse(Code.UNPROCESSABLE, message, param="permissions")
    asked = ROLES[data.role] if data.role is not None else frozenset(data.permissions or ())
    if data.role is None and asked & NEVER_A_TOKENS:
        message = "no token may change passwords, sessions or tokens"
        raise refuse(Code.UNPROCESSABLE, message, param="permissions")
    if not asked <= caller.permissions:
        raise refuse(Code.FORBIDDEN, "a token may not do more than you may")
    return asked - NEVER_A_TOKENS
