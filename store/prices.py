"""Price versions. A version never changes: a new price is a new version with its own start.

Usage rows name the version they were priced at, so that a later price changes no past bill.
"""

from collections.abc import Sequence

import msgspec

from core.money import Price
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("prices")


class ListedPrice(msgspec.Struct, frozen=True, kw_only=True):
    """A price version, the model it is for, and the Unix millisecond it starts at."""

    model: str
    effective_ms: int
    price: Price


class PriceConflictError(Exception):
    """A price version of this id exists with other contents."""


class _PriceRow(Price, frozen=True, kw_only=True):
    model: str
    effective_ms: int

    def listed(self) -> ListedPrice:
        fields = {name: getattr(self, name) for name in Price.__struct_fields__}
        return ListedPrice(model=self.model, effective_ms=self.effective_ms, price=Price(**fields))


async def seed_prices(conn: Connection, prices: Sequence[ListedPrice]) -> None:
    """Add what is missing. Raises PriceConflictError when a version differs from ours."""
    for listed in prices:
        row = {
            **msgspec.structs.asdict(listed.price),
            "model": listed.model,
            "effective_ms": listed.effective_ms,
        }
        await conn.execute(_sql["add_price"], row)
        if await _one(conn, "price_by_id", {"id": listed.price.id}) != listed:
            raise PriceConflictError(listed.price.id)


async def price_by_id(conn: Connection, price_id: str) -> Price | None:
    """The version that a usage row names."""
    listed = await _one(conn, "price_by_id", {"id": price_id})
    return None if listed is None else listed.price


async def current_price(conn: Connection, model: str, at_ms: int) -> Price | None:
    """The version in effect at `at_ms`. None: the model has no price yet, and is not sold."""
    listed = await _one(conn, "current_price", {"model": model, "at_ms": at_ms})
    return None if listed is None else listed.price


async def price_list(conn: Connection) -> list[ListedPrice]:
    """Every version, by model and start."""
    async with conn.cursor(row_factory=struct_row(_PriceRow)) as cursor:
        await cursor.execute(_sql["price_list"])
        return [row.listed() for row in await cursor.fetchall()]


async def _one(
    conn: Connection, statement: str, parameters: dict[str, object]
) -> ListedPrice | None:
    async with conn.cursor(row_factory=struct_row(_PriceRow)) as cursor:
        await cursor.execute(_sql[statement], parameters)
        row = await cursor.fetchone()
        return row.listed() if row is not None else None
