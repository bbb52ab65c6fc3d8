"""Gateways that share a Valkey: limits hold across them, and nothing placed is ever lost."""

import asyncio
import random

import msgspec
import pytest
import redis

from core.protocol import Load
from core.tickets import Admitted, CacheVersions, Dropped, LimitRefused, Limits, Placed, Stale
from store.dispatch import Dispatch, audit
from tests.support.dispatch_worlds import an_admit, an_arm
from tests.support.dispatchers import (
    POOL,
    POOL_RULES,
    RULES,
    a_replica,
    dispatchers,
    end,
    until,
    until_idle,
)

pytestmark = [pytest.mark.anyio, pytest.mark.services]


async def test_concurrency_is_never_over_the_limit_through_two_gateways(valkey_url):
    running, most, passed = 0, 0, 0
    limits = Limits(concurrency=3)

    async def request(gateway: Dispatch, ticket: str) -> None:
        nonlocal running, most, passed
        asked = an_admit(ticket, limits=limits)
        while isinstance(await gateway.admit(asked), LimitRefused):  # noqa: ASYNC110 - a client
            await asyncio.sleep(0.005)
        running += 1
        most, passed = max(most, running), passed + 1
        await asyncio.sleep(0.01)
        running -= 1
        await gateway.cancel(ticket=ticket, pool=None, tenant="ten")

    async with dispatchers(valkey_url) as gateways:
        await asyncio.gather(*(request(gateways[i % 2], f"t{i}") for i in range(40)))
        assert (most, passed) == (3, 40)
        await until_idle(valkey_url)


async def test_ten_a_minute_is_ten_through_two_gateways(valkey_url):
    limits = Limits(requests_per_min=10)
    async with dispatchers(valkey_url) as gateways:
        answers = await asyncio.gather(
            *(gateways[i % 2].admit(an_admit(f"t{i}", limits=limits)) for i in range(20))
        )
    refused = [answer for answer in answers if isinstance(answer, LimitRefused)]
    assert len(refused) == 10
    assert all(0 < answer.retry_after_ms <= 6_000 for answer in refused)
    assert {answer.reason for answer in refused} == {"requests"}


