"""Valkey is killed, paused or emptied under load: nothing hangs, nothing is lost or doubled."""

import asyncio

import msgspec
import pytest
import redis

from core.tickets import Admitted, LimitRefused, Limits, Placed
from store.dispatch import Dispatch, audit
from tests.support.dispatch_load import SLOTS, TWO_REPLICAS, Load
from tests.support.dispatch_worlds import an_admit, an_arm
from tests.support.dispatchers import (
    POOL,
    RULES,
    a_replica,
    dispatchers,
    end,
    until,
    until_idle,
)

pytestmark = [pytest.mark.anyio, pytest.mark.services]


async def test_an_emptied_valkey_learns_everything_again_before_it_places(valkey_url):
    async with dispatchers(valkey_url, replicas=TWO_REPLICAS) as gateways:
        load = Load(gateways)
        running = load.start(150)
        for _ in range(3):
            await asyncio.sleep(0.25)
            with redis.Redis.from_url(valkey_url) as client:
                client.flushall()
        async with asyncio.timeout(20):
            await running
        assert load.done == 150
        assert load.most <= SLOTS
        assert not any(gateway.degraded for gateway in gateways)
        await until_idle(valkey_url)


async def test_a_killed_valkey_is_done_without_and_taken_back(own_valkey):
    url = own_valkey.embedded.url
    async with dispatchers(url, replicas=TWO_REPLICAS) as gateways:
        load = Load(gateways)
        running = load.start(200)
        await asyncio.sleep(0.15)
        await asyncio.to_thread(own_valkey.running.kill)
        await until(lambda: all(gateway.degraded for gateway in gateways))
        before = load.done
        await asyncio.sleep(0.3)
        assert load.done > before, "requests go on without Valkey"
        await asyncio.to_thread(own_valkey.running.start)
        async with asyncio.timeout(20):
            await running
        assert load.done == 200
        # Apart, each gateway fills a replica by its own account.
        assert load.most <= SLOTS * len(gateways)
        await until(lambda: not any(gateway.degraded for gateway in gateways))
        await until_idle(url)


async def test_tickets_placed_alone_are_announced_when_valkey_is_back(own_valkey):
    url = own_valkey.embedded.url
    async with dispatchers(url, 1, replicas=(a_replica(sequences=2),)) as (gateway,):
        limits = Limits(concurrency=3, requests_per_min=10)
        await gateway.admit(an_admit("t1", limits=limits))
        first = await gateway.place(an_arm("t1", kv_blocks=10))
        await asyncio.to_thread(own_valkey.running.kill)
        await until(lambda: gateway.degraded)
        admitted = await gateway.admit(an_admit("t2", limits=limits))
        assert admitted.degraded
        assert admitted.headroom.requests.remaining == 8, "goes on from the last known levels"
        second = await gateway.place(an_arm("t2", kv_blocks=20))
        await gateway.admit(an_admit("t3", limits=limits))
        waiting = asyncio.create_task(gateway.place(an_arm("t3", kv_blocks=30)))
        refused = await gateway.admit(an_admit("t4", limits=limits))
        assert isinstance(refused, LimitRefused)
        assert refused.reason == "concurrency"
        await asyncio.sleep(0.1)
        assert not waiting.done(), "the replica's slots are counted without Valkey too"

        await asyncio.to_thread(own_valkey.running.start)
        await until(lambda: not gateway.degraded)
        await asyncio.sleep(0.3)
        found = await audit(url)
        assert (found.pools[0].placed, found.pools[0].queued) == (2, 1)
        assert found.kv_blocks == 30
        assert sorted(found.tenants[0].held) == ["t1", "t2", "t3"]
        refused = await gateway.admit(an_admit("t4", limits=limits))
        assert refused.reason == "concurrency"

        await end(gateway, "t1", first)
        async with asyncio.timeout(2):
            third = await waiting
        await end(gateway, "t2", second)
        await end(gateway, "t3", third)
        await until_idle(url)


