"""A model with less room than is asked for: who waits, who hears at once that waiting is vain."""

import asyncio

import httpx
import pytest

from core.fleet import ReplicaState
from store.dispatch import audit
from tests.support.gateway_world import MODEL, POOL, Caller, World, a_capacity, until
from tests.support.scripted_worker import answers

pytestmark = [pytest.mark.anyio, pytest.mark.services]

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
ENDPOINTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "Hello", "max_tokens": 8},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": MODEL, "input": "Hello", "max_output_tokens": 16, "store": False},
}
STAY_S = 0.1


@pytest.fixture
async def client(world):
    many = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=world.url, timeout=60, limits=many) as client:
        yield client


async def ask(
    client: httpx.AsyncClient, caller: Caller, path: str = "/v1/chat/completions", **headers: str
) -> httpx.Response:
    told = {"authorization": f"Bearer {caller.key}"} | headers
    return await client.post(path, json=ENDPOINTS[path], headers=told)


# vllm-project/router #179, sglang P15473: one code path never counts load, so one worker of
# eight gets everything until it runs out of memory.
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_endpoint_counts_on_its_replica_s_account(world, client, caller, path):
    world.worker.default = answers(3, delay_s=0.5)
    asking = asyncio.create_task(ask(client, caller, path))
    await until(lambda: world.worker.requests)
    found = await audit(world.settings.redis_url)
    assert [(pool.placed, pool.replicas[0].tickets) for pool in found.pools] == [(1, 1)]
    assert found.kv_blocks > 0
    assert (await asking).status_code == 200
    await world.dispatcher_is_empty()


async def test_who_cannot_be_done_in_time_is_told_the_wait_and_costs_nothing(world, client, caller):
    await fill(world, client, caller)
    flood = [asyncio.create_task(ask(client, caller)) for _ in range(40)]
    await until(lambda: waiting(world) >= 30)
    exposed = shown(await client.get("/metrics"))
    assert exposed[f'queue_length{{class="standard",pool="{POOL}"}}'] >= 20
    assert exposed[f'queue_length{{class="batch",pool="{POOL}"}}'] == 0
    before = len(world.worker.requests)
    hasty = {"x-headworks-deadline-ms": "200"}
    refused = [await ask(client, caller, **hasty) for _ in range(2)]
    for answer in refused:
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert "would not be done by its deadline" in answer.json()["error"]["message"]
    assert len(world.worker.requests) - before < 10
    exposed = shown(await client.get("/metrics"))
    assert exposed['refusals_total{reason="too_late",scope="pool"}'] == 2
    assert exposed[f'expected_wait_seconds{{pool="{POOL}"}}'] > 0
    assert {answer.status_code for answer in await asyncio.gather(*flood)} == {200}
    other = await world.add_caller()
    assert (await ask(client, other, **{"x-headworks-deadline-ms": "5000"})).status_code == 200
    await world.dispatcher_is_empty()


async def test_a_newcomer_does_not_wait_for_another_s_flood(world, client, caller):
    await fill(world, client, caller, sequences=8)
    world.worker.default = answers(8, gap_s=STAY_S)
    flood = [asyncio.create_task(ask(client, caller)) for _ in range(60)]
    await until(lambda: waiting(world) >= 50)
    other = await world.add_caller()
    served_before = len(world.worker.requests)
    assert (await ask(client, other)).status_code == 200
    assert len(world.worker.requests) <= served_before + 1 + 8, "at most those beside it"
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await world.dispatcher_is_empty()


# llm-d-router #1735: zero endpoints answered 429 instead of 503.
async def test_a_model_scaled_to_zero_is_our_fault_and_says_when_to_come_back(
    world, client, caller
):
    await world.register(world.worker, ReplicaState.DRAINING)
    pool = next(iter(world.gateway.routes.view.replicas))
    world.gateway.routes._no_replica_s = 0.2
    await until(lambda: world.gateway.routes.deserted(pool))
    chat = await ask(client, caller)
    assert (chat.status_code, chat.headers["retry-after"] != "") == (503, True)
    messages = await ask(client, caller, "/v1/messages")
    assert (messages.status_code, messages.headers["retry-after"] != "") == (529, True)


async def fill(world: World, client: httpx.AsyncClient, caller: Caller, sequences: int = 2) -> None:
    """A small worker whose times are known."""
    await world.register(world.worker, capacity=a_capacity(sequences=sequences))
    await asyncio.sleep(0.3)
    world.worker.default = answers(2, delay_s=STAY_S)
    for _ in range(10):
        done = await asyncio.gather(*(ask(client, caller) for _ in range(2)))
        assert {answer.status_code for answer in done} == {200}


def shown(answer: httpx.Response) -> dict[str, float]:
    """Series of the gateway's, by what follows its prefix."""
    lines = (line.rpartition(" ") for line in answer.text.splitlines() if line[:1] != "#")
    return {name.removeprefix("headworks_gateway_"): float(value) for name, _, value in lines}


def waiting(world: World) -> int:
    return len(world.gateway._dispatch._telling.pools[POOL]._waiting)
