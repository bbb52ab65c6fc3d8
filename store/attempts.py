"""How often signing in failed, by user and by address, where every control plane sees it.

The rules are the caller's; here are the rows, and the one clock they are judged by: Postgres'.
"""

from collections.abc import Sequence

import msgspec

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

FORGET_MAX = 1000

_sql = load("attempts")


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one name, and the moment it was read."""

    name: str
    failures: int
    last_ms: int
    until_ms: int
    now_ms: int


async def attempts_for_change(conn: Connection, names: Sequence[str]) -> list[AttemptRow]:
    """In order of name, made where there were none; others wait until the transaction ends."""
    await conn.execute(_sql["know_attempts"], {"names": list(names)})
    async with conn.cursor(row_factory=struct_row(AttemptRow)) as cursor:
        await cursor.execute(_sql["attempts_for_change"], {"names": list(names)})
        return await cursor.fetchall()


async def write_attempts(
    conn: Connection, name: str, *, failures: int, last_ms: int, until_ms: int
) -> None:
    """Of a name that was read for change."""
    values = {"name": name, "failures": failures, "last_ms": last_ms, "until_ms": until_ms}
    await conn.execute(_sql["write_attempts"], values)


async def forget(conn: Connection, *, age_ms: int) -> int:
    """Delete what nobody tried for so long, a bounded number at a time."""
    values = {"age_ms": age_ms, "limit": FORGET_MAX}
    return (await conn.execute(_sql["forget_attempts"], values)).rowcount
