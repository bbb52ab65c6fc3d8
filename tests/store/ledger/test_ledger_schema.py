"""The schema: as described, migrated by one at a time, and guarded by the database itself."""

import asyncio
import subprocess
import sys

import psycopg
import pytest

from store.ledger_audit import audit
from store.migrate import check, upgrade
from store.postgres import Postgres, PostgresConfig
from tests.support.ledger_commands import a_reserve
from tests.support.ledger_database import a_tenant

pytestmark = pytest.mark.services


def test_the_description_and_the_migrations_agree(postgres_url):
    check(postgres_url)


@pytest.mark.anyio
async def test_two_migrators_at_once_take_turns(empty_postgres_url):
    await asyncio.gather(
        *(asyncio.to_thread(_upgrade_elsewhere, empty_postgres_url) for _ in range(2))
    )
    pg = await Postgres.open(
        PostgresConfig(database_url=empty_postgres_url, application_name="test")
    )
    async with pg.connection() as conn:
        assert (await audit(conn)).violations == ()
    await pg.close()


def _upgrade_elsewhere(url):
    # Alembic's context belongs to the process: two migrators are two processes.

    code = f"from store.migrate import upgrade; upgrade({url!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_upgrading_again_changes_nothing(postgres_url):
    upgrade(postgres_url)


@pytest.mark.anyio
@pytest.mark.parametrize("table", ["entries", "prices"])
@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM {}", "TRUNCATE {}", "UPDATE {} SET {column} = {column}"],
)
async def test_what_is_append_only_cannot_be_changed(pg, ledger, table, statement):
    tenant = await a_tenant(pg)
    await ledger.reserve(a_reserve(f"{tenant}_{table}_{statement[:3]}", tenant_id=tenant))
    column = {"entries": "kind", "prices": "model"}[table]
    with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
        async with pg.transaction() as conn:
            await conn.execute(statement.format(table, column=column))


@pytest.mark.anyio
async def test_money_is_never_a_float(pg):
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT DISTINCT data_type FROM information_schema.columns"
            " WHERE table_schema = 'public' AND column_name LIKE '%\\_micro'"
        )
        assert await cursor.fetchall() == [("bigint",)]
