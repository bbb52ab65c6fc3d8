"""`python -m tests.soak.overload`: a real gateway under twice the load that its worker can take.

Real Postgres and Valkey, a worker that only waits, an open loop of clients; some leave early.
First at the worker's pace, then at twice that. Prints what was accepted, what was refused and
how fast, and how much was done in time, as JSON; exit status 1 when a promise was broken.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from store.dispatch import audit
from store.migrate import upgrade
from tests.support.client import Reply, ask
from tests.support.gateway_world import MODEL, Caller, World, a_capacity, a_world
from tests.support.scripted_worker import answers
from tests.support.services import PostgresServer, ValkeyServer, open_directory

SEQUENCES = 6
STAY_S = 0.8
CAPACITY_PER_S = SEQUENCES / STAY_S
DEADLINE_MS = 6_000
LEAVES_EVERY, LEAVES_S = 20, 1.0
REFUSAL_MS_MAX = 10.0
OK = 200


class Load:
    """One open loop. Times are in seconds."""

    def __init__(self, world: World, callers: list[Caller]) -> None:
        self.world = world
        self.callers = callers
        self.statuses: Counter[str] = Counter()
        self.refused_s: list[float] = []
        self.late = 0
        self.in_time = 0

    async def run(self, per_s: float, seconds: float) -> dict[str, Any]:
        """Ask so often for so long; the figures."""
        tasks = []
        began_s = time.perf_counter()
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(max(0.0, began_s + number / per_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(number)))
        await asyncio.gather(*tasks)
        refused_ms = sorted(1_000 * s for s in self.refused_s)
        return {
            "offered_per_s": per_s,
            "statuses": dict(self.statuses),
            "goodput_per_s": round(self.in_time / seconds, 2),
            "accepted_late": self.late,
            "refusal_ms_p50": _at(refused_ms, 0.5),
            "refusal_ms_p99": _at(refused_ms, 0.99),
            "left_in_dispatcher": (await audit(self.world.settings.redis_url)).tickets,
        }

    async def ask(self, number: int) -> None:
        """One client, who may leave."""
        asked_s = time.perf_counter()
        patience_s = LEAVES_S if number % LEAVES_EVERY == 0 else 60.0
        try:
            async with asyncio.timeout(patience_s):
                answer = await self.post(number)
        except TimeoutError:
            self.statuses["left"] += 1
            return
        took_s = time.perf_counter() - asked_s
        self.statuses[str(answer.status)] += 1
        if answer.status == OK:
            self.in_time += took_s * 1_000 <= DEADLINE_MS
            self.late += took_s * 1_000 > DEADLINE_MS
        elif b"overloaded" in answer.body:
            self.refused_s.append(took_s)
        else:
            self.late += 1

    async def post(self, number: int) -> Reply:
        """Ask for a short answer, on a bare socket: a client's own work would count as ours."""
        caller = self.callers[number % len(self.callers)]
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "timeout": DEADLINE_MS / 1_000}
        return await ask(self.world.url, "/v1/completions", caller.key, body)


def main() -> int:
    """Start the services and press."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of twice the load")
    options = parser.parse_args()
    with open_directory("overload") as directory, tempfile.TemporaryDirectory() as spool:
        postgres, valkey = (
            PostgresServer(directory / "postgres"),
            ValkeyServer(directory / "valkey"),
        )
        postgres.running.start()
        valkey.running.start()
        try:
            database = postgres.create_database("overload")
            upgrade(database)
            told = asyncio.run(press(database, valkey.embedded.url, Path(spool), options.seconds))
        finally:
            postgres.running.stop()
            valkey.running.stop()
    print(json.dumps(told, indent=2))  # noqa: T201 - a command prints
    pressed, peak = told["pressed"], told["peak"]
    is_kept = (
        pressed["goodput_per_s"] >= 0.9 * peak["goodput_per_s"]
        and pressed["accepted_late"] <= 0.01 * pressed["statuses"].get("200", 1)
        and pressed["left_in_dispatcher"] == 0
    )
    return 0 if is_kept else 1


async def press(postgres_url: str, valkey_url: str, spool: Path, seconds: float) -> dict[str, Any]:
    """At the worker's pace for a while, then at twice that."""
    async with a_world(postgres_url, valkey_url, spool) as world:
        await world.register(world.worker, capacity=a_capacity(sequences=SEQUENCES))
        world.worker.default = answers(4, delay_s=STAY_S)
        callers = [await world.add_caller() for _ in range(4)]
        warm_s, peak_s = 5.0, min(30.0, seconds)
        await Load(world, callers).run(CAPACITY_PER_S, warm_s)
        peak = await Load(world, callers).run(CAPACITY_PER_S, peak_s)
        pressed = await Load(world, callers).run(2 * CAPACITY_PER_S, seconds)
    return {"deadline_ms": DEADLINE_MS, "peak": peak, "pressed": pressed}


def _at(sorted_ms: list[float], part: float) -> float | None:
    return round(sorted_ms[int(part * (len(sorted_ms) - 1))], 2) if sorted_ms else None


if __name__ == "__main__":
    sys.exit(main())
