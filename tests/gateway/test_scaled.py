"""The autoscaler with real processes: from one replica to three under load, and back.

A real gateway, Postgres and Valkey, a control plane that leads, decides and launches; its
workers are processes without an engine. Windows are short, so that a test can wait for them.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.fleet import ReplicaState
from tests.gateway.test_launched import Machine
from tests.support.gateway_requests import post
from tests.support.gateway_world import DEPLOYMENT, a_world, until
from tests.support.launched_world import kill_all
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import whole_text

pytestmark = [pytest.mark.anyio, pytest.mark.services]

TOKENS = 20
SCRIPT = {"SCRIPT_TOKENS": str(TOKENS), "SCRIPT_GAP_S": "0.05"}
POLICY = {
    "max_replicas": 3,
    "work_rate_prior": 40,  # a second: a third of what eight clients ask for
    "panic_window_ms": 1_000,
    "stable_window_ms": 2_000,
    "down_window_ms": 3_000,
    "stale_ms": 20_000,
    "ttft_objective_ms": 600_000,
}


@pytest.fixture
async def crowd(fresh_postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[Machine]:
    async with a_world(fresh_postgres_url, valkey_url, tmp_path, worker_idle_ms=5_000) as world:
        await world.worker.stop()
        await world.register(world.worker, ReplicaState.STOPPED)
        made = Machine(world, tmp_path, valkey_url)
        try:
            yield made
        finally:
            kill_all(made.launcher)


async def test_load_brings_three_replicas_and_quiet_one_and_no_answer_is_cut(
    crowd: Machine,
) -> None:
    caller = await crowd.world.add_caller()
    texts: list[list[str]] = []
    enough = asyncio.Event()

    async def ask_on() -> None:
        while not enough.is_set():
            reply = await post(crowd.world, caller, stream=True)
            texts.append(check_openai_chat_stream(reply.content, include_usage=False).texts)

    async with crowd.plane(scaling_every_ms=200, script=SCRIPT) as plane:
        await plane.admin("PATCH", f"/deployments/{DEPLOYMENT}", {"launcher": "local"})
        await plane.admin("PUT", f"/scaling-policies/deployment:{DEPLOYMENT}", POLICY)
        [first] = await plane.until_serving(1)
        await until(lambda: len(crowd.ready()) == 1)
        clients = [asyncio.create_task(ask_on()) for _ in range(8)]
        try:
            await plane.until_serving(3)
        finally:
            enough.set()
        await asyncio.gather(*clients)
        assert texts == [[whole_text(TOKENS)]] * len(texts)
        assert await plane.until_serving(1) == [first]
        page = await plane.admin("GET", "/scaling-decisions", deployment=DEPLOYMENT)
    counts = [one["desired"] for one in reversed(page["decisions"])]
    turns = [count for place, count in enumerate(counts) if count != counts[place - 1] or not place]
    assert (turns[0], max(turns), turns[-1]) == (1, 3, 1)
    assert sorted(turns[: turns.index(3) + 1]) == turns[: turns.index(3) + 1], "up without a turn"
    assert all(one["reasons"] for one in page["decisions"])