async def test_a_grant_reaches_another_gateway_without_waiting_for_its_renewal(valkey_url):
    slow = msgspec.structs.replace(RULES, renew_ms=60_000)
    replicas = (a_replica(sequences=1),)
    async with dispatchers(valkey_url, rules=slow, replicas=replicas) as (first, second):
        placed = await first.place(an_arm("t1"))
        waiting = asyncio.create_task(second.place(an_arm("t2")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await end(first, "t1", placed)
        async with asyncio.timeout(1.0):
            granted = await waiting
        assert isinstance(granted, Placed)
        assert granted.placement > placed.placement
        await end(second, "t2", granted)
        await until_idle(valkey_url)


async def test_a_call_cancelled_at_any_moment_leaves_nothing_behind(valkey_url):
    dice = random.Random(7)

    async def request(gateway: Dispatch, ticket: str) -> None:
        held_pool = None
        try:
            if isinstance(await gateway.admit(an_admit(ticket)), Admitted):
                held_pool = POOL
                placed = await gateway.place(an_arm(ticket, kv_blocks=dice.randint(1, 60)))
                await asyncio.sleep(dice.random() * 0.02)
                await end(gateway, ticket, placed)
                held_pool = None
        except asyncio.CancelledError:
            await asyncio.shield(gateway.cancel(ticket=ticket, pool=held_pool, tenant="ten"))
            raise

    async with dispatchers(valkey_url) as gateways:
        for round_number in range(15):
            tasks = [
                asyncio.create_task(request(gateways[i % 2], f"r{round_number}.{i}"))
                for i in range(20)
            ]
            for task in tasks:
                for _ in range(dice.randint(0, 6)):
                    await asyncio.sleep(0)
                if dice.random() < 0.6:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(valkey_url)
        assert all(gateway._flights == {} for gateway in gateways)


async def test_a_ticket_that_was_declined_goes_elsewhere(valkey_url):
    async with dispatchers(valkey_url, 1, replicas=(a_replica("r1"), a_replica("r2"))) as (
        gateway,
    ):
        first = await gateway.place(an_arm("t1"))
        second = await gateway.requeue(an_arm("t1"))
        assert {first.replica, second.replica} == {"r1", "r2"}
        found = await audit(valkey_url)
        assert found.kv_blocks == 1
        await end(gateway, "t1", second)
        await until_idle(valkey_url)


async def test_an_only_replica_that_declined_is_tried_again_after_a_pause(valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        first = await gateway.place(an_arm("t1"))
        began = asyncio.get_running_loop().time()
        second = await gateway.requeue(an_arm("t1"))
        waited_ms = 1000 * (asyncio.get_running_loop().time() - began)
        assert second.replica == first.replica
        assert second.placement > first.placement
        assert waited_ms >= POOL_RULES.placement.decline_pause_ms - 5


async def test_what_a_dead_gateway_held_is_free_after_its_lease(valkey_url):
    replicas = (a_replica(sequences=2),)
    async with dispatchers(valkey_url, replicas=replicas) as (dying, living):
        for ticket in ("t1", "t2"):
            await dying.admit(an_admit(ticket, limits=Limits(concurrency=2)))
            await dying.place(an_arm(ticket))
        waiting = asyncio.create_task(living.place(an_arm("t3")))
        await dying.close()
        await asyncio.sleep(0.3)
        assert not waiting.done()
        async with asyncio.timeout(3.0):
            placed = await waiting
        admitted = await living.admit(an_admit("t3", limits=Limits(concurrency=2)))
        assert isinstance(admitted, Admitted)
        await end(living, "t3", placed)
        await until_idle(valkey_url)


async def test_tickets_of_a_living_gateway_outlast_many_leases(valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        await gateway.admit(an_admit("t1", limits=Limits(concurrency=1)))
        placed = await gateway.place(an_arm("t1"))
        await asyncio.sleep(2.5 * POOL_RULES.lease_ms / 1000)
        found = await audit(valkey_url)
        assert found.tenants[0].held == ("t1",)
        assert found.pools[0].placed == 1
        refused = await gateway.admit(an_admit("t2", limits=Limits(concurrency=1)))
        assert refused.reason == "concurrency"
        await end(gateway, "t1", placed)
        await until_idle(valkey_url)


async def test_a_gateway_that_decides_from_old_rows_is_told_which(valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        await gateway.push_versions(
            tenants={"ten": 2}, keys={("ten", "key"): 3}, routes={"model": 4}
        )
        await gateway.push_versions(tenants={"ten": 1}, routes={"model": 2})

        async def ask(key: int, tenant: int, route: int):
            versions = CacheVersions(key=key, tenant=tenant, route=route)
            return await gateway.admit(an_admit("t1", versions=versions))

        assert await ask(1, 1, 1) == Stale(key=True, tenant=True, route=True)
        assert await ask(2, 2, 4) == Stale(key=True)
        assert await ask(3, 1, 4) == Stale(tenant=True)
        assert await ask(3, 2, 3) == Stale(route=True)
        assert (await audit(valkey_url)).tickets == 0
        assert isinstance(await ask(3, 2, 4), Admitted)
        assert isinstance(await ask(9, 9, 9), Admitted)


async def test_output_is_charged_as_it_is_produced_and_input_is_trued_up(valkey_url):
    limits = Limits(output_tokens_per_min=1_000, input_tokens_per_min=1_000)
    async with dispatchers(valkey_url, 1) as (gateway,):
        await gateway.admit(an_admit("t1", limits=limits, input_tokens=400))
        placed = await gateway.place(an_arm("t1"))
        for produced in (1, 500, 1_500):
            gateway.charge_output(tenant="ten", ticket="t1", tokens=produced)
            await asyncio.sleep(0.05)
        refused = await gateway.admit(an_admit("t2", limits=limits, input_tokens=1))
        assert refused.reason == "output_tokens"
        assert 25_000 < refused.retry_after_ms < 31_000
        assert refused.headroom.input_tokens.remaining < 620
        await end(gateway, "t1", placed, actual_input_tokens=0)
        refused = await gateway.admit(an_admit("t2", limits=limits, input_tokens=1))
        assert refused.headroom.input_tokens.remaining == 1_000
        await until_idle(valkey_url)


async def test_cancel_gives_everything_back_and_may_be_repeated(valkey_url):
    limits = Limits(requests_per_min=10, input_tokens_per_min=1_000, concurrency=1)
    async with dispatchers(valkey_url, 1) as (gateway,):
        for _ in range(30):
            await gateway.admit(an_admit("t1", limits=limits, input_tokens=1_000))
            await gateway.place(an_arm("t1"))
            for _ in range(2):
                await gateway.cancel(ticket="t1", pool=POOL, tenant="ten")
        answer = await gateway.admit(an_admit("t2", limits=limits, input_tokens=1_000))
        assert isinstance(answer, Admitted)
        assert answer.headroom.requests.remaining == 9


async def test_a_ticket_that_waits_past_its_deadline_is_dropped(valkey_url):
    async with dispatchers(valkey_url, 1, replicas=(a_replica(sequences=1),)) as (gateway,):
        placed = await gateway.place(an_arm("t1"))
        now_ms = int(1000 * redis_time(valkey_url))
        began = asyncio.get_running_loop().time()
        dropped = await gateway.place(an_arm("t2", deadline_ms=now_ms + 200))
        assert dropped == Dropped(reason="expired")
        assert 0.15 < asyncio.get_running_loop().time() - began < 1.0
        assert await gateway.place(an_arm("t3", deadline_ms=now_ms)) == Dropped(reason="expired")
        await end(gateway, "t1", placed)
        await until_idle(valkey_url)


async def test_a_ticket_that_the_dispatcher_lost_does_not_wait_for_ever(valkey_url):
    async with dispatchers(valkey_url, 1, replicas=(a_replica(sequences=1),)) as (gateway,):
        placed = await gateway.place(an_arm("t1"))
        deadline_ms = int(1000 * redis_time(valkey_url)) + 200
        waiting = asyncio.create_task(gateway.place(an_arm("t2", deadline_ms=deadline_ms)))
        await asyncio.sleep(0.1)
        with redis.Redis.from_url(valkey_url) as client:
            client.hdel(f"{{p:{POOL}}}:2:tickets", "t2")
            client.delete(
                f"{{p:{POOL}}}:2:fifo", f"{{p:{POOL}}}:2:standard", f"{{p:{POOL}}}:2:owned"
            )
            client.delete(f"{{p:{POOL}}}:2:state")
        for task in gateway._telling._loops:
            task.cancel()
        async with asyncio.timeout(2):
            assert await waiting == Dropped(reason="expired")
        assert placed.replica == "r1"


async def test_closing_lets_releases_leave(valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        await gateway.admit(an_admit("t1"))
        await gateway.place(an_arm("t1"))
        ending = gateway.cancel(ticket="t1", pool=POOL, tenant="ten")
        await asyncio.sleep(0)
        await gateway.close()
        await ending
    await until_idle(valkey_url)


async def test_hopeless_tickets_are_dropped_at_once(valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        assert await gateway.place(an_arm("t1", kv_blocks=101)) == Dropped(reason="fits_never")
        nowhere = an_arm("t2", pool="elsewhere@local")
        began = asyncio.get_running_loop().time()
        assert await gateway.place(nowhere) == Dropped(reason="no_replica")
        assert asyncio.get_running_loop().time() - began < 1.5
        await until_idle(valkey_url)


async def test_a_replica_s_report_corrects_its_account(valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        placed = await gateway.place(an_arm("t1"))
        report = Load(
            boot_id=placed.boot_id,
            seq=1,
            kv_blocks_total=100,
            kv_blocks_free=5,
            running=1,
            waiting=0,
            placed_seq=placed.placement,
        )
        gateway.observe(POOL, "r1", report)
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(gateway.place(an_arm("t2", kv_blocks=50)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        gateway.observe(POOL, "r1", msgspec.structs.replace(report, seq=2, kv_blocks_free=90))
        async with asyncio.timeout(1.0):
            second = await waiting
        await end(gateway, "t1", placed)
        await end(gateway, "t2", second)
        await until_idle(valkey_url)


async def test_a_replica_s_next_life_starts_with_an_empty_account(valkey_url):
    async with dispatchers(valkey_url, 1, replicas=(a_replica(sequences=1),)) as (gateway,):
        old = await gateway.place(an_arm("t1"))
        gateway.set_replicas(POOL, (a_replica(sequences=1, boot_id="boot_next"),))
        await asyncio.sleep(0.1)
        new = await gateway.place(an_arm("t2"))
        assert (old.boot_id, new.boot_id) == ("boot_r1", "boot_next")
        await end(gateway, "t1", old)
        assert (await audit(valkey_url)).kv_blocks == 1
        await end(gateway, "t2", new)
        await until_idle(valkey_url)


async def test_an_audit_finds_an_account_that_is_not_the_sum_of_its_tickets(valkey_url):
    async with dispatchers(valkey_url, 1) as (gateway,):
        await gateway.place(an_arm("t1"))
        with redis.Redis.from_url(valkey_url) as client:
            client.hdel(f"{{p:{POOL}}}:2:tickets", "t1")
        found = await audit(valkey_url)
        assert len(found.problems) == 2
        assert "r1 has open 1, its tickets sum to 0" in found.problems[0]
        assert not found.is_idle


async def test_many_more_tickets_than_one_message_takes(valkey_url):
    rules = msgspec.structs.replace(RULES, batch_max=3)
    async with dispatchers(valkey_url, rules=rules, replicas=(a_replica(sequences=2),)) as gateways:
        everyone_is_here = asyncio.Event()

        async def request(gateway: Dispatch, ticket: str) -> None:
            await gateway.admit(an_admit(ticket))
            placed = await gateway.place(an_arm(ticket))
            gateway.charge_output(tenant="ten", ticket=ticket, tokens=5)
            await everyone_is_here.wait()
            await end(gateway, ticket, placed)

        requests = [asyncio.create_task(request(gateways[i % 2], f"t{i}")) for i in range(60)]
        await until(lambda: sum(len(gateway._flights) for gateway in gateways) == 60)
        everyone_is_here.set()
        await asyncio.gather(*requests)
        await until_idle(valkey_url)


def redis_time(url: str) -> float:
    with redis.Redis.from_url(url) as client:
        seconds, micros = client.time()
    return seconds + micros / 1e6
