"""API tokens of operators and of their programs: a part of what their owner may do.

One without a user was made with the break-glass token and belongs to the installation.
"""

import msgspec

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("admin_tokens")


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """`life_ms` None: until it is revoked."""

    id: str
    digest: bytes
    user_id: str | None
    name: str
    permissions: tuple[str, ...]
    created_by: str
    life_ms: int | None


class LiveToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that is alive. `owner_roles` are its user's as they are now, None without one."""

    id: str
    name: str
    permissions: tuple[str, ...]
    user_id: str | None
    email: str | None
    owner_roles: tuple[str, ...] | None
    stale: bool


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A token for people; its text was shown once."""

    id: str
    name: str
    permissions: tuple[str, ...]
    user_id: str | None
    created_by: str
    created_ms: int
    expires_ms: int | None
    last_used_ms: int | None
    revoked_ms: int | None


async def create_token(conn: Connection, new: NewToken) -> None:
    """Works at once."""
    values = msgspec.structs.asdict(new) | {
        "permissions": list(new.permissions),
        "life_s": None if new.life_ms is None else new.life_ms / 1000,
    }
    await conn.execute(_sql["create_token"], values)


async def count_tokens(conn: Connection, user_id: str | None) -> int:
    """How many of a user's, or of the installation's, are alive."""
    row = await (await conn.execute(_sql["count_tokens"], {"user_id": user_id})).fetchone()
    assert row is not None
    return int(row[0])


async def token_by_digest(conn: Connection, digest: bytes, *, touch_ms: int) -> LiveToken | None:
    """None for one that is unknown, revoked, over, or of a disabled user."""
    values = {"digest": digest, "touch_s": touch_ms / 1000}
    async with conn.cursor(row_factory=struct_row(LiveToken)) as cursor:
        await cursor.execute(_sql["token_by_digest"], values)
        return await cursor.fetchone()


async def touch_token(conn: Connection, token_id: str) -> None:
    """It was just used."""
    await conn.execute(_sql["touch_token"], {"id": token_id})


async def tokens_page(
    conn: Connection, *, user_id: str = "", token_id: str = "", after: str = "", limit: int
) -> list[TokenRow]:
    """In order of id, revoked ones too; one user's, or the one token, where that is given."""
    values = {"user_id": user_id, "id": token_id, "after": after, "limit": limit}
    async with conn.cursor(row_factory=struct_row(TokenRow)) as cursor:
        await cursor.execute(_sql["tokens_page"], values)
        return await cursor.fetchall()


async def revoke_token(conn: Connection, token_id: str, *, user_id: str = "") -> TokenRow | None:
    """The token as it is now; None for no such one, or none of `user_id`'s.

    Revoking again keeps the first time.
    """
    values = {"id": token_id, "user_id": user_id}
    row = await (await conn.execute(_sql["revoke_token"], values)).fetchone()
    if row is None:
        return None
    (token,) = await tokens_page(conn, token_id=token_id, limit=1)
    return token
