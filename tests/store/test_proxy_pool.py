"""The pool when the network or the server fails: every block ends in time, done or undone."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest

from store.postgres import CANCEL_TIMEOUT_S, Postgres, PostgresConfig, StoreAwayError, connect
from tests.support.fault_proxy import FaultProxy, Link, Moment, Passage, Way, lose_answer
from tests.support.postgres_faults import a_proxy, timed

pytestmark = [pytest.mark.anyio, pytest.mark.services]

BOUND_S = 0.4  # of a whole block
SLACK_S = 0.6  # a busy machine's


@pytest.fixture
async def proxy(postgres_url: str) -> AsyncIterator[FaultProxy]:
    async with a_proxy(postgres_url) as proxy:
        yield proxy


@pytest.fixture
async def direct(postgres_url: str) -> AsyncIterator[Postgres]:
    """What a test looks with."""
    pg = await Postgres.open(PostgresConfig(database_url=postgres_url, application_name="direct"))
    async with pg.transaction() as conn:
        await conn.execute("CREATE TABLE IF NOT EXISTS scratch (n integer UNIQUE)")
        await conn.execute("DELETE FROM scratch")
    yield pg
    await pg.close()


@pytest.fixture
async def pg(postgres_url: str, proxy: FaultProxy, direct: Postgres) -> AsyncIterator[Postgres]:
    """Two connections, and little patience."""
    pg = await Postgres.open(a_config(proxy.via(postgres_url)))
    await write(pg, 0)
    yield pg
    await pg.close()


def a_config(url: str) -> PostgresConfig:
    return PostgresConfig(
        database_url=url,
        application_name="proxied",
        connections_max=2,
        acquire_timeout_s=0.4,
        connect_timeout_s=1,
        transaction_timeout_s=BOUND_S,
    )


async def write(pg: Postgres, n: int) -> None:
    async with pg.transaction() as conn:
        await conn.execute("INSERT INTO scratch VALUES (%s)", (n,))


async def read(pg: Postgres) -> list[int]:
    async with pg.connection() as conn:
        cursor = await conn.execute("SELECT n FROM scratch ORDER BY n")
        return [n for (n,) in await cursor.fetchall()]


async def is_away_in_time(work, within_s: float = BOUND_S) -> None:
    answer, took_s = await timed(work)
    assert isinstance(answer, StoreAwayError), answer
    assert took_s < within_s + SLACK_S


async def is_well_again(pg: Postgres, n: int) -> None:
    """Soon, on as many connections as ever."""
    async with asyncio.timeout(5):
        while True:
            try:
                await write(pg, n)
            except StoreAwayError:
                await asyncio.sleep(0.02)
            except psycopg.errors.UniqueViolation:
                break  # done before, and its answer was lost
            else:
                break
    both = asyncio.Barrier(2)

    async def hold() -> None:
        async with pg.connection() as conn:
            await both.wait()
            await conn.execute("SELECT 1")

    async with asyncio.timeout(5):
        await asyncio.gather(hold(), hold())


async def test_a_slow_network_only_slows_within_the_bound_and_is_away_beyond(pg, proxy, direct):
    proxy.set(to_client=Passage(latency_s=0.05, jitter_s=0.02))
    answer, took_s = await timed(write(pg, 1))
    assert answer is None
    assert took_s >= 0.09  # three round trips, as jittery as they are
    proxy.set(to_client=Passage(latency_s=1))
    await is_away_in_time(write(pg, 2))
    proxy.heal()
    await is_well_again(pg, 3)
    assert await read(direct) == [0, 1, 3]


@pytest.mark.parametrize("way", Way)
async def test_a_black_hole_in_a_transaction_ends_it_in_time(pg, proxy, direct, way):
    async def interrupted() -> None:
        async with pg.transaction() as conn:
            await conn.execute("INSERT INTO scratch VALUES (1)")
            proxy.set(**{way.value: Passage(stalled=True)})
            await conn.execute("INSERT INTO scratch VALUES (2)")

    await is_away_in_time(interrupted())
    proxy.heal()
    await is_well_again(pg, 3)
    assert await read(direct) == [0, 3]


async def test_a_black_hole_keeps_nobody_waiting_for_a_connection(pg, proxy):
    proxy.black_hole()
    for _ in range(2):  # first those in the pool, then new ones
        await asyncio.gather(*(is_away_in_time(read(pg), 0.4 + BOUND_S) for _ in range(4)))
    proxy.heal()
    await is_well_again(pg, 1)


async def test_leaving_a_block_in_a_black_hole_is_as_quick(pg, proxy, direct):
    async def interrupted() -> None:
        async with pg.transaction() as conn:
            await conn.execute("INSERT INTO scratch VALUES (1)")
            proxy.black_hole()
            await conn.execute("INSERT INTO scratch VALUES (2)")

    leaving = asyncio.create_task(interrupted())
    await asyncio.sleep(0.1)
    leaving.cancel()
    _, took_s = await timed(asyncio.wait({leaving}))
    assert took_s < CANCEL_TIMEOUT_S + SLACK_S
    proxy.heal()
    await is_well_again(pg, 3)
    assert await read(direct) == [0, 3]


async def test_a_black_hole_does_not_keep_the_pool_from_closing(postgres_url, proxy):
    pg = await Postgres.open(a_config(proxy.via(postgres_url)))
    async with pg.connection() as conn:
        await conn.execute("SELECT 1")
    proxy.black_hole()
    held = asyncio.create_task(timed(read(pg)))
    await asyncio.sleep(0.05)
    _, took_s = await timed(pg.close())
    assert took_s < 1 + SLACK_S
    answer, _ = await held
    assert isinstance(answer, StoreAwayError)


async def test_a_new_connection_is_given_up_in_time(postgres_url, proxy):
    proxy.black_hole()
    await is_away_in_time(connect(a_config(proxy.via(postgres_url))), 1)
    proxy.refuse()
    await is_away_in_time(connect(a_config(proxy.via(postgres_url))), 0)


@pytest.mark.parametrize("cut", [FaultProxy.reset, FaultProxy.close_links])
async def test_connections_cut_while_idle_are_never_handed_out(pg, proxy, direct, cut):
    await is_well_again(pg, 1)  # both are open now
    cut(proxy)
    await asyncio.sleep(0.05)
    await write(pg, 2)
    await asyncio.gather(read(pg), read(pg))
    assert await read(direct) == [0, 1, 2]


async def test_a_cut_at_any_byte_of_a_transaction_leaves_all_of_it_or_nothing(pg, proxy, direct):
    await write(pg, 1_000)
    totals = {}
    for way in Way:
        before = proxy.bytes_passed(way)
        await write(pg, 1_000 + len(totals) + 1)
        totals[way] = proxy.bytes_passed(way) - before
    places = [(way, at) for way, total in totals.items() for at in range(1, total, 9)]
    uncertain = 0
    for n, (way, at) in enumerate(places, start=1):
        proxy.trap(way, Moment(after_bytes=at), Link.reset)
        answer, took_s = await timed(write(pg, n))
        assert took_s < BOUND_S + SLACK_S
        done = n in await read(direct)
        assert done if answer is None else isinstance(answer, StoreAwayError)
        uncertain += done and answer is not None
        proxy.heal()
        await is_well_again(pg, n)
    assert uncertain > 0, "some were cut after the commit"


async def test_a_commit_whose_answer_is_lost_is_away_and_done(pg, proxy, direct):
    trap = proxy.trap(Way.TO_SERVER, Moment(after=b"COMMIT"), lose_answer)
    await is_away_in_time(write(pg, 1), 0)
    assert trap.sprung.is_set()
    assert await read(direct) == [0, 1]
    await is_well_again(pg, 2)


async def nobody_is_left(conn) -> bool:
    cursor = await conn.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'proxied'"
    )
    return await cursor.fetchone() == (0,)


async def test_a_goodbye_whose_end_comes_late_is_not_waited_for_beyond_the_bound(pg, proxy, direct):
    proxy.set(to_client=Passage(close_delay_s=30))
    async with direct.connection() as conn:
        await conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'proxied'"
        )
        while not await nobody_is_left(conn):  # noqa: ASYNC110 - the server tells of no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    await write(pg, 1)  # the goodbye itself was noticed

    async def terminated() -> None:
        async with pg.transaction() as conn:
            await conn.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    await is_away_in_time(terminated())
    proxy.heal()
    await is_well_again(pg, 2)


async def test_a_deadlock_and_a_lost_race_are_away_and_may_be_tried_again(pg, direct):
    async def in_turns(first: int, second: int, both: asyncio.Barrier) -> None:
        async with pg.transaction() as conn:
            await conn.execute("SET LOCAL deadlock_timeout = '10ms'")
            await conn.execute("UPDATE scratch SET n = n WHERE n = %s", (first,))
            await both.wait()
            await conn.execute("UPDATE scratch SET n = n WHERE n = %s", (second,))

    async def raced(both: asyncio.Barrier) -> None:
        async with pg.transaction() as conn:
            await conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await conn.execute("SELECT 1 FROM scratch")
            await both.wait()
            await conn.execute("UPDATE scratch SET n = n WHERE n = 1")

    await write(pg, 1)
    for sqlstate in ("40P01", "40001"):
        both = asyncio.Barrier(2)
        work = (
            (in_turns(0, 1, both), in_turns(1, 0, both))
            if sqlstate == "40P01"
            else (raced(both), raced(both))
        )
        ends = await asyncio.gather(*work, return_exceptions=True)
        failed = [end for end in ends if end is not None]
        assert len(failed) == 1
        assert isinstance(failed[0], StoreAwayError)
        assert isinstance(failed[0].__cause__, psycopg.Error)
        assert failed[0].__cause__.sqlstate == sqlstate
    await is_well_again(pg, 2)
