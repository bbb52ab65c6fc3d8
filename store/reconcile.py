"""The reconciler's reading of Postgres: feeds say where to look, looks say what differs.

A feed is a place kept in Postgres, so that another process, or the next life of this one, goes
on from it. Words are followed by the time they were recorded, a grace behind: a transaction
that records one may still be under way, and its recount too. Requests and accounts are gone
over and over, slowly. Each slice is one short transaction that reads, writes differences down
and moves its feed, in a turn that only one reconciler has.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import msgspec
import psycopg

from core.reconcile import Found, Kind
from store.ledger import BILLING_CAUSES
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

TURN = 0x4845_4152  # an advisory lock; any fixed number that is ours
CONTACT_GAP_MS = 60_000  # between rounds, failed ones and their back-off included
POSTED_TIMEOUT_MS = 2_000
STATES_MAX = 1_000  # of each kind

_sql = load("reconcile")


class Feed(StrEnum):
    """Where to look next."""

    WORDS = "words"  # requests just spoken of
    OVERDUE = "overdue"  # those spoken of so long ago that all should have been said
    REQUESTS = "requests"  # every ended request, over and over
    ACCOUNTS = "accounts"  # every account, over and over


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """The next subjects of a feed, and its place once they have been looked at."""

    subjects: list[str]
    at: datetime
    place: str
    more: bool  # whether the feed has not come to its end
    span_ms: int = 0  # how much time it looked through


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What differs among the subjects that could be judged."""

    found: list[Found]
    judged: frozenset[str]


class Graces(msgspec.Struct, frozen=True, kw_only=True):
    """For how long records may differ."""

    grace_ms: int  # a word, and the count of it
    overdue_ms: int  # a request's end, and all its journals; a word, and its reservation


async def take_turn(conn: Connection) -> bool:
    """Until the transaction ends nobody else reconciles; False when somebody does."""
    row = await (await conn.execute(_sql["take_turn"], {"lock": TURN})).fetchone()
    assert row is not None
    return bool(row[0])


async def listen(conn: Connection, *, overdue_ms: int) -> bool:
    """Note that we are there; whether some reconciler was for all of `overdue_ms`.

    Where a control plane was, journals could be taken; where none was, they could not.
    """
    bounds = {"gap_ms": CONTACT_GAP_MS, "overdue_ms": overdue_ms}
    row = await (await conn.execute(_sql["listen"], bounds)).fetchone()
    assert row is not None, "the migration made it"
    return bool(row[0])


async def next_words(
    conn: Connection, feed: Feed, *, window_ms: int, lag_ms: int, limit: int
) -> Slice:
    """Requests spoken of in the next `window_ms` after the feed's place, oldest first."""
    at, place = await _cursor(conn, feed)
    bounds = {"at": at, "window_ms": window_ms, "lag_ms": lag_ms}
    row = await (await conn.execute(_sql["span"], bounds)).fetchone()
    assert row is not None
    upto, newest = row
    if upto <= at:
        return Slice(subjects=[], at=at, place=place, more=False)
    span = {"at": at, "place": place, "upto": upto, "limit": limit}
    rows = await (await conn.execute(_sql["words"], span)).fetchall()
    subjects = [request_id for _, request_id in rows]
    span_ms = (upto - at) // timedelta(milliseconds=1)
    if len(rows) == limit:
        at, place = rows[-1]
        return Slice(subjects=subjects, at=at, place=place, more=True, span_ms=span_ms)
    return Slice(subjects=subjects, at=upto, place="", more=upto < newest, span_ms=span_ms)


async def next_names(conn: Connection, feed: Feed, *, limit: int) -> Slice:
    """Requests or accounts after the feed's place, by id; from the start after the last."""
    at, place = await _cursor(conn, feed)
    cursor = await conn.execute(_sql[feed], {"place": place, "limit": limit})
    subjects = [str(name) for (name,) in await cursor.fetchall()]
    is_full = len(subjects) == limit
    return Slice(subjects=subjects, at=at, place=subjects[-1] if is_full else "", more=is_full)


