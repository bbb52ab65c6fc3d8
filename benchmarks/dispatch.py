"""How many requests a second does one Valkey dispatch? The real functions, arm and finish.

Keeps `--in-flight` tickets running over `--replicas` replicas and `--tenants` tenants, `--depth`
calls ahead on one connection, so that the server and not the client is what is measured. Reads
the server's own time for a call beside it. JSON on standard output.

    python -m benchmarks.dispatch
    python -m benchmarks.dispatch --replicas 4 64 512 --tenants 1 100 --waiting 1000
"""

import argparse
import asyncio
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.own_postgres import free_port
from core.dispatch import PoolRules
from core.limits import LimitRules
from core.tickets import Arm, Placed, Renew, ReplicaView
from local.valkey import EmbeddedValkey
from store.redis_client import RedisClient
from store.remote_dispatch import RemoteDispatch
from store.scripts import dispatch_functions

GATEWAY = "gw_bench"
SEQUENCES = 256
BLOCKS = 16
REPLICA_BLOCKS = 100_000
HASHES = 8
START_S = 20.0


def main() -> None:
    options = arguments()
    rows = []
    with own_valkey() as url:
        for replicas, tenants in itertools.product(options.replicas, options.tenants):
            rows.append(asyncio.run(measured(url, options, replicas, tenants)))
    print(json.dumps({"arguments": vars(options), "rows": rows}, indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64, 512])
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 1_000])
    parser.add_argument("--in-flight", type=int, default=400)
    parser.add_argument("--waiting", type=int, default=0, help="tickets in the queue all along")
    parser.add_argument("--depth", type=int, default=32, help="pairs of calls under way")
    parser.add_argument("--seconds", type=float, default=4.0)
    return parser.parse_args()


@contextmanager
def own_valkey() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="headworks-dispatch-") as directory:
        embedded = EmbeddedValkey(directory=Path(directory), port=free_port())
        embedded.prepare()
        spec = embedded.spec()
        child = subprocess.Popen(spec.argv, env=spec.env, stdout=subprocess.DEVNULL)  # noqa: S603 - our server's binary
        try:
            yield embedded.url
        finally:
            child.terminate()
            child.wait()


class Bench:
    """One pool of its own, so that what ran before does not count."""

    def __init__(self, client: RedisClient, replicas: int, tenants: int) -> None:
        rules = PoolRules(reannounce_ms=0, lease_ms=600_000)
        self.backend = RemoteDispatch(client, dispatch_functions(rules, LimitRules()))
        self.pool = f"bench-{replicas}-{tenants}"
        self.tenants = tenants
        self.numbers = itertools.count()
        self.views = tuple(a_view(i) for i in range(replicas))
        self.done = 0

    async def open(self) -> None:
        await self.backend.renew(
            Renew(gateway=GATEWAY, pool=self.pool, epoch="", replicas=self.views, announces=True)
        )

    def arm(self) -> Arm:
        number = next(self.numbers)
        tenant = number % self.tenants
        return Arm(
            ticket=f"req_{number:012}",
            gateway=GATEWAY,
            pool=self.pool,
            tenant=f"ten_{tenant}",
            weight=1,
            service_class="standard",
            deadline_ms=0,
            kv_blocks=BLOCKS,
            prompt_tokens=512,
            prefix_hashes=tuple(f"{tenant:06x}{depth:010x}" for depth in range(HASHES)),
        )

    async def place(self) -> Arm:
        arm = self.arm()
        reply = await self.backend.arm(arm)
        assert isinstance(reply.outcome, Placed), reply.outcome
        return arm

    async def finish(self, arm: Arm) -> None:
        await self.backend.finish_pool(
            self.pool,
            GATEWAY,
            arm.ticket,
            input_tokens=512,
            output_tokens=128,
            prefix_hashes=arm.prefix_hashes,
        )

    async def turn(self, running: list[Arm], until_s: float) -> None:
        """One ticket ends, another begins."""
        while time.perf_counter() < until_s:
            await self.finish(running.pop(0))
            running.append(await self.place())
            self.done += 1


async def measured(
    url: str, options: argparse.Namespace, replicas: int, tenants: int
) -> dict[str, Any]:
    client = RedisClient(url, timeout_ms=10_000)
    client.start()
    async with asyncio.timeout(START_S):
        await client.connected.wait()
    bench = Bench(client, replicas, tenants)
    await bench.open()
    in_flight = max(options.in_flight, 4 * replicas)
    running = [await bench.place() for _ in range(in_flight)]
    for _ in range(options.waiting):
        whole = msgspec.structs.replace(bench.arm(), kv_blocks=REPLICA_BLOCKS)
        await bench.backend.arm(whole)  # no replica is ever idle: it waits until the end
    await client.call(b"CONFIG", b"RESETSTAT")
    began_s = time.perf_counter()
    until_s = began_s + options.seconds
    depth = min(options.depth, in_flight)
    lanes = [running[lane::depth] for lane in range(depth)]
    await asyncio.gather(*(bench.turn(lane, until_s) for lane in lanes))
    took_s = time.perf_counter() - began_s
    calls, us = await function_time(client)
    await client.close()
    return {
        "replicas": replicas,
        "tenants": tenants,
        "requests_per_s": round(bench.done / took_s),
        "server_us_per_call": round(us / calls, 1),
        "ceiling_requests_per_s": round(1e6 / (2 * us / calls)),
    }


async def function_time(client: RedisClient) -> tuple[int, int]:
    """Calls of functions, and the microseconds that the server spent in them."""
    told = await client.call(b"INFO", b"commandstats")
    assert isinstance(told, bytes)
    line = next(line for line in told.decode().splitlines() if line.startswith("cmdstat_fcall:"))
    fields = dict(part.split("=") for part in line.partition(":")[2].split(","))
    return int(fields["calls"]), int(fields["usec"])


def a_view(number: int) -> ReplicaView:
    return ReplicaView(
        replica=f"rep_{number:04}",
        boot_id=f"boot_{number:04}",
        url=f"http://10.0.{number // 256}.{number % 256}:8100",
        version="v",
        ready=True,
        kv_blocks=REPLICA_BLOCKS,
        sequences=SEQUENCES,
    )


if __name__ == "__main__":
    main()
