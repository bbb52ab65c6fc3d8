"""`python -m tests.soak.fairness`: a quiet tenant beside one that keeps 200 requests waiting.

The whole stack with the real model. B asks something short once a second, first alone, then
while A keeps `--flood` requests open. Prints both as JSON; exit status 1 when a promise was
broken: B waits in the queue for no more than a loaded step, and its p99 TTFT rises by less
than a second.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from typing import Any

import httpx

from tests.support.services import open_directory
from tests.support.stack import MODEL, Stack

EVERY_S = 1.0
RISE_S_MAX = 1.0
OK = 200
STEPS = re.compile(r"^headworks_worker_step_seconds_(sum|count)(?:\{.*\})? (\S+)$", re.MULTILINE)


class Tenant:
    """One tenant with a key of its own."""

    def __init__(self, stack: Stack, name: str) -> None:
        with stack.admin() as admin:
            made = admin.post("/admin/tenants", json={"name": name, "billed": False})
            self.id: str = made.raise_for_status().json()["id"]
            key = admin.post(f"/admin/tenants/{self.id}/keys", json={"name": name})
            self.key: str = key.raise_for_status().json()["key"]


class RefusedError(Exception):
    """The gateway did not take the request."""


async def ttft_s(client: httpx.AsyncClient, tenant: Tenant, tokens: int, text: str) -> float:
    """Seconds until the first token of a stream; it is read to its end."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {tenant.key}"}
    began_s, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != OK:
            raise RefusedError(f"{answer.status_code} {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not first_s and '"content":"' in line and '"content":""' not in line:
                first_s = time.perf_counter() - began_s
    return first_s


async def quiet(client: httpx.AsyncClient, tenant: Tenant, seconds: int) -> list[float]:
    """B's first-token times, one request a second whatever becomes of the one before."""
    tasks = []
    for number in range(seconds):
        text = f"Number {number}: name a colour."
        tasks.append(asyncio.create_task(ttft_s(client, tenant, 4, text)))
        await asyncio.sleep(EVERY_S)
    return sorted(await asyncio.gather(*tasks))


class Flood:
    """A's clients: each asks again as soon as it was answered, or a second after a refusal."""

    def __init__(self, client: httpx.AsyncClient, tenant: Tenant) -> None:
        self.open = self.refused = 0
        self._client = client
        self._tenant = tenant

    async def ask_for_ever(self, number: int) -> None:
        """One client's asking."""
        asked = 0
        while True:
            asked += 1
            self.open += 1
            try:
                text = f"Story {number}.{asked}: tell me of a river."
                await ttft_s(self._client, self._tenant, 24, text)
            except RefusedError:
                self.refused += 1
                await asyncio.sleep(1.0)
            finally:
                self.open -= 1


async def step_s(url: str) -> tuple[float, float]:
    """Seconds spent in steps and their count, by the worker's metrics."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics")).text
    found: dict[str, float] = {"sum": 0.0, "count": 0.0}
    for kind, value in STEPS.findall(text):
        found[kind] += float(value)
    return found["sum"], found["count"]


async def run(stack: Stack, *, floods: int, seconds: int) -> dict[str, Any]:
    a, b = Tenant(stack, "flooding"), Tenant(stack, "quiet")
    worker = stack.status["worker_urls"][0]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=600, limits=limits) as client:
        await ttft_s(client, b, 4, "Hello")
        alone = await quiet(client, b, seconds)
        pressing = Flood(client, a)
        clients = [asyncio.create_task(pressing.ask_for_ever(n)) for n in range(floods)]
        await asyncio.sleep(10)
        before, open_before = await step_s(worker), pressing.open
        beside = await quiet(client, b, seconds)
        after, open_after = await step_s(worker), pressing.open
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    steps = after[1] - before[1]
    waits = sorted(row["queue_ms"] or 0.0 for row in stack.usage(tenant_id=b.id))
    return {
        "alone_ttft_s": _told(alone),
        "beside_ttft_s": _told(beside),
        "p99_rise_s": round(_p(beside, 99) - _p(alone, 99), 3),
        "queue_ms": _told(waits[: len(alone) + 1]) | {"all_p99": round(_p(waits, 99), 1)},
        "loaded_step_ms": round(1_000 * (after[0] - before[0]) / max(steps, 1), 1),
        "flood_open": [open_before, open_after],
        "flood_refused": pressing.refused,
    }


def _p(values: list[float], percent: int) -> float:
    return values[min(len(values) - 1, len(values) * percent // 100)]


def _told(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(_p(values, p), 3) for p in (50, 99)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flood", type=int, default=240, help="requests that A keeps open")
    parser.add_argument("--seconds", type=int, default=60, help="of B's asking, twice")
    chosen = parser.parse_args()
    with open_directory("fairness") as data:
        stack = Stack(data)
        stack.up()
        try:
            told = asyncio.run(run(stack, floods=chosen.flood, seconds=chosen.seconds))
        finally:
            stack.down()
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    late = told["p99_rise_s"] >= RISE_S_MAX
    waited = told["queue_ms"]["all_p99"] > told["loaded_step_ms"]
    return int(late or waited)


if __name__ == "__main__":
    sys.exit(main())
