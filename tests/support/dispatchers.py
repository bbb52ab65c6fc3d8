"""Several gateways' `Dispatch` on one Valkey, with bounds short enough to wait for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from core.dispatch import PoolRules
from core.limits import LimitRules
from core.tickets import Placed, ReplicaView
from store.dispatch import Dispatch, DispatchRules
from store.dispatch_audit import audit

POOL = "pool@local"
POOL_RULES = PoolRules(lease_ms=1_200, ack_ms=500, reannounce_ms=150, no_replica_ms=600)
RULES = DispatchRules(
    renew_ms=100,
    charge_ms=20,
    call_timeout_ms=400,
    pool=POOL_RULES,
    limits=LimitRules(lease_ms=1_200),
)


def a_replica(name: str = "r1", **changes: Any) -> ReplicaView:
    view = ReplicaView(
        replica=name,
        boot_id=f"boot_{name}",
        url=f"http://{name}",
        version="v",
        ready=True,
        kv_blocks=100,
        sequences=4,
    )
    return msgspec.structs.replace(view, **changes)


ONE_REPLICA = (a_replica(),)


@contextlib.asynccontextmanager
async def dispatchers(
    url: str, count: int = 2, rules: DispatchRules = RULES, replicas: Any = ONE_REPLICA
) -> AsyncIterator[list[Dispatch]]:
    """Gateways that know these replicas, in a pool that is open for placing."""
    gateways = [Dispatch(url, f"gw{number}", rules) for number in range(1, count + 1)]
    for gateway in gateways:
        await gateway.start()
        gateway.set_replicas(POOL, replicas)
    await asyncio.sleep(rules.pool.reannounce_ms / 1000 + 0.1)
    try:
        yield gateways
    finally:
        for gateway in gateways:
            await gateway.close()


async def end(gateway: Dispatch, ticket: str, placed: Placed, **changes: Any) -> None:
    """The engine's last word on a ticket."""
    fields = {
        "ticket": ticket,
        "pool": POOL,
        "tenant": "ten",
        "replica": placed.replica,
        "actual_input_tokens": 10,
        "prefix_hashes": (),
    }
    await gateway.finish(**(fields | changes))


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions of others' objects set no event
            await asyncio.sleep(0.01)


async def until_idle(url: str, within_s: float = 5.0) -> None:
    """The audit must come to nothing held and nothing wrong."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not (found := await audit(url)).is_idle:
        assert not found.problems, found.problems
        assert loop.time() < deadline, found
        await asyncio.sleep(0.05)
