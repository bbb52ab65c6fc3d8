"""What is remembered of replicas and of their journals."""

import asyncio

import pytest

from core.fleet import ReplicaState
from store import fleet
from store.fleet import SilentReplica
from tests.support.registry import a_beat, a_deployment, a_register, open_postgres

pytestmark = [pytest.mark.services, pytest.mark.anyio]

REPLICA = SilentReplica(replica_id="rep-0", boot_id="boot_1", url="http://127.0.0.1:8100")


@pytest.fixture
async def pg(fresh_postgres_url):
    async with open_postgres(fresh_postgres_url) as postgres:
        async with postgres.transaction() as conn:
            await a_deployment(conn)
        yield postgres


async def put(pg, **changes):
    async with pg.transaction() as conn:
        await fleet.put_replica(conn, a_register(**changes))


async def row_of(pg, replica_id="rep-0"):
    async with pg.connection() as conn:
        rows = await fleet.replicas_page(conn, limit=10)
    return next(row for row in rows if row.replica_id == replica_id)


async def silent(pg, silent_ms):
    async with pg.connection() as conn:
        return await fleet.silent_replicas(conn, silent_ms=silent_ms, limit=10)


async def test_a_beat_overwrites_what_was_said_before(pg):
    await put(pg, state=ReplicaState.LOADING)
    async with pg.transaction() as conn:
        await fleet.take_beat(conn, a_beat(seq=3, kv_blocks_free=12, running=4, steps=99))
        current = await fleet.current_boot(conn, "rep-0")
    assert current == fleet.CurrentBoot(boot_id="boot_1", state=ReplicaState.READY, beat_seq=3)
    row = await row_of(pg)
    assert (row.kv_blocks_free, row.running, row.steps) == (12, 4, 99)
    assert row.silent_ms < 5_000


async def test_the_same_boot_again_keeps_its_sequence_and_a_new_one_starts_over(pg):
    await put(pg)
    async with pg.transaction() as conn:
        await fleet.take_beat(conn, a_beat(seq=5))
    await put(pg)
    assert (await row_of(pg)).beat_seq == 5
    await put(pg, boot_id="boot_2")
    row = await row_of(pg)
    assert (row.boot_id, row.beat_seq, row.steps, row.running) == ("boot_2", 0, 0, 0)


async def test_boots_are_remembered_with_their_positions(pg):
    await put(pg)
    await put(pg, boot_id="boot_2")
    async with pg.transaction() as conn:
        assert await fleet.boot_position(conn, "boot_1") == 0
        assert await fleet.boot_position(conn, "boot_3") is None
        assert await fleet.current_boot(conn, "rep-9") is None


async def test_a_journal_position_only_rises(pg):
    async def advance(acked):
        async with pg.transaction() as conn:
            return await fleet.advance_journal(
                conn, boot_id="boot_1", replica_id="rep-0", acked=acked
            )

    assert [await advance(acked) for acked in (5, 3, 5, 9)] == [5, 5, 5, 9]
    await put(pg)
    assert (await row_of(pg)).journal_acked == 9


async def test_silence_is_measured_by_the_databases_clock(pg):
    await put(pg)
    assert await silent(pg, 10_000) == []
    await asyncio.sleep(0.02)
    assert await silent(pg, 10) == [REPLICA]


async def test_a_replica_is_lost_only_while_it_is_silent_and_the_same_life(pg):
    await put(pg)
    async with pg.transaction() as conn:
        assert not await fleet.mark_lost(conn, REPLICA, silent_ms=10_000)
    await asyncio.sleep(0.02)
    await put(pg, replica_id="rep-1", boot_id="boot_other")
    async with pg.transaction() as conn:
        other = SilentReplica(replica_id="rep-0", boot_id="boot_0", url="")
        assert not await fleet.mark_lost(conn, other, silent_ms=10)
        assert await fleet.mark_lost(conn, REPLICA, silent_ms=10)
        assert not await fleet.mark_lost(conn, REPLICA, silent_ms=10)
    assert (await row_of(pg)).state is ReplicaState.LOST
    assert [r.replica_id for r in await silent(pg, 1)] == ["rep-1"]


async def test_a_beat_brings_a_lost_replica_back(pg):
    await put(pg)
    await asyncio.sleep(0.02)
    async with pg.transaction() as conn:
        assert await fleet.mark_lost(conn, REPLICA, silent_ms=10)
    async with pg.transaction() as conn:
        await fleet.take_beat(conn, a_beat())
    assert (await row_of(pg)).state is ReplicaState.READY


async def test_only_the_long_gone_are_forgotten(pg):
    await put(pg)
    await put(pg, replica_id="rep-1", boot_id="boot_x", state=ReplicaState.STOPPED)
    await asyncio.sleep(0.02)
    async with pg.transaction() as conn:
        await fleet.forget_old(conn, kept_ms=60_000)
        assert len(await fleet.replicas_page(conn, limit=10)) == 2
        await fleet.forget_old(conn, kept_ms=10)
        assert [r.replica_id for r in await fleet.replicas_page(conn, limit=10)] == ["rep-0"]
        assert await fleet.boot_position(conn, "boot_x") == 0
