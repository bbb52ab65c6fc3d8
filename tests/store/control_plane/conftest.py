"""One control plane for each test, on a database and a Valkey that are real."""

import pytest

from tests.support.control_plane import running, the_settings


@pytest.fixture
async def plane(postgres_url, valkey_url):
    async with running(the_settings(postgres_url, valkey_url)) as plane:
        yield plane
