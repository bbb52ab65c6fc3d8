"""Postgres and a ledger on it, as these tests want them."""

from collections.abc import AsyncIterator

import pytest

from store.ledger import Ledger
from store.postgres import Postgres, PostgresConfig


@pytest.fixture
async def pg(postgres_url: str) -> AsyncIterator[Postgres]:
    pg = await Postgres.open(PostgresConfig(database_url=postgres_url, application_name="test"))
    yield pg
    await pg.close()


@pytest.fixture
async def ledger(postgres_url: str) -> AsyncIterator[Ledger]:
    ledger = await Ledger.open(postgres_url)
    yield ledger
    await ledger.close()
