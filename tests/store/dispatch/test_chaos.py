"""Three gateways under load while Valkey is killed, paused, emptied or cuts its connections."""

import asyncio
import logging
import random

import pytest
import redis

from tests.support.dispatch_load import SLOTS, TWO_REPLICAS, Load
from tests.support.dispatchers import dispatchers, until, until_idle
from tests.support.services import ValkeyServer

pytestmark = [pytest.mark.anyio, pytest.mark.services, pytest.mark.slow]

REQUESTS = 400
EVENTS = 5


async def happen(event: str, valkey: ValkeyServer, duration_s: float) -> None:
    match event:
        case "emptied":
            valkey.flush()
        case "cut":
            with redis.Redis.from_url(valkey.embedded.url) as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        case "killed":
            await asyncio.to_thread(valkey.running.kill)
            await asyncio.sleep(duration_s)
            await asyncio.to_thread(valkey.running.start)
        case "paused":
            valkey.running.pause()
            await asyncio.sleep(2 * duration_s)
            valkey.running.resume()


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_request_ends_and_every_account_returns_to_zero(own_valkey, seed, caplog):
    dice, url = random.Random(seed), own_valkey.embedded.url
    async with dispatchers(url, 3, replicas=TWO_REPLICAS) as gateways:
        load = Load(gateways, seed)
        running = load.start(REQUESTS)
        for _ in range(EVENTS):
            await asyncio.sleep(dice.random() * 0.6)
            event = dice.choice(["emptied", "cut", "killed", "paused"])
            await happen(event, own_valkey, dice.random() * 0.5)
        async with asyncio.timeout(40):
            await running
        assert load.done == REQUESTS
        assert load.most <= SLOTS * len(gateways)
        await until(lambda: not any(gateway.degraded for gateway in gateways))
        await until_idle(url)
        for gateway in gateways:
            assert gateway._flights == {}
            assert all(
                not pool.flights and not pool.acks for pool in gateway._telling.pools.values()
            )
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
