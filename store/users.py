"""Operators: who they are, what proves it, and their invitations.

A user is disabled, never deleted: the audit log names them. What they show to be let in is in
`store.sessions` and `store.admin_tokens`, and how often they failed in `store.attempts`.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

Source = Literal["local", "oidc"]  # who decides their roles

_sql = load("users")


class User(msgspec.Struct, frozen=True, kw_only=True):
    """As it is stored. `password` is an argon2 hash, None for who has none.

    `invited`: there is an invitation that has not been taken. `failures` in a row at signing in,
    and until when no further try is let in.
    """

    id: str
    email: str
    name: str
    password: str | None
    roles: tuple[str, ...]
    source: Source
    disabled: bool
    version: int
    created_ms: int
    signed_in_ms: int | None
    failures: int
    locked_until_ms: int
    invited: bool


class NewUser(msgspec.Struct, frozen=True, kw_only=True):
    """What a user is made of. `email` is in lower case."""

    id: str
    email: str
    name: str
    password: str | None
    roles: tuple[str, ...]
    source: Source = "local"


async def create_user(conn: Connection, new: NewUser) -> bool:
    """False when the email is taken: nothing was made."""
    values = msgspec.structs.asdict(new) | {"roles": list(new.roles)}
    return await (await conn.execute(_sql["create_user"], values)).fetchone() is not None


async def user_by_id(conn: Connection, user_id: str) -> User | None:
    """Disabled ones too."""
    found = await _users(conn, "user_by_id", {"id": user_id})
    return found[0] if found else None


async def user_for_change(conn: Connection, user_id: str) -> User | None:
    """As `user_by_id`, with other changers of it waiting until the transaction ends."""
    await conn.execute(_sql["lock_user"], {"id": user_id})
    return await user_by_id(conn, user_id)


async def user_id_by_email(conn: Connection, email: str) -> str | None:
    """Of an email in lower case."""
    row = await (await conn.execute(_sql["user_id_by_email"], {"email": email})).fetchone()
    return None if row is None else str(row[0])


async def users_page(
    conn: Connection, *, email: str = "", after: str = "", limit: int
) -> list[User]:
    """In order of email, after `after`; the one with `email` where that is given."""
    return await _users(conn, "users_page", {"email": email, "after": after, "limit": limit})


async def change_user(conn: Connection, user: User) -> None:
    """Write its name, roles and whether it is disabled; the version rises."""
    values = {"id": user.id, "name": user.name, "roles": list(user.roles)}
    await conn.execute(_sql["change_user"], values | {"disabled": user.disabled})


async def set_password(conn: Connection, user_id: str, password: str | None) -> None:
    """Another hash, or none."""
    await conn.execute(_sql["set_password"], {"id": user_id, "password": password})


async def rehash(conn: Connection, user_id: str, *, before: str, password: str) -> None:
    """The same password under other parameters, unless it was changed meanwhile."""
    values = {"id": user_id, "before": before, "password": password}
    await conn.execute(_sql["rehash"], values)


async def signed_in(conn: Connection, user_id: str) -> None:
    """Note the moment."""
    await conn.execute(_sql["signed_in"], {"id": user_id})


async def user_of_identity(conn: Connection, *, issuer: str, subject: str) -> str | None:
    """Whom an identity provider's subject is here."""
    values = {"issuer": issuer, "subject": subject}
    row = await (await conn.execute(_sql["user_of_identity"], values)).fetchone()
    return None if row is None else str(row[0])


async def add_identity(conn: Connection, user_id: str, *, issuer: str, subject: str) -> None:
    """From now on that subject is this user, whatever their email becomes."""
    values = {"issuer": issuer, "subject": subject, "user_id": user_id}
    await conn.execute(_sql["add_identity"], values)


async def subject_of(conn: Connection, user_id: str, *, issuer: str) -> str | None:
    """Who a user is at an identity provider; None for one who never came from there."""
    values = {"user_id": user_id, "issuer": issuer}
    row = await (await conn.execute(_sql["subject_of"], values)).fetchone()
    return None if row is None else str(row[0])


async def forget_identities(conn: Connection, user_id: str) -> None:
    """Whoever next comes with their verified email is this user."""
    await conn.execute(_sql["forget_identities"], {"user_id": user_id})


async def invite(conn: Connection, user_id: str, *, digest: bytes, life_ms: int) -> None:
    """A new invitation; an older one stops working."""
    values = {"user_id": user_id, "digest": digest, "life_s": life_ms / 1000}
    await conn.execute(_sql["invite"], values)


async def user_of_invitation(conn: Connection, digest: bytes) -> str | None:
    """Whose it is, without taking it; None where it is unknown or too old."""
    row = await (await conn.execute(_sql["user_of_invitation"], {"digest": digest})).fetchone()
    return None if row is None else str(row[0])


async def take_invitation(conn: Connection, digest: bytes) -> str | None:
    """Whose it was; None where it is unknown, taken or too old. It works once."""
    row = await (await conn.execute(_sql["take_invitation"], {"digest": digest})).fetchone()
    return str(row[0]) if row is not None and row[1] else None


async def drop_invitation(conn: Connection, user_id: str) -> None:
    """Whatever was sent to them no longer works."""
    await conn.execute(_sql["drop_invitation"], {"user_id": user_id})


async def _users(conn: Connection, statement: str, values: Mapping[str, object]) -> list[User]:
    async with conn.cursor(row_factory=struct_row(User)) as cursor:
        await cursor.execute(_sql[statement], values)
        return await cursor.fetchall()
