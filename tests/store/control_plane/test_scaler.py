"""The autoscaler's rounds on real Postgres and Valkey: what is seen, written, and by whom."""

import asyncio
import secrets
import time

import msgspec
import psycopg
import pytest

from control_plane.scaler import Scaler, plan_for, policy_of, signals_now
from control_plane.scaling.signals import Missing, Observed, Phase
from core.fleet import ReplicaState
from core.ids import pool_id
from store import fleet, registry, scaling
from store.dispatch import Dispatch
from store.keys import POOL_PARTS, pool_keys
from store.leader import NotLeaderError
from store.pool_view import Unknown, read_pool
from store.redis_client import RedisClient
from tests.support.control_plane import running, the_settings
from tests.support.dispatch_worlds import an_arm
from tests.support.dispatchers import RULES
from tests.support.gateway_world import until
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant
from tests.support.registry import a_beat, a_deployment, a_register, a_version

pytestmark = [pytest.mark.services, pytest.mark.anyio]

BOUND_S = 30.0
NEVER_MS = 3_600_000  # so that only the test's own rounds are run


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    settings = the_settings(fresh_postgres_url, valkey_url, scaling_every_ms=NEVER_MS)
    async with running(settings) as plane:
        await until(lambda: plane.has_run("scaler"), within_s=BOUND_S)
        async with plane.services.postgres.transaction() as conn:
            await a_version(conn)
            await a_deployment(conn, "d")
        yield plane


