"""Idempotency keys as a gateway looks them up, and as the control plane forgets them.

They are claimed and answered within the ledger's own commands (`core.metering.Reserve.claim`,
`Settle.kept`), never here.
"""

import msgspec

from store.postgres import Connection
from store.queries import load

_sql = load("idempotency")


class KeyState(msgspec.Struct, frozen=True, kw_only=True):
    """A key that somebody has used. `answer` is None until there is one, empty if it was large."""

    fingerprint: str
    answer: bytes | None
    is_open: bool  # its request is under way


async def find(conn: Connection, *, tenant_id: str, scope: str, key: str) -> KeyState | None:
    """None for a key that is free."""
    cursor = await conn.execute(_sql["find"], {"tenant_id": tenant_id, "scope": scope, "key": key})
    row = await cursor.fetchone()
    if row is None:
        return None
    fingerprint, answer, is_open = row
    return KeyState(
        fingerprint=fingerprint,
        answer=None if answer is None else bytes(answer),
        is_open=is_open,
    )


async def forget(conn: Connection, *, limit: int) -> int:
    """Drop keys that have expired, at most so many; returns how many there were."""
    return (await conn.execute(_sql["forget"], {"limit": limit})).rowcount
