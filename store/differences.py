"""Differences that the reconciler has found, kept until long after they are over.

Written only in a reconciler's turn (`store.reconcile.take_turn`), so nothing is noticed twice.
What `write` returns is told once: it was committed with the rows that say so.
"""

from collections.abc import Collection, Sequence

import msgspec

from core.reconcile import Found, Kind, Known, Verdict
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

FROM_NEWEST = 2**63 - 1
FORGET_MAX = 1_000
CLOSE_MAX = 10_000

_sql = load("differences")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One for people. Times are Unix milliseconds; `resolution` is null while it is open."""

    id: int
    kind: Kind
    subject: str
    detail: str
    measure: int
    resolution: str | None  # corrected | gone | closed
    note: str  # of who closed it
    noticed_ms: int
    raised_ms: int
    resolved_ms: int | None


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of one difference."""

    kind: Kind
    subject: str
    detail: str = ""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What changed in one transaction."""

    raised: list[Told]
    corrected: list[Told]  # by a recount
    gone: list[Told]  # by themselves


async def known(
    conn: Connection, kinds: Collection[Kind], subjects: Collection[str], *, all_open: bool = False
) -> list[Known]:
    """What is written down of these subjects, or of every subject where it is open."""
    parameters = {"kinds": list(kinds), "subjects": list(subjects), "all_open": all_open}
    async with conn.cursor(row_factory=struct_row(Known)) as cursor:
        await cursor.execute(_sql["known"], parameters)
        return await cursor.fetchall()


async def write(
    conn: Connection,
    verdict: Verdict,
    *,
    patience_ms: int,
    corrected: Collection[str] = (),
) -> Written:
    """Note the new, raise what is due, resolve what is gone.

    `patience_ms` is for spools; `corrected` are the requests that were recounted just now.
    """
    if verdict.new:
        await conn.execute(_sql["notice"], _columns(verdict.new))
    if verdict.grown:
        columns = _columns([found for _, found in verdict.grown])
        await conn.execute(_sql["grow"], {"ids": [old.id for old, _ in verdict.grown], **columns})
    mended = [k for k in verdict.gone if k.kind is Kind.UNCOUNTED and k.subject in corrected]
    others = [k for k in verdict.gone if k not in mended]
    return Written(
        corrected=await _resolve(conn, mended, "corrected"),
        gone=await _resolve(conn, others, "gone"),
        raised=await _raise(conn, patience_ms),
    )


async def to_revisit(
    conn: Connection, kinds: Collection[Kind], *, pause_ms: int, limit: int
) -> list[Known]:
    """Open ones that nobody looked at for `pause_ms`; they count as looked at from now on."""
    parameters = {"kinds": list(kinds), "pause_ms": pause_ms, "limit": limit}
    async with conn.cursor(row_factory=struct_row(Known)) as cursor:
        await cursor.execute(_sql["to_revisit"], parameters)
        rows = await cursor.fetchall()
    await conn.execute(_sql["revisited"], {"ids": [row.id for row in rows]})
    return rows


async def open_by_kind(conn: Connection) -> dict[Kind, int]:
    """How many are open; every kind is named."""
    cursor = await conn.execute(_sql["open_by_kind"])
    counts = {Kind(kind): count for kind, count in await cursor.fetchall()}
    return {kind: counts.get(kind, 0) for kind in Kind}


async def page(
    conn: Connection, *, kind: str = "", is_open: bool = True, before: int, limit: int
) -> list[Difference]:
    """Newest first, of one kind or of all; only open ones or all."""
    parameters = {"kind": kind, "is_open": is_open, "before": before, "limit": limit}
    async with conn.cursor(row_factory=struct_row(Difference)) as cursor:
        await cursor.execute(_sql["page"], parameters)
        return await cursor.fetchall()


async def close(conn: Connection, difference_id: int, note: str) -> Told | None:
    """A person has dealt with it: it is not told again unless it grows. None: it is not open."""
    async with conn.cursor(row_factory=struct_row(Told)) as cursor:
        await cursor.execute(_sql["close"], {"id": difference_id, "note": note})
        return await cursor.fetchone()


async def close_kind(conn: Connection, kind: Kind, upto: int, note: str) -> int:
    """All open ones of a kind up to this id, at most `CLOSE_MAX` at a time. Returns how many."""
    parameters = {"kind": kind, "upto": upto, "note": note, "limit": CLOSE_MAX}
    return (await conn.execute(_sql["close_kind"], parameters)).rowcount


async def forget(conn: Connection, *, kept_ms: int) -> None:
    """Drop those that were over so long ago, at most `FORGET_MAX` at a time."""
    await conn.execute(_sql["forget"], {"kept_ms": kept_ms, "limit": FORGET_MAX})


def _columns(found: Sequence[Found]) -> dict[str, list[str] | list[int]]:
    return {
        "kinds": [item.kind.value for item in found],
        "subjects": [item.subject for item in found],
        "details": [item.detail for item in found],
        "measures": [item.measure for item in found],
    }


async def _raise(conn: Connection, patience_ms: int) -> list[Told]:
    async with conn.cursor(row_factory=struct_row(Told)) as cursor:
        await cursor.execute(_sql["raise"], {"patience_ms": patience_ms})
        return await cursor.fetchall()


async def _resolve(conn: Connection, over: Sequence[Known], resolution: str) -> list[Told]:
    """End those; one that was never told of leaves nothing behind."""
    if not over:
        return []
    ids = [item.id for item in over]
    await conn.execute(_sql["drop_unraised"], {"ids": ids})
    async with conn.cursor(row_factory=struct_row(Told)) as cursor:
        await cursor.execute(_sql["resolve"], {"ids": ids, "resolution": resolution})
        return await cursor.fetchall()
