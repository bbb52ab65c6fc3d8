"""How fast questions about usage are answered, and what they cost the token path.

    python -m benchmarks.usage_queries [--rows 10000000] [--tenants 1000] [--months 3]
                                       [--rounds 5] [--seconds 6] [--url DATABASE_URL]

It starts a Postgres of its own, with fsync, fills it, and prints: each kind of question with its
times and plan; reserve+settle pairs per second alone and beside questions and the roll-up, in
turns; and what a month's drop did to them. README.md says how to read them.
"""

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import psycopg
import uvloop

from benchmarks.ledger_load import PRICE
from benchmarks.own_postgres import SETTINGS, own_postgres
from benchmarks.usage_beside import drop, token_path
from benchmarks.usage_fill import fill_month, tenant_name
from benchmarks.usage_questions import QUESTIONS, Bench
from core.pricing import ListedPrice
from store import migrate
from store.accounts import open_account
from store.postgres import Connection, Postgres, PostgresConfig
from store.prices import seed_prices
from store.queries import load
from store.usage import HOUR_MS
from store.usage_totals import DAY_MS

EACH = 40  # times that a question is asked


def months_back(count: int) -> list[int]:
    """The months before this one, oldest first, as yyyymm."""
    now = datetime.now(UTC)
    return [
        (at := now.year * 12 + now.month - 1 - back) // 12 * 100 + at % 12 + 1
        for back in range(count, 0, -1)
    ]


# ------------------------------------------------------------------------------------- filling

# Those that are quicker to make when all is there.
SUMS_INDEXES = """
SELECT i.indexrelid::regclass::text, replace(pg_get_indexdef(i.indexrelid), ' ON ONLY ', ' ON ')
FROM pg_index AS i LEFT JOIN pg_inherits AS h ON h.inhrelid = i.indexrelid
WHERE i.indrelid IN ('usage_sums'::regclass, 'usage_hourly'::regclass, 'usage_daily'::regclass)
  AND NOT i.indisprimary AND h.inhrelid IS NULL
"""


def fill(url: str, months: Sequence[int], rows: int, tenants: int) -> dict[str, float]:
    """Two months at a time."""
    start = time.monotonic()
    waiting = list(months)
    share = rows // len(months)

    def work() -> None:
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("SET synchronous_commit = off; SET work_mem = '256MB'")
            while waiting:
                fill_month(conn, waiting.pop(), rows=share, tenants=tenants)

    threads = [threading.Thread(target=work) for _ in range(2)]
    with psycopg.connect(url, autocommit=True) as conn:
        indexes = conn.execute(SUMS_INDEXES).fetchall()
        for name, _ in indexes:
            conn.execute(f"DROP INDEX {name}".encode())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _, definition in indexes:
            conn.execute(definition)
        filled = time.monotonic()
        conn.execute("VACUUM ANALYZE")
    return {"fill_s": filled - start, "vacuum_s": time.monotonic() - filled}


async def open_bench(url: str, months: Sequence[int], tenants: int) -> Bench:
    pg = await Postgres.open(
        PostgresConfig(
            database_url=url,
            application_name="bench",
            statement_timeout_ms=600_000,
            transaction_timeout_s=600.0,
        )
    )
    async with pg.transaction() as conn:
        await seed_prices(conn, [ListedPrice(model="bench", effective_ms=0, price=PRICE)])
        for rank in range(1, tenants + 1):
            await conn.execute(
                "INSERT INTO tenants (id, name, salt, version) VALUES (%s, %s, %s, 0)",
                (tenant_name(rank), tenant_name(rank), bytes(16)),
            )
            await open_account(conn, tenant_name(rank), 10**15)
    return Bench(url, pg, months, tenants)


# ----------------------------------------------------------------------------------- questions


async def ask_each(bench: Bench) -> dict[str, dict[str, float]]:
    """One after the other, with nothing beside it. The first of each kind warms the cache."""
    dice = random.Random(1)  # noqa: S311 - the same questions each time
    found = {}
    for name, question in QUESTIONS.items():
        await question(bench, dice)
        times_ms = []
        for _ in range(EACH):
            start = time.monotonic()
            began = await question(bench, dice)
            start = began if isinstance(began, float) else start
            times_ms.append((time.monotonic() - start) * 1e3)
        times_ms.sort()
        found[name] = {
            "p50_ms": round(statistics.median(times_ms), 2),
            "p99_ms": round(times_ms[-1], 2),
        }
    return found


# --------------------------------------------------------------------------------------- plans


