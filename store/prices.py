"""Price versions. A version never changes: a new price is a new version with its own start.

Usage rows name the version they were priced at, so that a later price changes no past bill.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import psycopg

from core.money import Price
from core.pricing import ListedPrice, PriceTable
from store.changes import next_change
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_SCOPE = ("book", "model", "tier", "service_class", "effective_ms")

_sql = load("prices")


class PriceBook(msgspec.Struct, frozen=True, kw_only=True):
    """A name for what some tenants pay."""

    id: str
    description: str


class PriceConflictError(Exception):
    """Another version stands where this one was to be."""


async def seed_prices(conn: Connection, prices: Sequence[ListedPrice]) -> None:
    """Add what is missing. Raises PriceConflictError when a version differs from ours."""
    for listed in prices:
        standing = await add_price(conn, listed)
        if standing is not None and standing != listed:
            raise PriceConflictError(standing.price.id)


async def add_price(conn: Connection, listed: ListedPrice) -> ListedPrice | None:
    """None: it is added. Otherwise nothing was, and this version stands in its place.

    Whoever adds another waits until this transaction ends.
    """
    row = msgspec.structs.asdict(listed)
    row |= msgspec.structs.asdict(row.pop("price"))
    added = await conn.execute(_sql["add_price"], row)
    if added.rowcount:
        await next_change(conn, "routing")  # gateways read prices again when it rises
        return None
    place = ("id", "book", "model", "tier", "service_class", "effective_ms")
    standing = await _one(conn, "price_in_place", {name: row[name] for name in place})
    assert standing is not None, "versions are never deleted"
    return standing


async def other_currency(conn: Connection, currency: str) -> str | None:
    """One that some price is in, though it is not `currency`."""
    row = await (await conn.execute(_sql["other_currency"], {"currency": currency})).fetchone()
    return None if row is None else str(row[0])


async def price_by_id(conn: Connection, price_id: str) -> Price | None:
    """The version that a usage row names."""
    listed = await _one(conn, "price_by_id", {"id": price_id})
    return None if listed is None else listed.price


async def current_price(
    conn: Connection, *, book: str, model: str, tier: str, service_class: str, at_ms: int
) -> Price | None:
    """As `core.pricing.PriceTable.resolve`, from all versions there are."""
    request = {
        "book": book,
        "model": model,
        "tier": tier,
        "service_class": service_class,
        "at_ms": at_ms,
    }
    listed = await _one(conn, "current_price", request)
    return None if listed is None else listed.price


async def price_list(
    conn: Connection, *, book: str = "", model: str = "", tier: str = "", service_class: str = ""
) -> list[ListedPrice]:
    """Every version, by what it is for and its start; a filter narrows to exactly that."""
    wanted = {"book": book, "model": model, "tier": tier, "service_class": service_class}
    return await _listed(conn, "price_list", wanted)


async def prices_in_view(conn: Connection) -> PriceTable:
    """Of all public names with a route: what is in force, was an hour ago, or is to come."""
    cursor = await conn.execute(_sql["prices_in_view"])
    rows = await cursor.fetchall()
    # There may be tens of thousands, and tokens are on their way meanwhile.
    return await asyncio.to_thread(lambda: PriceTable(_versions(_columns(cursor), rows)))


async def create_book(conn: Connection, book: PriceBook) -> bool:
    """False when the id is taken: nothing was made."""
    made = await conn.execute(_sql["create_book"], msgspec.structs.asdict(book))
    return made.rowcount == 1


async def price_books_page(conn: Connection, *, after: str = "", limit: int) -> list[PriceBook]:
    """In order of id, after `after`."""
    async with conn.cursor(row_factory=struct_row(PriceBook)) as cursor:
        await cursor.execute(_sql["price_books_page"], {"after": after, "limit": limit})
        return await cursor.fetchall()


async def _listed(
    conn: Connection, statement: str, parameters: Mapping[str, object]
) -> list[ListedPrice]:
    cursor = await conn.execute(_sql[statement], parameters)
    return _versions(_columns(cursor), await cursor.fetchall())


async def _one(
    conn: Connection, statement: str, parameters: Mapping[str, object]
) -> ListedPrice | None:
    found = await _listed(conn, statement, parameters)
    return found[0] if found else None


def _columns(cursor: psycopg.AsyncCursor[tuple[Any, ...]]) -> list[str]:
    return [column.name for column in cursor.description or ()]


def _versions(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> list[ListedPrice]:
    """A row holds what a version is for, and then the version itself."""
    versions = []
    for values in rows:
        rates = dict(zip(columns, values, strict=True))
        scope = {name: rates.pop(name) for name in _SCOPE}
        versions.append(msgspec.convert({**scope, "price": rates}, ListedPrice))
    return versions
