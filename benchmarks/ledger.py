"""How fast the group commit is, beside one statement for each command: `make bench-ledger`.

    python -m benchmarks.ledger [--rounds 3] [--seconds 5] [--only hot,many,close,latency]

It starts a Postgres of its own, with fsync, and measures on it, in turns so that both ways meet
the same disk and tables; figures are medians over the rounds. README.md says how to read them.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import version
from typing import Any

import uvloop

from benchmarks.ledger_load import POOL, PRICE, WAYS, Pair, Way, drive
from benchmarks.own_postgres import SETTINGS, own_postgres
from core.pricing import ListedPrice
from store import migrate
from store.accounts import open_account
from store.ledger_audit import audit
from store.postgres import Postgres, PostgresConfig
from store.prices import seed_prices

TENANTS = 1_000
CONCURRENT = 128
LATENCY_AT = (1, 32, 512)
WARMUP_S = 0.5
HOLD_FROM_S, HOLD_TO_S = 0.2, 0.6  # of a run: while a billing close holds the hot account
WINDOW_S = 0.1  # in which a recovery is looked for

Figures = dict[str, float]
Run = Callable[["Bench", Way], Coroutine[Any, Any, Figures]]


class Bench:
    """The database, its tenants, and how long a run takes."""

    def __init__(self, url: str, pg: Postgres, tenants: Sequence[str], seconds: float) -> None:
        self.url = url
        self.pg = pg
        self.tenants = tenants
        self.hot = tenants[0]
        self.seconds = seconds


async def open_bench(url: str, seconds: float) -> Bench:
    config = PostgresConfig(
        database_url=url,
        application_name="bench",
        statement_timeout_ms=600_000,
        transaction_timeout_s=600.0,
    )
    pg = await Postgres.open(config)
    tenants = [f"ten_{secrets.token_hex(12)}" for _ in range(TENANTS)]
    async with pg.transaction() as conn:
        await seed_prices(conn, [ListedPrice(model="bench", effective_ms=0, price=PRICE)])
        for name in tenants:
            await conn.execute(
                "INSERT INTO tenants (id, name, salt, version) VALUES (%s, %s, %s, 0)",
                (name, name, secrets.token_bytes(16)),
            )
            await open_account(conn, name, 10**15)
    return Bench(url, pg, tenants, seconds)


async def hot(bench: Bench, way: Way) -> Figures:
    """Every caller is of one tenant."""
    return rate(await drive(way, [bench.hot], CONCURRENT, bench.seconds), bench.seconds)


async def many(bench: Bench, way: Way) -> Figures:
    """Every caller goes round its share of the tenants."""
    return rate(await drive(way, bench.tenants, CONCURRENT, bench.seconds), bench.seconds)


async def close(bench: Bench, way: Way) -> Figures:
    """Half of the callers are of one tenant, whose account somebody holds for a while."""
    begins, ends = HOLD_FROM_S * bench.seconds, HOLD_TO_S * bench.seconds
    others = bench.tenants[1 : 1 + CONCURRENT // 2]
    held, of_hot, of_others = await asyncio.gather(
        hold(bench, begins, ends),
        drive(way, [bench.hot], CONCURRENT // 2, bench.seconds),
        drive(way, others, CONCURRENT // 2, bench.seconds),
    )
    return {
        "others_before_per_s": between(of_others, 0, begins),
        "others_held_per_s": between(of_others, begins, ends),
        "others_after_per_s": between(of_others, ends, bench.seconds),
        "hot_before_per_s": between(of_hot, 0, begins),
        "hot_held_per_s": between(of_hot, begins, ends),
        "hot_after_per_s": between(of_hot, ends, bench.seconds),
        "others_longest_ms": max(
            (pair.reserve_ms + pair.settle_ms for pair in of_others), default=0.0
        ),
        "hot_back_after_ms": recovery_ms(of_hot, held, between(of_hot, 0, begins)),
    }


async def hold(bench: Bench, begins: float, ends: float) -> float:
    """Lock the account as a billing close would; returns when it was let go."""
    start = time.monotonic()
    await asyncio.sleep(begins)
    async with bench.pg.transaction() as conn:
        await conn.execute(
            "SELECT FROM accounts WHERE tenant_id = %s FOR NO KEY UPDATE", (bench.hot,)
        )
        await asyncio.sleep(ends - (time.monotonic() - start))
    return time.monotonic() - start


def latency_at(concurrency: int) -> Run:
    async def latency(bench: Bench, way: Way) -> Figures:
        pairs = await drive(way, [bench.hot], concurrency, bench.seconds / 2)
        reserves = sorted(pair.reserve_ms for pair in pairs)
        settles = sorted(pair.settle_ms for pair in pairs)
        return {
            "reserve_p50_ms": reserves[len(reserves) // 2],
            "reserve_p99_ms": reserves[len(reserves) * 99 // 100],
            "settle_p50_ms": settles[len(settles) // 2],
            "settle_p99_ms": settles[len(settles) * 99 // 100],
            "pairs_per_s": len(pairs) / (bench.seconds / 2),
        }

    return latency


SCENARIOS: dict[str, Run] = {
    "hot": hot,
    "many": many,
    "close": close,
    **{f"latency_{n}": latency_at(n) for n in LATENCY_AT},
}


def rate(pairs: list[Pair], seconds: float) -> Figures:
    return {"pairs_per_s": between(pairs, 0, seconds)}


def between(pairs: list[Pair], begins: float, ends: float) -> float:
    return sum(begins <= pair.done_s < ends for pair in pairs) / (ends - begins)


def recovery_ms(pairs: list[Pair], released: float, before: float) -> float:
    """From the release until the hot tenant is at nine tenths of its rate before; -1 if never."""
    last = max((pair.done_s for pair in pairs), default=0.0)
    at = released
    while at + WINDOW_S <= last:
        if between(pairs, at, at + WINDOW_S) >= 0.9 * before:
            return (at - released) * 1e3
        at += WINDOW_S / 10
    return -1.0


async def measure(bench: Bench, scenario: Run, rounds: int) -> dict[str, Figures]:
    """Both ways in turn, the first alternating; the median of each figure."""
    found: dict[str, list[Figures]] = {name: [] for name in WAYS}
    for n in range(rounds):
        for name in list(WAYS)[:: -1 if n % 2 else 1]:
            async with bench.pg.transaction() as conn:
                await conn.execute("CHECKPOINT")
            async with WAYS[name](bench.url) as way:
                await drive(way, [bench.hot], CONCURRENT, WARMUP_S)
                found[name].append(await scenario(bench, way))
    return {
        name: {
            figure: round(statistics.median(run[figure] for run in runs), 2) for figure in runs[0]
        }
        for name, runs in found.items()
    }


async def run(url: str, given: argparse.Namespace) -> dict[str, Any]:
    bench = await open_bench(url, given.seconds)
    only = given.only.split(",") if given.only else list(SCENARIOS)
    results: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        if any(name.startswith(wanted) for wanted in only):
            results[name] = await measure(bench, scenario, given.rounds)
            print(f"measured: {name}", file=sys.stderr)
    async with bench.pg.connection() as conn:
        row = await (await conn.execute("SHOW server_version")).fetchone()
        assert row is not None
        violations = (await audit(conn)).violations
    await bench.pg.close()
    return {
        "results": results,
        "audit_violations": len(violations),
        "rounds": given.rounds,
        "seconds": given.seconds,
        "concurrent": CONCURRENT,
        "tenants": TENANTS,
        "pool": POOL,
        "cores": os.cpu_count(),
        "postgres": row[0],
        "settings": SETTINGS,
        "psycopg": version("psycopg"),
        "python": sys.version.split()[0],
    }


def table(results: dict[str, dict[str, Figures]]) -> str:
    """A row for each figure: both ways, and how many times as much the group commit is."""
    lines = [f"{'':36}{'grouped':>12}{'one each':>12}{'ratio':>8}"]
    for scenario, ways in results.items():
        for figure, value in ways["grouped"].items():
            other = ways["one_each"][figure]
            ratio = f"{value / other:.2f}" if other > 0 else "-"
            lines.append(f"{scenario + ' ' + figure:36}{value:>12,.1f}{other:>12,.1f}{ratio:>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default="", help="scenarios, by comma; all of them otherwise")
    given = parser.parse_args()
    with own_postgres() as url:
        migrate.upgrade(url)
        found = uvloop.run(run(url, given))
    print(json.dumps(found))
    print(table(found["results"]), file=sys.stderr)


if __name__ == "__main__":
    main()
