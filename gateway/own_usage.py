"""What a tenant has used in a month, for itself: from the sums alone, and seldom read.

A key's month is remembered for some seconds, few are read at a time, and of a tenant's one: who
asks without pause keeps neither a connection nor its turn from anybody. With Postgres away the
answer is 503.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from core.errors import Code, refuse
from store.postgres import Connection, Postgres, StoreAwayError
from store.usage_totals import Dimension, Total, TotalsQuery, usage_totals

MODELS_MAX = 500  # told apart; the total has them all
KEPT_S = 5.0
KEPT_MAX = 1_000  # months of keys
READING_MAX = 2  # at a time, of different tenants

_AWAY = "Usage cannot be read at the moment. Please retry."


class Month(msgspec.Struct, frozen=True, kw_only=True):
    """Unix milliseconds, UTC; the end is the start of the next."""

    start_ms: int
    end_ms: int


class MonthUsage(msgspec.Struct, frozen=True, kw_only=True):
    """None where nothing has ended yet. `models` are the first `MODELS_MAX` by name."""

    month: Month
    as_of_ms: int
    total: Total | None
    key: Total | None
    models: tuple[Total, ...]


def month_of(year: int, month: int) -> Month:
    """Of a calendar that ends in the year 9998."""
    start = datetime(year, month, 1, tzinfo=UTC)
    end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return Month(start_ms=int(start.timestamp() * 1000), end_ms=int(end.timestamp() * 1000))


_Name = tuple[str, str, Month]  # a tenant, its key


class OwnUsage:
    """One for each gateway. `clock_s` is monotonic."""

    def __init__(self, postgres: Postgres, clock_s: Callable[[], float]) -> None:
        self._postgres = postgres
        self._clock_s = clock_s
        self._kept: OrderedDict[_Name, tuple[float, MonthUsage]] = OrderedDict()
        self._reading: dict[_Name, asyncio.Task[MonthUsage]] = {}

    async def of(self, tenant_id: str, key_id: str, month: Month) -> MonthUsage:
        """As of some seconds ago at most, and as fresh as the sums. Raises RefusedError."""
        name = (tenant_id, key_id, month)
        known = self._kept.get(name)
        if known is not None and self._clock_s() - known[0] < KEPT_S:
            return known[1]
        reading = self._reading.get(name)
        if reading is None:
            if tenant_id in self.under_way or len(self._reading) >= READING_MAX:
                raise refuse(Code.OVERLOADED, _AWAY)
            reading = self._reading[name] = asyncio.create_task(self._read(name))
            reading.add_done_callback(lambda done: self._forget(name, done))
        try:
            return await asyncio.shield(reading)
        except StoreAwayError as error:
            raise refuse(Code.UNAVAILABLE, _AWAY) from error

    @property
    def under_way(self) -> tuple[str, ...]:
        """Tenants whose months are being read."""
        return tuple(tenant_id for tenant_id, _, _ in self._reading)

    async def _read(self, name: _Name) -> MonthUsage:
        async with self._postgres.connection() as conn:
            usage = await _read(conn, *name)
        self._kept[name] = (self._clock_s(), usage)
        self._kept.move_to_end(name)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return usage

    def _forget(self, name: _Name, done: "asyncio.Task[MonthUsage]") -> None:
        del self._reading[name]
        if not done.cancelled():
            done.exception()  # whoever asked has left, or has heard of it


async def _read(conn: Connection, tenant_id: str, key_id: str, month: Month) -> MonthUsage:
    def query(by: frozenset[Dimension] = frozenset(), of_key: str = "") -> TotalsQuery:
        return TotalsQuery(
            from_ms=month.start_ms, to_ms=month.end_ms, by=by, tenant_id=tenant_id, key_id=of_key
        )

    # The oldest first: what comes in between makes a part no larger than the whole.
    models = await usage_totals(conn, query(frozenset({"model"})), limit=MODELS_MAX)
    key = await usage_totals(conn, query(of_key=key_id), limit=1)
    total = await usage_totals(conn, query(), limit=1)
    return MonthUsage(
        month=month,
        as_of_ms=models.freshness.fresh_as_of_ms,
        total=next(iter(total.totals), None),
        key=next(iter(key.totals), None),
        models=tuple(models.totals),
    )
