"""Months of usage: partitions made ahead, and dropped when they are old.

A month is dropped only when its sums hold all of it: nothing of it is open, every entry about
it is counted, and what its rows came to for each tenant is what the sums say. That is looked at
before, and again while the tables are locked, when nothing can happen any more; whatever
happened in between undoes the drop, to be tried again later. The sums stay.

The token path never waits for long: we wait a tenth of a second for the tables and then give
way, and hold them for as long as it takes to drop two tables and look once. DETACH …
CONCURRENTLY would not do: Postgres refuses it where there is a default partition.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from typing import Any

import msgspec

from store.postgres import Connection, Postgres, StoreAwayError
from store.queries import load

MONTHS_AHEAD = 3
# Between tries for tables that are always in somebody's use for moments.
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)

_sql = load("retention")


class NotYetError(Exception):
    """The month has to stay for now; the message says why. Nothing was changed."""


class Retired(msgspec.Struct, frozen=True, kw_only=True):
    """A month whose requests are gone."""

    month: int  # yyyymm
    requests: int


async def make_partitions(
    pg: Postgres, *, first: date | None = None, months_ahead: int = MONTHS_AHEAD
) -> int:
    """For the month of `first` (this one) and those after it; returns how many were made.

    Raises:
        StoreAwayError: Also when somebody held the tables each time. Repeat it later.
    """
    bounds = {"first": first, "months": 1 + months_ahead}
    for pause_s in PAUSES_S:
        with suppress(StoreAwayError):
            return await _make_partitions(pg, bounds)
        await asyncio.sleep(pause_s)
    return await _make_partitions(pg, bounds)


async def _make_partitions(pg: Postgres, bounds: dict[str, Any]) -> int:
    async with pg.transaction() as conn:
        await conn.execute(_sql["give_way"])
        row = await (await conn.execute(_sql["make_partitions"], bounds)).fetchone()
        assert row is not None, "a function has an answer"
        return int(row[0])


async def old_months(conn: Connection, *, kept_months: int) -> list[int]:
    """Months with rows to drop where so many whole months are kept beside the current one."""
    cursor = await conn.execute(_sql["old_months"], {"kept_months": kept_months})
    return [int(month) for (month,) in await cursor.fetchall()]


async def retire_month(pg: Postgres, month: int) -> Retired | None:
    """Drop a month's requests and witnesses; None when somebody else is at it, or it is gone.

    It reads all of the month's rows first, so `pg` is one with long bounds.

    Raises:
        NotYetError: It is not wholly in the sums.
        StoreAwayError: Also when somebody held the tables for long. Repeat it.
    """
    async with pg.transaction() as conn:
        row = await (await conn.execute(_sql["only_us"])).fetchone()
        if row != (True,):
            return None
        await _nothing_outstanding(conn, month)
        standing = await (await conn.execute(_sql["standing"], {"month": month})).fetchall()
        # Once more, for what came before `standing` was read: from there on `disturbed` tells.
        await _nothing_outstanding(conn, month)
        await conn.execute(_sql["give_way"])
        row = await (await conn.execute(_sql["drop_month"], {"month": month})).fetchone()
        assert row is not None, "a function has an answer"
        if row[0] is None:
            return None
        await _undisturbed(conn, month, standing)
        return Retired(month=month, requests=row[0])


async def _nothing_outstanding(conn: Connection, month: int) -> None:
    row = await (await conn.execute(_sql["outstanding"], {"month": month})).fetchone()
    assert row is not None, "an aggregate has a row"
    if any(row):
        raise NotYetError(f"{month}: {row[0]} open requests, {row[1]} entries not in the sums")


async def _undisturbed(conn: Connection, month: int, standing: Sequence[tuple[Any, ...]]) -> None:
    """Raises NotYetError, which undoes the drop."""
    await conn.execute(_sql["be_quick"])
    columns = zip(*standing, strict=True) if standing else ((),) * 5
    names = ("tenants", "entries", "requests", "billed", "adjusted")
    seen = {name: list(column) for name, column in zip(names, columns, strict=True)}
    cursor = await conn.execute(_sql["disturbed"], {**seen, "month": month})
    if disturbed := [tenant_id for (tenant_id,) in await cursor.fetchall()]:
        raise NotYetError(f"{month}: it changed meanwhile, or its sums are off: {disturbed}")
