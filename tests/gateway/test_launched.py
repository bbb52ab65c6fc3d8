"""Replicas that the control plane starts itself: counted, drained, adopted, replaced.

Real processes of this machine, without an engine; a real gateway, Postgres and Valkey. What each
test is named after was somebody's complaint about another system.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.fleet import ReplicaState
from tests.support.gateway_requests import CHAT, post, text_of
from tests.support.gateway_world import DEPLOYMENT, POOL, Caller, World, a_world, until
from tests.support.launched_world import WAIT_S, Plane, a_plane, kill_all
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import whole_text
from tests.support.services import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.services]


class Machine:
    """Where control planes come and go, and their workers stay."""

    def __init__(self, world: World, directory: Path, valkey_url: str) -> None:
        self.world = world
        self.directory = directory
        self.port = free_port()
        self._valkey_url = valkey_url

    @asynccontextmanager
    async def plane(self, **changes: Any) -> AsyncIterator[Plane]:
        url = self.world.settings.database_url
        async with a_plane(
            url, self._valkey_url, self.directory / "launcher", port=self.port, **changes
        ) as plane:
            self.launcher = plane.launcher
            yield plane


@pytest.fixture
async def machine(
    fresh_postgres_url: str, valkey_url: str, tmp_path: Path
) -> AsyncIterator[Machine]:
    async with a_world(fresh_postgres_url, valkey_url, tmp_path, worker_idle_ms=5_000) as world:
        # The one that the world begins with is nobody's here.
        await world.worker.stop()
        await world.register(world.worker, ReplicaState.STOPPED)
        made = Machine(world, tmp_path, valkey_url)
        try:
            yield made
        finally:
            kill_all(made.launcher)


@pytest.fixture
async def caller(machine: Machine) -> Caller:
    return await machine.world.add_caller()


async def test_one_to_three_and_back_to_one(machine: Machine, caller: Caller) -> None:
    async with machine.plane() as plane:
        await plane.want(1, launcher="local")
        [first] = await plane.until_serving(1)
        await plane.want(3)
        names = await plane.until_serving(3)
        assert len({place.pid for place in plane.alive().values()}) == 3
        await until(lambda: len(machine.world.gateway.routes.replicas(POOL)) >= 3)
        replies = await asyncio.gather(*(post(machine.world, caller) for _ in range(9)))
        assert [text_of(CHAT, reply) for reply in replies] == [whole_text(5)] * 9
        await plane.want(1)
        assert await plane.until_serving(1) == [first], "the oldest stays"
        rows = {r["replica_id"]: r for r in (await plane.admin("GET", "/replicas"))["replicas"]}
        assert {rows[name]["state"] for name in names if name != first} == {"stopped"}
        assert rows[first]["ready_ms"] >= rows[first]["started_ms"] > 0, "a cold start is measured"
