"""The control plane starts the real worker on this machine: one, three, and one again."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.fleet import ReplicaState
from tests.support.gateway_requests import CHAT, post
from tests.support.gateway_world import POOL, World, a_world, tiny_store, until, until_answered
from tests.support.launched_world import Plane, a_plane, kill_all
from tests.support.services import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.services]

WORKER = (sys.executable, "-m", "worker")
SPEC = {"threads": 1, "kv_blocks": 64, "max_sequences": 8}
TOKENS = 20


@pytest.fixture
async def world(fresh_postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(fresh_postgres_url, valkey_url, tmp_path) as made:
        await made.worker.stop()
        await made.register(made.worker, ReplicaState.STOPPED)
        yield made


@pytest.fixture
async def plane(world: World, valkey_url: str, tmp_path: Path) -> AsyncIterator[Plane]:
    store, _ = tiny_store()
    async with a_plane(
        world.settings.database_url,
        valkey_url,
        tmp_path / "launcher",
        port=free_port(),
        command=WORKER,
        models_dir=store.root,
    ) as made:
        try:
            yield made
        finally:
            kill_all(made.launcher)


async def have_stepped(plane: Plane) -> bool:
    """Whether each has generated, which nobody may have asked it for: it warms up before."""
    return all(row["steps"] for row in await plane.replicas())


async def test_from_one_to_three_replicas_and_back_without_a_failed_request(
    world: World, plane: Plane
) -> None:
    caller = await world.add_caller()
    await plane.want(1, launcher="local", spec=SPEC)
    [first] = await plane.until_serving(1)
    await until(lambda: any(view.ready for view in world.gateway.routes.replicas(POOL)))
    asked = asyncio.Event()
    statuses: list[int] = []

    async def keep_asking() -> None:
        while not asked.is_set():
            reply = await post(world, caller, CHAT, max_tokens=TOKENS)
            statuses.append(reply.status_code)

    client = asyncio.create_task(keep_asking())
    await plane.want(3)
    names = await plane.until_serving(3)
    await until_answered(lambda: have_stepped(plane))
    rows = {row["replica_id"]: row for row in await plane.replicas()}
    for name in names:
        assert rows[name]["ready_ms"] > rows[name]["started_ms"], "a cold start is measured"
    await plane.want(1)
    assert await plane.until_serving(1) == [first]
    asked.set()
    await client
    assert set(statuses) == {200}
    await world.settled(caller, len(statuses))
    await world.dispatcher_is_empty()
