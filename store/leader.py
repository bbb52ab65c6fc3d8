"""One leader at a time, by a fenced lease in Postgres. Only the server's clock counts.

A term is a holder and an epoch. Whoever decides as a leader calls `fence` first in each
transaction: it is refused when the term is over, and no other term can begin before the
transaction ends. Being the leader by one's own belief proves nothing: a process may have
stood still for an hour between two lines.
"""

import msgspec

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("leader")


class NotLeaderError(Exception):
    """The lease went to another meanwhile: nothing of this transaction may stand."""


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One holder's time of leading in one role."""

    role: str
    holder: str
    epoch: int


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """Who led last in a role, and whether it still does."""

    holder: str
    epoch: int
    taken_ms: int
    leads: bool


async def take(conn: Connection, *, role: str, holder: str, lease_ms: int) -> Term | None:
    """A new term, where nobody leads. Waits for what the last leader has under way."""
    values = {"role": role, "holder": holder, "lease_ms": lease_ms}
    free = await (await conn.execute(_sql["is_free"], {"role": role})).fetchone()
    if free != (True,):
        return None
    row = await (await conn.execute(_sql["take"], values)).fetchone()
    return None if row is None else Term(role=role, holder=holder, epoch=int(row[0]))


async def renew(conn: Connection, term: Term, *, lease_ms: int) -> bool:
    """Whether the term goes on. One that has ended never begins again."""
    values = {**msgspec.structs.asdict(term), "lease_ms": lease_ms}
    return await (await conn.execute(_sql["renew"], values)).fetchone() is not None


async def release(conn: Connection, term: Term) -> None:
    """End the term now, for the next one to take over."""
    await conn.execute(_sql["release"], msgspec.structs.asdict(term))


async def fence(conn: Connection, term: Term, *, transaction_ms: int) -> None:
    """The rest of this transaction is the leader's, and takes at most `transaction_ms`.

    Raises:
        NotLeaderError: The term is over.
    """
    await conn.execute(_sql["bound"], {"transaction_ms": str(transaction_ms)})
    row = await (await conn.execute(_sql["fence"], msgspec.structs.asdict(term))).fetchone()
    if row is None:
        raise NotLeaderError(f"{term.holder} leads no more in term {term.epoch} of {term.role}")


async def leader(conn: Connection, role: str) -> Leader | None:
    """None where nobody ever led."""
    async with conn.cursor(row_factory=struct_row(Leader)) as cursor:
        await cursor.execute(_sql["leader"], {"role": role})
        return await cursor.fetchone()
