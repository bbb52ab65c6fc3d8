"""What `usage_queries` asks: each kind of question that people have about usage."""

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.usage_fill import tenant_name
from store.postgres import Postgres
from store.usage import Place, UsageFilter, usage_of, usage_page
from store.usage_totals import DAY_MS, TotalsQuery, usage_totals

Question = Callable[["Bench", random.Random], Awaitable[object]]


class Bench:
    """The database, what is in it, and who may ask."""

    def __init__(self, url: str, pg: Postgres, months: Sequence[int], tenants: int) -> None:
        self.url = url
        self.pg = pg
        self.months = months
        self.tenants = tenants
        year, number = divmod(months[0], 100)
        self.from_ms = int(datetime(year, number, 1, tzinfo=UTC).timestamp()) * 1000
        year, number = divmod(months[-1] + 1 if months[-1] % 100 < 12 else months[-1] + 89, 100)
        self.to_ms = int(datetime(year, number, 1, tzinfo=UTC).timestamp()) * 1000

    def at(self, dice: random.Random) -> int:
        """Some moment of the filled months."""
        return dice.randrange(self.from_ms, self.to_ms)


def page(**shown: Any) -> Question:
    """A page of a hundred from anywhere in the past; `shown` may name what to draw."""

    async def ask(bench: Bench, dice: random.Random) -> object:
        values = {name: draw(bench, dice) for name, draw in shown.items()}
        async with bench.pg.connection() as conn:
            return await usage_page(conn, UsageFilter(**values), Place(bench.at(dice)))

    return ask


def totals(days: int, bucket: Any, by: Sequence[Any] = (), **shown: Any) -> Question:
    """Totals of so many days up to now; 0 is all that there is."""

    async def ask(bench: Bench, dice: random.Random) -> object:
        from_ms = bench.to_ms - days * DAY_MS if days else bench.from_ms
        query = TotalsQuery(
            from_ms=from_ms,
            to_ms=bench.to_ms,
            bucket=bucket,
            by=frozenset(by),
            **{name: draw(bench, dice) for name, draw in shown.items()},
        )
        async with bench.pg.connection() as conn:
            return await usage_totals(conn, query, limit=1000)

    return ask


async def one_request(bench: Bench, dice: random.Random) -> object:
    async with bench.pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT request_id FROM usage WHERE tenant_id = %s AND created_ms >= %s LIMIT 1",
            (a_tenant(bench, dice), bench.at(dice) - 40 * DAY_MS),
        )
        row = await cursor.fetchone()
        start = time.monotonic()
        await usage_of(conn, row[0] if row else "req_none")
        return start


def a_tenant(bench: Bench, dice: random.Random) -> str:
    """Large and small ones, as their requests have it."""
    return tenant_name(int((bench.tenants + 1) ** dice.random()))


def the_largest(_bench: Bench, _dice: random.Random) -> str:
    return tenant_name(1)


def a_key(bench: Bench, dice: random.Random) -> str:
    return f"key_{int((bench.tenants + 1) ** dice.random())}_{dice.randrange(2)}"


def always(value: str) -> Callable[[Bench, random.Random], str]:
    return lambda _bench, _dice: value


QUESTIONS: dict[str, Question] = {
    "request: by id": one_request,
    "page: a tenant's": page(tenant_id=a_tenant),
    "page: the largest tenant's": page(tenant_id=the_largest),
    "page: everybody's": page(),
    "page: a key's": page(key_id=a_key),
    "page: a model's": page(model=always("model_2")),
    "page: a version's": page(version=always("v1_of_model_3")),
    "page: cause failed (0.9 %)": page(cause=always("failed")),
    "page: cause expired (0.1 %)": page(cause=always("expired")),
    "page: the largest tenant's expired": page(tenant_id=the_largest, cause=always("expired")),
    "totals: a tenant, this day by hour": totals(1, "hour", tenant_id=a_tenant),
    "totals: a tenant, 30 days by day, key, model": totals(
        30, "day", ["key", "model"], tenant_id=a_tenant
    ),
    "totals: the largest tenant, 30 days by hour": totals(30, "hour", tenant_id=the_largest),
    "totals: a key, 30 days by day": totals(30, "day", key_id=a_key),
    "totals: everybody, one day by hour": totals(1, "hour"),
    "totals: everybody, 30 days by day and model": totals(30, "day", ["model"]),
    "totals: everybody, 30 days by tenant": totals(30, "", ["tenant"]),
    "totals: everybody, all months by month and tenant": totals(0, "month", ["tenant"]),
}
