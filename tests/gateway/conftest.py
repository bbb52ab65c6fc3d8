"""One gateway in front of one scripted worker, for tests that need no other arrangement."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway_world import Caller, World, a_world


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path) as made:
        yield made


@pytest.fixture
async def caller(world: World) -> Caller:
    return await world.add_caller()