async def test_a_valkey_that_hangs_costs_one_timeout(own_valkey):
    url = own_valkey.embedded.url
    async with dispatchers(url, 1) as (gateway,):
        loop = asyncio.get_running_loop()
        await gateway.admit(an_admit("t0"))
        before = await gateway.place(an_arm("t0"))
        own_valkey.running.pause()
        try:
            began = loop.time()
            admitted = await gateway.admit(an_admit("t1"))
            placed = await gateway.place(an_arm("t1"))
            took_s = loop.time() - began
            assert isinstance(admitted, Admitted)
            assert admitted.degraded
            assert isinstance(placed, Placed)
            assert took_s < 2 * RULES.call_timeout_ms / 1000
            began = loop.time()
            await gateway.admit(an_admit("t2"))
            assert loop.time() - began < 0.1, "only the first call finds out"
            await end(gateway, "t0", before)
        finally:
            own_valkey.running.resume()
        await until(lambda: not gateway.degraded)
        await end(gateway, "t1", placed)
        await gateway.cancel(ticket="t2", pool=None, tenant="ten")
        # t0 ended while Valkey could not be told: its old name's lease runs out.
        await until_idle(url)


async def test_a_gateway_starts_without_valkey_and_finds_it_later(own_valkey):
    own_valkey.running.stop()
    url = own_valkey.embedded.url
    gateway = Dispatch(url, "gw1", RULES)
    await gateway.start()
    try:
        assert gateway.degraded
        gateway.set_replicas(POOL, (a_replica(),))
        assert isinstance(await gateway.admit(an_admit("t1")), Admitted)
        async with asyncio.timeout(1):
            placed = await gateway.place(an_arm("t1"))
        await asyncio.to_thread(own_valkey.running.start)
        await until(lambda: not gateway.degraded)
        await end(gateway, "t1", placed)
        await until_idle(url)
    finally:
        await gateway.close()


async def test_a_valkey_without_memory_left_is_a_valkey_that_is_away(own_valkey):
    url = own_valkey.embedded.url
    async with dispatchers(url, 1) as (gateway,):
        with redis.Redis.from_url(url) as client:
            client.config_set("maxmemory", "1")
            admitted = await gateway.admit(an_admit("t1"))
            assert admitted.degraded
            client.config_set("maxmemory", "256mb")
        await until(lambda: not gateway.degraded)
        await gateway.cancel(ticket="t1", pool=None, tenant="ten")
        await until_idle(url)


async def test_a_gateway_that_slept_past_its_lease_announces_itself_again(valkey_url):
    async with dispatchers(valkey_url, replicas=(a_replica(sequences=1),)) as (sleeper, other):
        placed = await sleeper.place(an_arm("t1"))
        telling = sleeper._telling
        for loop in list(telling._loops):
            loop.cancel()
        waiting = asyncio.create_task(other.place(an_arm("t2")))
        async with asyncio.timeout(4):
            second = await waiting
        await end(other, "t2", second)
        telling._run(telling._keep_renewing(telling.pool(POOL)))
        await asyncio.sleep(0.4)
        found = await audit(valkey_url)
        assert found.pools[0].placed == 1, "it still runs, so it is accounted for again"
        await end(sleeper, "t1", placed)
        await until_idle(valkey_url)


async def test_nothing_is_told_twice_that_is_too_much_for_one_message(own_valkey):
    url = own_valkey.embedded.url
    rules = msgspec.structs.replace(RULES, batch_max=4)
    async with dispatchers(url, 1, rules=rules, replicas=(a_replica(sequences=0),)) as (gateway,):
        placed = {}
        for i in range(18):
            await gateway.admit(an_admit(f"t{i}"))
            placed[f"t{i}"] = await gateway.place(an_arm(f"t{i}"))
        await asyncio.to_thread(own_valkey.running.kill)
        await until(lambda: gateway.degraded)
        await asyncio.to_thread(own_valkey.running.start)
        await until(lambda: not gateway.degraded)
        await asyncio.sleep(0.3)
        found = await audit(url)
        assert found.kv_blocks == 18
        assert len(found.tenants[0].held) == 18
        for ticket, where in placed.items():
            await end(gateway, ticket, where)
        await until_idle(url)