async def put(plane, **changes):
    body = {"max_replicas": 4, "work_rate_prior": 100} | changes
    answer = await plane.admin("PUT", "/scaling-policies/deployment:d", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def desired(plane):
    async with plane.services.postgres.connection() as conn:
        (one,) = await scaling.governed(conn, limit=10)
    return one.replicas_desired


async def decisions(plane):
    answer = await plane.admin("GET", "/scaling-decisions", deployment="d")
    return answer.json()["decisions"]


async def a_replica(plane, name, state, **beat):
    message = a_register(replica_id=name, boot_id=f"boot_{name}", deployment="d", state=state)
    async with plane.services.postgres.transaction() as conn:
        await fleet.put_replica(conn, message)
        told = {"replica_id": name, "boot_id": f"boot_{name}", "state": state}
        await fleet.take_beat(conn, a_beat(**(told | beat)))


async def served(plane, count, *, output=200, prompt=100):
    """Requests that came and ended just now."""
    now_ms = time.time_ns() // 1_000_000
    tenant = await a_tenant(plane.services.postgres)
    for _ in range(count):
        request_id = f"req_local_{now_ms - 2_000:012x}{secrets.token_hex(8)}"
        asked = a_reserve(
            request_id, tenant_id=tenant, created_ms=now_ms - 2_000, prompt_tokens=prompt
        )
        await plane.services.ledger.reserve(asked)
        await plane.services.ledger.settle(
            a_settle(request_id, tenant_id=tenant, ended_ms=now_ms - 1_000)
        )


async def signals(plane):
    async with plane.services.postgres.connection() as conn:
        (one,) = await scaling.governed(conn, limit=10)
    seen, _ = await signals_now(plane.services, one, policy_of(one.body))
    return seen


async def test_a_round_writes_the_count_its_reasons_and_what_it_remembers(plane):
    await put(plane, min_replicas=2)
    assert await desired(plane) is None
    scaler = Scaler(plane.services)
    await scaler.round()
    assert await desired(plane) == 2
    (told,) = await decisions(plane)
    assert (told["before"], told["desired"], told["start"]) == (None, 2, 2)
    assert told["reasons"] == ["stays at 2: that is the least"]
    await scaler.round()
    assert len(await decisions(plane)) == 1  # the same again is no news
    async with plane.services.postgres.connection() as conn:
        (one,) = await scaling.governed(conn, limit=10)
    assert one.state["target"] == 2


async def test_a_round_of_who_leads_no_more_writes_nothing(plane):
    await put(plane, min_replicas=2)
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("UPDATE leaders SET expires_at = clock_timestamp()")
        await conn.execute("UPDATE leaders SET holder = 'another', epoch = epoch + 1")
    with pytest.raises(NotLeaderError):
        await Scaler(plane.services).round()
    assert await desired(plane) is None
    assert await decisions(plane) == []


@pytest.mark.parametrize(
    "meanwhile",
    [
        "DELETE FROM scaling_policies",
        "UPDATE scaling_policies SET body = jsonb_set(body, '{max_replicas}', '1')",
        "UPDATE deployments SET replicas_desired = 1",
        "UPDATE deployments SET desired_state = 'draining'",
    ],
    ids=["policy deleted", "policy changed", "count changed", "drained"],
)
async def test_what_operators_did_between_a_look_and_its_write_stands(plane, meanwhile):
    await put(plane, min_replicas=2)
    async with plane.services.postgres.connection() as conn:
        (read,) = await scaling.governed(conn, limit=10)
    async with plane.services.postgres.transaction() as conn:
        await conn.execute(meanwhile)
    scaler = Scaler(plane.services)
    await scaler.decide_one(read)
    async with plane.services.postgres.connection() as conn:
        found = await registry.deployment(conn, "d")
    assert found is not None
    assert found.replicas_desired in (None, 1)
    assert await decisions(plane) == []


async def test_replicas_are_seen_in_their_phases_and_a_launch_unheard_of_is_coming(plane):
    await put(plane)
    await a_replica(plane, "r1", ReplicaState.READY, running=2, kv_blocks_free=16)
    await a_replica(plane, "r2", ReplicaState.LOADING)
    await a_replica(plane, "r3", ReplicaState.DRAINING)
    await a_replica(plane, "r4", ReplicaState.SLEEPING)
    await a_replica(plane, "r5", ReplicaState.STOPPED)
    async with plane.services.postgres.transaction() as conn:
        await conn.execute(
            "INSERT INTO launches (replica_id, deployment, launcher, home, asked_at)"
            " VALUES ('r6', 'd', 'local', 'here', now() - interval '1 hour')"
        )
        await conn.execute(  # it ran, ended, and is started again: not late since it was asked for
            "INSERT INTO launches (replica_id, deployment, launcher, home, asked_at, started_at)"
            " VALUES ('r5', 'd', 'local', 'here', now() - interval '1 hour', now())"
        )
    seen = await signals(plane)
    assert {one.replica: one.phase for one in seen.replicas} == {
        "r1": Phase.READY,
        "r2": Phase.COMING,
        "r3": Phase.LEAVING,
        "r4": Phase.ASLEEP,
        "r5": Phase.COMING,
        "r6": Phase.COMING,
    }
    first, last = seen.replicas[0], seen.replicas[-1]
    assert isinstance(first.kv_use, Observed)
    assert isinstance(first.slots_use, Observed)
    assert (first.kv_use.value, first.slots_use.value) == (0.75, 0.25)
    assert last.phase_ms >= 3_600_000 > seen.replicas[-2].phase_ms
    assert isinstance(last.kv_use, Missing)


async def test_work_is_counted_in_tokens_of_the_last_moments(plane):
    await put(plane)
    await served(plane, 3)  # 10 prompt tokens and 20 of an answer were metered of each
    open_id = f"req_local_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"
    tenant = await a_tenant(plane.services.postgres)
    await plane.services.ledger.reserve(
        a_reserve(
            open_id,
            tenant_id=tenant,
            created_ms=time.time_ns() // 1_000_000,
            prompt_tokens=70,
        )
    )
    seen = await signals(plane)
    assert isinstance(seen.served, Observed)
    assert isinstance(seen.arrived, Observed)
    assert seen.served.value * 30 == pytest.approx(3 * (10 + 2 * 20))
    assert seen.arrived.value * 30 == pytest.approx(3 * 10 + 70 + 4 * 2 * 20)
    assert seen.ttft_ms == Observed(20.0)
    assert isinstance(seen.cold_start_ms, Missing)


async def test_cold_starts_are_measured_from_replicas_history(plane):
    await put(plane)
    async with plane.services.postgres.transaction() as conn:
        for place, seconds in enumerate((10, 30, 20)):
            await a_replica(plane, f"r{place}", ReplicaState.READY)
            await conn.execute(
                "UPDATE replicas SET ready_at = now(), started_at = now() - %s * interval '1 s'"
                " WHERE replica_id = %s",
                (seconds, f"r{place}"),
            )
    seen = await signals(plane)
    assert isinstance(seen.cold_start_ms, Observed)
    assert seen.cold_start_ms.value == 20_000


async def test_a_deployment_at_zero_is_woken_by_what_waits_in_its_pool(plane, valkey_url):
    await put(plane, min_replicas=0)
    scaler = Scaler(plane.services)
    await scaler.round()
    assert await desired(plane) == 0
    pool = pool_id("d", "local")
    gateway = Dispatch(valkey_url, "gw", msgspec.structs.replace(RULES, pool=RULES.pool))
    await gateway.start()
    waits = asyncio.create_task(gateway.place(an_arm(pool=pool)))
    try:
        async with asyncio.timeout(BOUND_S):
            while await desired(plane) == 0:
                await scaler.round()
    finally:
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await gateway.close()
    assert await desired(plane) == 1
    newest = (await decisions(plane))[0]
    assert newest["reasons"] == ["wake: 1 needed: requests wait and nothing serves"]


async def test_a_pool_whose_state_is_not_what_it_was_is_unknown_and_told(plane, valkey_url):
    """A metric renamed: what is not there is an alarm, not an empty queue."""
    await put(plane, min_replicas=1)
    client = RedisClient(valkey_url)
    client.start()
    await client.connected.wait()
    key = pool_keys(pool_id("d", "local"))[POOL_PARTS.index("state")]
    renamed = msgspec.msgpack.encode({"depths": [1, 2, 3], "stay_us": 5, "open": 1, "samples": 9})
    await client.call(b"SET", key, renamed)
    await client.close()
    await Scaler(plane.services).round()
    (told,) = await decisions(plane)
    assert told["desired"] == 1
    assert any(alarm.startswith("queued missing (the pool's state") for alarm in told["alarms"])
    assert isinstance(read_pool(b"\xc1"), Unknown)


async def test_without_valkey_it_goes_on_by_what_postgres_says(fresh_postgres_url):
    nowhere = the_settings(
        fresh_postgres_url,
        "redis://127.0.0.1:1",
        scaling_every_ms=NEVER_MS,
        probe_timeout_ms=50,
    )
    async with running(nowhere) as plane:
        async with plane.services.postgres.transaction() as conn:
            await a_version(conn)
            await a_deployment(conn, "d")
        result = await put(plane)
        assert result["proposals"][0]["desired"] == 1
        async with plane.services.postgres.connection() as conn:
            (one,) = await scaling.governed(conn, limit=10)
        plan = await plan_for(plane.services, one)
    assert any(alarm.startswith("queued missing (Valkey: ") for alarm in plan.decision.alarms)


async def test_requests_that_cannot_be_counted_in_time_are_told_and_stop_no_round(plane):
    await put(plane, min_replicas=2)
    # Counting waits for this, for as long as a lock is waited for.
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
        await Scaler(plane.services).round()
    assert await desired(plane) == 2
    (told,) = await decisions(plane)
    missing = [alarm.split(" (")[0] for alarm in told["alarms"] if "(not counted" in alarm]
    assert missing == ["arrived missing", "served missing", "queued_work missing"]


async def test_one_policy_that_is_not_understood_stops_no_other(plane):
    await put(plane, min_replicas=2)
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn, "c", version="v1")
        await conn.execute(
            "INSERT INTO scaling_policies (target, deployment, model, body)"
            " VALUES ('deployment:c', 'c', 'smol', '{\"max_replicas\": \"many\"}')"
        )
    await Scaler(plane.services).round()
    assert [one["deployment"] for one in await decisions(plane)] == ["d"]