async def move(conn: Connection, feed: Feed, done: Slice) -> None:
    """The slice has been looked at."""
    await conn.execute(_sql["move_cursor"], {"feed": feed, "at": done.at, "place": done.place})


async def lags_ms(conn: Connection) -> dict[str, int]:
    """For the feeds of words: how long ago what they look at now was recorded."""
    return dict(await (await conn.execute(_sql["lags"])).fetchall())


async def look_at_requests(conn: Connection, request_ids: Collection[str], graces: Graces) -> Look:
    """What differs about these. One that was spoken of within the grace is not judged."""
    parameters = {
        "request_ids": list(request_ids),
        "billing_causes": BILLING_CAUSES,
        **msgspec.structs.asdict(graces),
    }
    rows = await (await conn.execute(_sql["look_at_requests"], parameters)).fetchall()
    early = {subject for kind, subject, _ in rows if not kind}
    found = [
        Found(kind=Kind(kind), subject=subject, detail=detail)
        for kind, subject, detail in rows
        if subject not in early
    ]
    return Look(found=found, judged=frozenset(request_ids) - early)


async def look_at_accounts(conn: Connection, tenants: Collection[str]) -> Look:
    """Balances against last entries, and against what is held."""
    cursor = await conn.execute(_sql["look_at_accounts"], {"tenants": list(tenants)})
    found = [
        Found(kind=Kind(kind), subject=subject, detail=detail)
        for kind, subject, detail in await cursor.fetchall()
    ]
    return Look(found=found, judged=frozenset(tenants))


async def unverified(conn: Connection, *, limit: int) -> list[str]:
    """Accounts with entries that nobody has verified, those with most of them first."""
    cursor = await conn.execute(_sql["unverified"], {"limit": limit})
    return [str(tenant_id) for (tenant_id,) in await cursor.fetchall()]


async def verify_entries(
    conn: Connection, tenants: Collection[str], *, lines: int
) -> tuple[list[Found], bool]:
    """The next entries of each account, once and for all; and whether there are more."""
    parameters = {"tenants": list(tenants), "lines": lines}
    rows = await (await conn.execute(_sql["verify_entries"], parameters)).fetchall()
    found = [
        Found(kind=Kind(kind), subject=subject, detail=detail)
        for kind, subject, detail, _ in rows
        if kind
    ]
    return found, any(behind for *_, behind in rows)


async def look_at_states(conn: Connection, *, request_ms_max: int) -> list[Found]:
    """Old reservations and gateways' spools, at most `STATES_MAX` of each kind."""
    parameters = {"request_ms_max": request_ms_max, "limit": STATES_MAX}
    async with conn.cursor(row_factory=struct_row(Found)) as cursor:
        await cursor.execute(_sql["look_at_states"], parameters)
        return await cursor.fetchall()


async def misposted(conn: Connection, request_ids: Collection[str]) -> dict[str, str]:
    """Those whose entries do not add up to their bill, and why each must not be recounted.

    A recount posts the difference from the bill that the row holds: where that was never
    posted, it would post a wrong amount.
    """
    try:
        async with conn.transaction():
            await conn.execute(_sql["hurry"], {"timeout_ms": str(POSTED_TIMEOUT_MS)})
            cursor = await conn.execute(_sql["posted"], {"request_ids": list(request_ids)})
            rows: list[Any] = await cursor.fetchall()
    except psycopg.errors.QueryCanceled:
        return dict.fromkeys(request_ids, "its entries could not be added up in time")
    return {
        request_id: f"billed {billed}, but its entries have posted {posted}"
        for request_id, billed, posted in rows
        if billed != posted
    }


async def recount(conn: Connection, request_ids: Collection[str]) -> None:
    """Have the ledger work these bills out anew; it posts what differs. Locks their accounts."""
    await conn.execute(
        _sql["recount"], {"request_ids": list(request_ids), "billing_causes": BILLING_CAUSES}
    )


async def _cursor(conn: Connection, feed: Feed) -> tuple[datetime, str]:
    row = await (await conn.execute(_sql["cursor"], {"feed": feed})).fetchone()
    assert row is not None, "the migration made a row for each feed"
    return row[0], str(row[1])
