"""Responses that tenants asked to be kept: written once, read by their tenant alone, gone in time.

A body is opaque here, and sealed by whoever writes it. Invariant: no statement finds a row of
another tenant's, nor one whose time is over, whether or not it has been swept.
"""

import msgspec

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

SWEPT_AT_ONCE = 1_000

_sql = load("responses")


class KeptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `place` counts from the newest, 1; `so_far` are the bytes up to it."""

    id: str
    tenant_id: str
    previous_id: str | None
    key_id: str  # empty: not sealed
    nonce: bytes
    body: bytes
    bytes: int
    place: int = 1
    so_far: int = 0


class NewResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be kept, and for how long from now."""

    id: str
    tenant_id: str
    previous_id: str | None
    kept_s: int
    key_id: str
    nonce: bytes
    body: bytes
    bytes: int


async def keep_response(conn: Connection, new: NewResponse) -> bool:
    """False where the tenant keeps nothing. Idempotent by id."""
    await conn.execute(_sql["keeping"], {"tenant_id": new.tenant_id})
    cursor = await conn.execute(_sql["keep_response"], msgspec.structs.asdict(new))
    return await cursor.fetchone() is not None


async def response_by_id(conn: Connection, tenant_id: str, response_id: str) -> KeptResponse | None:
    """None for one that is another's, deleted or past its time."""
    async with conn.cursor(row_factory=struct_row(KeptResponse)) as cursor:
        named = {"id": response_id, "tenant_id": tenant_id}
        await cursor.execute(_sql["response_by_id"], named)
        return await cursor.fetchone()


async def response_chain(
    conn: Connection, tenant_id: str, response_id: str, *, count_max: int, bytes_max: int
) -> list[KeptResponse]:
    """It and what came before it, newest first; one statement, so one moment.

    Ends early where one is missing, after `count_max`, or with the first over `bytes_max`: the
    last row's `previous_id` tells.
    """
    async with conn.cursor(row_factory=struct_row(KeptResponse)) as cursor:
        asked = {"id": response_id, "tenant_id": tenant_id}
        bounds = {"count_max": count_max, "bytes_max": bytes_max}
        await cursor.execute(_sql["response_chain"], asked | bounds)
        return await cursor.fetchall()


async def delete_response(conn: Connection, tenant_id: str, response_id: str) -> bool:
    """Whether there was one."""
    named = {"id": response_id, "tenant_id": tenant_id}
    return await (await conn.execute(_sql["delete_response"], named)).fetchone() is not None


async def delete_expired(conn: Connection, *, count_max: int = SWEPT_AT_ONCE) -> int:
    """Some of what is past its time; returns how many. Fewer than `count_max` is all of it."""
    cursor = await conn.execute(_sql["delete_expired"], {"count_max": count_max})
    return len(await cursor.fetchall())


async def put_policy(conn: Connection, tenant_id: str, *, keep: bool) -> int:
    """Whether the tenant's responses are kept from now on.

    Turned off, what was kept is deleted with it; returns how many that were.
    """
    await conn.execute(_sql["changing"], {"tenant_id": tenant_id})
    await conn.execute(_sql["put_policy"], {"tenant_id": tenant_id, "keep": keep})
    if keep:
        return 0
    cursor = await conn.execute(_sql["forget_tenant"], {"tenant_id": tenant_id})
    return len(await cursor.fetchall())


async def keeps(conn: Connection, tenant_id: str) -> bool:
    """What the tenant has said; kept where it has said nothing."""
    row = await (await conn.execute(_sql["policy"], {"tenant_id": tenant_id})).fetchone()
    return row is None or bool(row[0])