async def test_decisions_are_final_and_bounded(plane):
    await put(plane)
    word = {"before": 1, "desired": 2, "wake": 0, "start": 1, "stop": 0}
    async with plane.services.postgres.transaction() as conn:
        for _ in range(5):
            await scaling.tell_decision(conn, "d", {**word, "reasons": ["x"], "alarms": []})
    with pytest.raises(psycopg.errors.RestrictViolation):
        async with plane.services.postgres.transaction() as conn:
            await conn.execute("UPDATE scaling_decisions SET desired = 9")
    async with plane.services.postgres.transaction() as conn:
        await scaling.forget_decisions(conn, kept_ms=NEVER_MS, limit=100)
        await scaling.cut_decisions(conn, "elsewhere", kept_max=2, limit=100)
    assert len(await decisions(plane)) == 5
    async with plane.services.postgres.transaction() as conn:
        await scaling.cut_decisions(conn, "d", kept_max=2, limit=100)
    first, second = await decisions(plane)
    assert first["id"] > second["id"]
    answer = await plane.admin("GET", "/scaling-decisions", limit=1)
    older = await plane.admin("GET", "/scaling-decisions", before=answer.json()["before"])
    assert [one["id"] for one in older.json()["decisions"]] == [second["id"]]
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("SELECT pg_sleep(0.01)")
    async with plane.services.postgres.transaction() as conn:
        await scaling.forget_decisions(conn, kept_ms=1, limit=1)
    assert [one["id"] for one in await decisions(plane)] == [first["id"]]


async def test_the_warm_pool_of_a_policy_is_written_for_launchers(plane):
    await put(plane, min_replicas=1, warm_replicas=2)
    await Scaler(plane.services).round()
    async with plane.services.postgres.connection() as conn:
        found = await registry.deployment(conn, "d")
    assert found is not None
    assert (found.replicas_desired, found.replicas_warm) == (1, 2)
