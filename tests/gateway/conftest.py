"""One gateway in front of one scripted worker, for tests that need no other arrangement."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway_world import Caller, World, a_world
from tests.support.services import ValkeyServer


@pytest.fixture(scope="module")
def valkey_url(valkey_server: ValkeyServer) -> str:
    """Emptied for each module, as its database is, and not for each test.

    A dispatcher without memory waits a second before it serves.
    """
    valkey_server.flush()
    return valkey_server.embedded.url


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path) as made:
        yield made


@pytest.fixture
async def caller(world: World) -> Caller:
    return await world.add_caller()
