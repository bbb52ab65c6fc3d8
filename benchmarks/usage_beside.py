"""What questions, the roll-up and a month's drop do to the token path, for `usage_queries`."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.ledger_load import Pair, drive, grouped
from benchmarks.usage_fill import tenant_name
from benchmarks.usage_questions import QUESTIONS, Bench
from store.retention import retire_month
from store.rollups import freshness, roll_up

CONCURRENT = 64
ASK_EVERY_S = 0.25
ROLL_EVERY_S = 1.0


async def pairs(bench: Bench, seconds: float) -> list[Pair]:
    names = [tenant_name(rank) for rank in range(1, bench.tenants + 1)]
    async with grouped(bench.url) as way:
        return await drive(way, names, CONCURRENT, seconds)


async def busy(bench: Bench, seconds: float) -> tuple[list[Pair], dict[str, float]]:
    """Pairs, while one of all questions is asked four times a second and sums are kept."""
    until = time.monotonic() + seconds
    asked: list[float] = []
    rolled: list[tuple[int, float]] = []

    async def ask() -> None:
        dice = random.Random(3)  # noqa: S311 - the same load each time
        for n in range(10**9):
            if (start := time.monotonic()) > until:
                return
            await list(QUESTIONS.values())[n % len(QUESTIONS)](bench, dice)
            asked.append((time.monotonic() - start) * 1e3)
            await asyncio.sleep(max(0.0, ASK_EVERY_S - (time.monotonic() - start)))

    async def roll() -> None:
        while time.monotonic() < until:
            while True:
                start = time.monotonic()
                done = await roll_up(bench.pg)
                rolled.append((done.entries, time.monotonic() - start))
                if done.entries == 0:
                    break
            await asyncio.sleep(ROLL_EVERY_S)

    done, _, _ = await asyncio.gather(pairs(bench, seconds), ask(), roll())
    return done, {
        "questions": len(asked),
        "question_p50_ms": statistics.median(asked),
        "entries_rolled": sum(entries for entries, _ in rolled),
        "rolling_s": sum(took_s for _, took_s in rolled),
    }


async def token_path(bench: Bench, rounds: int, seconds: float) -> dict[str, Any]:
    """Alone and beside, in turns; the ratio is of each pair of turns."""
    await pairs(bench, 1.0)
    found = []
    for n in range(rounds):
        turns: dict[str, dict[str, float]] = {}
        for is_busy in (n % 2 == 0, n % 2 == 1):
            if is_busy:
                done, extra = await busy(bench, seconds)
                turns["beside"] = {**rate(done, seconds), **extra}
            else:
                turns["alone"] = rate(await pairs(bench, seconds), seconds)
        found.append(turns)
    async with bench.pg.connection() as conn:
        behind = await freshness(conn)
    return {
        "median_ratio": statistics.median(
            turns["beside"]["pairs_per_s"] / turns["alone"]["pairs_per_s"] for turns in found
        ),
        "entries_behind_at_the_end": behind.entries_behind,
        "rounds": found,
    }


async def drop(bench: Bench, seconds: float) -> dict[str, Any]:
    """Pairs, while the oldest month goes in their midst."""
    while (await roll_up(bench.pg)).entries:
        pass

    async def later() -> tuple[float, object]:
        await asyncio.sleep(seconds / 3)
        start = time.monotonic()
        retired = await retire_month(bench.pg, bench.months[0])
        return time.monotonic() - start, retired

    before = await pairs(bench, seconds)
    during, (took_s, retired) = await asyncio.gather(pairs(bench, seconds), later())
    return {
        "before": rate(before, seconds),
        "during": rate(during, seconds),
        "drop_s": took_s,
        "dropped": msgspec.to_builtins(retired),
    }


def rate(done: Sequence[Pair], seconds: float) -> dict[str, float]:
    waits = sorted(pair.reserve_ms + pair.settle_ms for pair in done)
    return {
        "pairs_per_s": len(done) / seconds,
        "pair_p50_ms": waits[len(waits) // 2],
        "pair_p99_ms": waits[len(waits) * 99 // 100],
        "pair_max_ms": waits[-1],
    }
