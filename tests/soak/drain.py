"""`python -m tests.soak.drain`: a 90-second stream outlives each way in which its worker may end.

Real Postgres and Valkey, a real gateway, a control plane that launches processes of this machine.
Streams of `SOAK_STREAM_S` (90) seconds run on three workers; one is drained by an operator, one is
taken back (SIGTERM), the last one scaled away. Then again, and the whole deployment drains. Prints
what became of them as JSON; exit status 1 when a stream was cut, or resumed, or work reached a
worker that drains.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from core.fleet import ReplicaState
from store.migrate import upgrade
from tests.support.gateway_requests import CHAT, a_body, headers_of
from tests.support.gateway_world import DEPLOYMENT, POOL, Caller, World, a_world, until
from tests.support.launched_world import Plane, a_plane, kill_all
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import whole_text
from tests.support.services import PostgresServer, ValkeyServer, free_port, open_directory

STREAM_S = float(os.environ.get("SOAK_STREAM_S") or 90)
GAP_S = 0.2
STREAMS = 9
REPLICAS = 3
DRAIN_MS = int(4 * STREAM_S * 1000)


class Stage:
    """One gateway, one control plane, and what a round needs."""

    def __init__(self, world: World, plane: Plane, caller: Caller) -> None:
        self.world = world
        self.plane = plane
        self.caller = caller
        self.tokens = int(STREAM_S / GAP_S)

    async def stream(self) -> bool:
        """Whether it came whole."""
        body = a_body(CHAT, stream=True, max_tokens=self.tokens)
        async with httpx.AsyncClient(base_url=self.world.url, timeout=60) as client:
            reply = await client.post(CHAT, json=body, headers=headers_of(self.caller))
        told = check_openai_chat_stream(reply.content, include_usage=False)
        return (told.texts, told.done) == ([whole_text(self.tokens)], True)

    def ready(self) -> set[str]:
        return {v.replica for v in self.world.gateway.routes.replicas(POOL) if v.ready}

    def setbacks(self) -> float:
        [family] = self.world.gateway.metrics.setbacks.collect()
        return sum(sample.value for sample in family.samples)

    async def round(self, *, deploys: bool) -> dict[str, Any]:
        """Streams on every worker, and the end of every worker under them."""
        await self.plane.want(REPLICAS, launcher="local", desired_state="running")
        names = await self.plane.until_serving(REPLICAS)
        await until(lambda: self.ready() >= set(names), 30)
        streams = [asyncio.create_task(self.stream()) for _ in range(STREAMS)]
        async with asyncio.timeout(30):
            while not await self.plane.busy(STREAMS):  # noqa: ASYNC110 - bounded by the timeout around it
                await asyncio.sleep(0.1)
        before = self.setbacks()
        await self.end(names, deploys=deploys)
        await until(lambda: not self.ready() & set(names), 30)
        whole = await asyncio.gather(*streams)
        await self.plane.until_serving(0)
        return {
            "deploys": deploys,
            "streams": STREAMS,
            "whole": sum(whole),
            "resumed": self.setbacks() - before,
        }

    async def end(self, names: list[str], *, deploys: bool) -> None:
        if deploys:
            body = {"desired_state": "draining"}
            await self.plane.admin("PATCH", f"/deployments/{DEPLOYMENT}", body)
            return
        pids = {name: place.pid for name, place in self.plane.alive().items()}
        within = {"within_ms": DRAIN_MS}
        await self.plane.admin("POST", f"/replicas/{names[0]}/drain", within)
        os.kill(pids[names[1]] or 0, signal.SIGTERM)
        await self.plane.want(0)


async def soak(postgres: PostgresServer, valkey: ValkeyServer, directory: Path) -> bool:
    """Whether every stream came whole, from the worker that it began on."""
    url = postgres.create_database("drain")
    await asyncio.to_thread(upgrade, url)
    script = {
        "SCRIPT_TOKENS": "100000",
        "SCRIPT_GAP_S": str(GAP_S),
        "SCRIPT_RECLAIM_MS": str(DRAIN_MS),
    }
    async with a_world(url, valkey.embedded.url, directory, worker_idle_ms=10_000) as world:
        await world.worker.stop()
        await world.register(world.worker, ReplicaState.STOPPED)
        async with a_plane(
            url,
            valkey.embedded.url,
            directory / "launcher",
            port=free_port(),
            script=script,
            replica_drain_ms=DRAIN_MS,
        ) as plane:
            try:
                stage = Stage(world, plane, await world.add_caller())
                rounds = [await stage.round(deploys=deploys) for deploys in (False, True)]
                await world.dispatcher_is_empty()
            finally:
                kill_all(plane.launcher)
    sys.stdout.write(json.dumps(rounds, indent=1) + "\n")
    return all(r["whole"] == r["streams"] and not r["resumed"] for r in rounds)


def main() -> int:
    """1 when a promise was broken."""
    began_s = time.monotonic()
    with open_directory("drain") as home, tempfile.TemporaryDirectory() as other:
        postgres, valkey = PostgresServer(home), ValkeyServer(Path(other))
        postgres.running.start()
        valkey.running.start()
        try:
            kept = asyncio.run(soak(postgres, valkey, Path(other)))
        finally:
            valkey.running.stop()
            postgres.running.stop()
    said = "kept" if kept else "BROKEN"
    sys.stdout.write(f"{said} in {time.monotonic() - began_s:.0f} s\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
