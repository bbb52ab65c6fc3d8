"""The pool: reads cannot write, transactions commit or leave nothing, waits are bounded."""

import asyncio

import psycopg
import pytest

from store.postgres import Postgres, PostgresConfig, StoreAwayError, connect

pytestmark = [pytest.mark.anyio, pytest.mark.services]


@pytest.fixture
async def small(postgres_url):
    """One connection, and little patience."""
    pg = await Postgres.open(
        PostgresConfig(
            database_url=postgres_url,
            application_name="small",
            connections_max=1,
            acquire_timeout_s=0.3,
            statement_timeout_ms=300,
            lock_timeout_ms=100,
            transaction_timeout_s=1.0,
        )
    )
    async with pg.transaction() as conn:
        await conn.execute("CREATE TABLE IF NOT EXISTS scratch (n integer)")
        await conn.execute("DELETE FROM scratch")
    yield pg
    await pg.close()


async def count(pg):
    async with pg.connection() as conn:
        row = await (await conn.execute("SELECT count(*) FROM scratch")).fetchone()
        return row[0]


async def insert_twice(pg, pause_s, *, into="scratch"):
    async with pg.transaction() as conn:
        await conn.execute("INSERT INTO scratch VALUES (1)")
        await asyncio.sleep(pause_s)
        await conn.execute(f"INSERT INTO {into} VALUES (2)")


async def test_a_transaction_commits_at_its_end(small):
    async with small.transaction() as conn:
        await conn.execute("INSERT INTO scratch VALUES (1)")
    assert await count(small) == 1


async def test_a_transaction_that_raises_leaves_nothing(small):
    with pytest.raises(psycopg.errors.UndefinedTable):
        await insert_twice(small, 0, into="nowhere")
    assert await count(small) == 0


async def test_a_reader_cannot_write(small):
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        async with small.connection() as conn:
            await conn.execute("INSERT INTO scratch VALUES (1)")


async def test_our_own_mistakes_are_not_called_away(small):
    with pytest.raises(psycopg.errors.UndefinedTable):
        async with small.connection() as conn:
            await conn.execute("SELECT * FROM nowhere")


async def test_too_few_connections_are_away(small):
    async with small.connection():
        with pytest.raises(StoreAwayError):
            async with small.connection():
                raise AssertionError


async def test_a_slow_statement_is_away(small):
    with pytest.raises(StoreAwayError, match="statement timeout"):
        async with small.connection() as conn:
            await conn.execute("SELECT pg_sleep(5)")
    assert await count(small) == 0


async def test_a_lock_held_elsewhere_is_away(small, postgres_url):
    config = PostgresConfig(database_url=postgres_url, application_name="other")
    other = await connect(config)
    async with other.transaction():
        await other.execute("LOCK TABLE scratch")
        with pytest.raises(StoreAwayError, match="lock timeout"):
            async with small.transaction() as conn:
                await conn.execute("INSERT INTO scratch VALUES (1)")
    await other.close()


async def test_a_block_that_takes_too_long_is_cut(small):
    with pytest.raises(StoreAwayError):
        await insert_twice(small, 1.2)
    assert await count(small) == 0


async def test_a_connection_closed_by_the_server_is_never_handed_out(small, postgres_url):
    assert await count(small) == 0
    other = await connect(PostgresConfig(database_url=postgres_url, application_name="other"))
    await other.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'small'"
    )
    await asyncio.sleep(0.1)
    assert await count(small) == 0
    await other.close()


async def test_options_in_the_address_are_kept(postgres_url):
    config = PostgresConfig(
        database_url=f"{postgres_url}?options=-c%20work_mem%3D7MB", application_name="optional"
    )
    conn = await connect(config, options={"jit": "off"})
    for name, value in (
        ("work_mem", "7MB"),
        ("jit", "off"),
        ("application_name", "optional"),
        ("statement_timeout", "5s"),
        ("plan_cache_mode", "force_generic_plan"),
    ):
        assert await (await conn.execute(f"SHOW {name}")).fetchone() == (value,)
    await conn.close()
