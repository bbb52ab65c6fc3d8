"""One control plane for each test, on a database and a Valkey that are real."""

import pytest

from tests.support.control_plane import running, the_settings
from tests.support.reconciler_case import a_case


@pytest.fixture
async def plane(postgres_url, valkey_url):
    async with running(the_settings(postgres_url, valkey_url)) as plane:
        yield plane


@pytest.fixture
async def case(fresh_postgres_url, valkey_url):
    async with a_case(fresh_postgres_url, valkey_url) as case:
        yield case


@pytest.fixture
async def overdue(fresh_postgres_url, valkey_url):
    """For whom everything is overdue at once."""
    async with a_case(fresh_postgres_url, valkey_url, reconcile_overdue_ms=0) as case:
        yield case
