"""Requests as people read them: open and ended, one by its id or a page of them, newest first.

A page costs what it shows, however many rows there are. One tenant's come by the one index
that the token path keeps. Any other filter is answered from the sums, which know in which hours
of which tenants there is something to find; so what such a page shows of ended requests is as
fresh as the sums are.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from core.money import EndCause
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

PAGE_MAX = 1_000
EVER_MS = 2**53 - 1
HOUR_MS = 3_600_000
SEARCHES_MAX = 8  # for one page, where hours hold fewer rows than the sums say

_sql = load("usage")


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and micro-units are totals; times are Unix or elapsed milliseconds."""

    request_id: str
    tenant_id: str
    key_id: str
    gateway_id: str
    model: str
    version: str
    region: str
    service_class: str
    dialect: str
    endpoint: str
    stream: bool
    price_id: str
    prompt_tokens: int  # as the gateway counted them
    max_tokens: int  # for each choice
    choices: int
    amount_micro: int  # asked for at first
    floor_micro: int | None  # or at least this much
    reserved_micro: int  # reserved in all, top-ups included
    state: str  # open | settled
    cause: EndCause | None
    settled_by: str | None  # gateway | sweeper, whose word is provisional
    attempts: int
    metered_prompt_tokens: int
    metered_cached_tokens: int
    metered_cache_write_5m_tokens: int
    metered_cache_write_1h_tokens: int
    metered_output_tokens: int
    metered_reasoning_tokens: int
    accepted_tokens: int  # of the metered output, what the gateway says it accepted
    delivered_tokens: int
    billed_micro: int  # by the policy
    adjusted_micro: int  # by operators since; the request costs the sum of both
    bill_limit_micro: int | None  # what a hard cap has cut the bill to
    queue_ms: float | None
    prefill_ms: float | None
    first_token_ms: float | None
    inter_token_ms: float | None
    total_ms: float | None
    created_ms: int
    ended_ms: int | None


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What to show. "" is any; from `from_ms` on, which is included."""

    tenant_id: str = ""
    key_id: str = ""
    model: str = ""
    version: str = ""
    cause: str = ""  # leaves out open requests
    from_ms: int = 0

    @property
    def is_by_time(self) -> bool:
        """Everybody's, whatever they are."""
        return not (self.tenant_id or self.key_id or self.model or self.version or self.cause)

    @property
    def is_of_a_tenant(self) -> bool:
        """One tenant's, whatever they are."""
        return self.tenant_id != "" and not (
            self.key_id or self.model or self.version or self.cause
        )


class Place(msgspec.Struct, frozen=True, order=True):
    """Between two rows. Many requests begin in one millisecond, so an id is a part of it."""

    before_ms: int = EVER_MS
    before_id: str = ""


class UsagePage(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first. `older` is where the next page begins, None at the end."""

    rows: list[UsageRow]
    older: Place | None


async def usage_of(conn: Connection, request_id: str) -> UsageRow | None:
    """One request's row."""
    rows = await _rows(conn, "usage_of", {"request_id": request_id})
    return rows[0] if rows else None


async def usage_page(
    conn: Connection, shown: UsageFilter, place: Place | None = None, *, limit: int = 100
) -> UsagePage:
    """Requests before the place, at most `limit`; with an odd filter perhaps fewer, before the end.

    It opens a transaction of its own on the connection.
    """
    place = place or Place()
    limit = min(limit, PAGE_MAX)
    async with _planned(conn):
        if shown.is_of_a_tenant:
            rows = await _rows(conn, "usage_page_of_tenant", _values(shown, place, limit))
            return UsagePage(rows=rows, older=_last(rows) if len(rows) == limit else None)
        return await _search(conn, shown, place, limit)


async def _search(conn: Connection, shown: UsageFilter, place: Place, limit: int) -> UsagePage:
    """Hour by hour backwards, as many at a time as should hold what is asked for."""
    rows: list[UsageRow] = []
    for _ in range(SEARCHES_MAX):
        values = _values(shown, place, limit - len(rows))
        row = await (await conn.execute(_sql["hours_to_search"], values)).fetchone()
        assert row is not None, "an aggregate has a row"
        hours, are_all = row
        values["hours"] = [*hours, place.before_ms - place.before_ms % HOUR_MS]
        down_to_ms = shown.from_ms if are_all else max(shown.from_ms, min(hours))
        values["open_from_ms"] = down_to_ms
        rows += await _rows(conn, "usage_page_found", values)
        if len(rows) == limit:
            return UsagePage(rows=rows, older=_last(rows))
        if down_to_ms == shown.from_ms:
            return UsagePage(rows=rows, older=None)
        place = Place(down_to_ms)
    return UsagePage(rows=rows, older=place)


@asynccontextmanager
async def _planned(conn: Connection) -> AsyncIterator[None]:
    async with conn.transaction():
        await conn.execute(_sql["plan_for_each"])
        yield


def _values(shown: UsageFilter, place: Place, limit: int) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(shown),
        **msgspec.structs.asdict(place),
        "by_time": shown.is_by_time,
        "limit": limit,
    }


def _last(rows: list[UsageRow]) -> Place:
    return Place(rows[-1].created_ms, rows[-1].request_id)


async def _rows(conn: Connection, statement: str, values: dict[str, Any]) -> list[UsageRow]:
    async with conn.cursor(row_factory=struct_row(UsageRow)) as cursor:
        await cursor.execute(_sql[statement], values)
        return await cursor.fetchall()