async def plans(bench: Bench) -> dict[str, str]:
    """Of the statements behind the questions, as carried out for one of each kind."""
    dice = random.Random(2)  # noqa: S311 - the same pages each time
    search: dict[str, Any] = {
        "tenant_id": "",
        "key_id": "",
        "model": "",
        "version": "",
        "cause": "",
        "from_ms": 0,
        "before_ms": bench.at(dice),
        "before_id": "",
        "limit": 100,
    }
    dimensions = ("tenant", "key", "model", "version", "cause", "class")
    sums: dict[str, Any] = {
        **search,
        "span_ms": DAY_MS,
        "from_ms": bench.to_ms - 30 * DAY_MS,
        "to_ms": bench.to_ms,
        "bucket": "span",
        "by_time": False,
        "bounds_ms": [],
        "limit": 1000,
        **{f"by_{name}": name == "model" for name in dimensions},
        "after_ms": -1,
        **{f"after_{name}": "" for name in dimensions},
    }
    async with bench.pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT request_id FROM usage WHERE month = %s LIMIT 1", (bench.months[-1],)
        )
        row = await cursor.fetchone()
        assert row is not None
        found = {
            "usage_of": await plan(conn, "usage", "usage_of", {"request_id": row[0]}),
            "usage_page_of_tenant": await plan(
                conn, "usage", "usage_page_of_tenant", search | {"tenant_id": tenant_name(1)}
            ),
        }
        for name, shown in {
            "everybody": {},
            "a key": {"key_id": "key_50_1"},
            "a cause": {"cause": "expired"},
        }.items():
            values = search | shown | {"by_time": not shown}
            found[f"hours_to_search ({name})"] = await plan(
                conn, "usage", "hours_to_search", values
            )
            cursor = await conn.execute(load("usage")["hours_to_search"], values)
            row = await cursor.fetchone()
            assert row is not None
            values |= {"hours": row[0], "open_from_ms": values["before_ms"]}
            found[f"usage_page_found ({name})"] = await plan(
                conn, "usage", "usage_page_found", values
            )
        found["usage_totals (everybody, 30 days by day and model)"] = await plan(
            conn, "usage_totals", "usage_totals", sums
        )
        found["usage_totals (a tenant, 30 days by hour)"] = await plan(
            conn,
            "usage_totals",
            "usage_totals",
            sums | {"tenant_id": tenant_name(50), "span_ms": HOUR_MS},
        )
    return found


async def plan(conn: Connection, file: str, statement: str, values: dict[str, Any]) -> str:
    explain = b"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) "
    async with conn.transaction():
        await conn.execute(load("usage")["plan_for_each"])
        await conn.execute(load("usage_totals")["room_for_groups"])
        cursor = await conn.execute(explain + load(file)[statement], values)
        return "\n".join(line for (line,) in await cursor.fetchall())


async def sizes(bench: Bench) -> dict[str, Any]:
    async with bench.pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT (SELECT count(*) FROM usage),"
            " (SELECT count(*) FROM usage_hourly), (SELECT count(*) FROM usage_daily),"
            " (SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits"
            "  WHERE inhparent = 'usage'::regclass)::bigint,"
            " pg_total_relation_size('usage_hourly'), pg_total_relation_size('usage_daily'),"
            " current_setting('server_version')"
        )
        row = await cursor.fetchone()
    names = ("requests", "hourly", "daily", "requests_bytes", "hourly_bytes", "daily_bytes", "pg")
    assert row is not None
    return dict(zip(names, row, strict=True))


async def measure(url: str, given: argparse.Namespace) -> dict[str, Any]:
    months = months_back(given.months)
    filled = fill(url, months, given.rows, given.tenants)
    bench = await open_bench(url, months, given.tenants)
    try:
        return {
            "when": datetime.now(UTC).isoformat(timespec="minutes"),
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
            "settings": SETTINGS,
            "sizes": await sizes(bench),
            "filled": filled,
            "questions": await ask_each(bench),
            "plans": await plans(bench),
            "token_path": await token_path(bench, given.rounds, given.seconds),
            "drop": await drop(bench, given.seconds),
        }
    finally:
        await bench.pg.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--months", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--url", help="an empty database, instead of a Postgres of its own")
    given = parser.parse_args()
    with nullcontext(given.url) if given.url else own_postgres() as url:
        migrate.upgrade(url)
        found = uvloop.run(measure(url, given))
    for name, text in found.pop("plans").items():
        print(f"\n--- {name}\n{text}", file=sys.stderr)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
