"""A target that fails before it said anything: the next one answers, and nothing is owed for it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from artifacts.pull import pull
from core.fleet import ReplicaState
from core.money import EndCause
from core.pricing import ListedPrice
from core.route_table import CAUSES, Fallback, FallbackCause, Target
from core.tickets import Limits
from store import registry
from store.prices import seed_prices
from store.registry import VersionState
from tests.gateway.test_route_tables import OTHER, add_deployment, put, served
from tests.support.gateway_requests import (
    CHAT,
    COMPLETIONS,
    PATHS,
    a_body,
    error_of,
    headers_of,
    post,
    text_of,
)
from tests.support.gateway_world import (
    CONTEXT,
    DEPLOYMENT,
    MODEL,
    PRICE,
    Caller,
    World,
    a_world,
    tiny_store,
    until,
    until_answered,
)
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import answers, dies, fails, hangs, refuses, whole_text
from tests.support.tiny_llama import TinyLlama, write_hf

pytestmark = [pytest.mark.anyio, pytest.mark.services]

FIRST = Target(deployment=DEPLOYMENT)
SECOND = Target(deployment=OTHER)


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    changes: dict[str, Any] = {"no_replica_ms": 500, "unsent_ms": 500, "worker_abort_ms": 200}
    async with a_world(postgres_url, valkey_url, tmp_path, **changes) as made:
        await add_deployment(made, OTHER)
        yield made


async def falling_back(
    world: World, *causes: FallbackCause, first: Target = FIRST, name: str = MODEL
) -> None:
    spare = Fallback(on=causes or CAUSES, target=SECOND)
    await put(world, name, targets=(first,), fallbacks=(spare,))


def only_at_second(world: World) -> bool:
    return served(world)[f"rep-{OTHER}"] > 0


async def test_an_error_is_made_good_elsewhere_and_costs_nothing(world: World) -> None:
    # One at a time, and prepaid for little more than one: what the first held was given back.
    caller = await world.add_caller(limits=Limits(concurrency=1), hard_cap_micro=900)
    await falling_back(world, "error")
    for path in PATHS:
        for stream in (False, True):
            world.workers[0].script = [fails(retryable=False)]
            answer = await post(world, caller, path, stream=stream, max_tokens=20)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-headworks-fallbacks"] == "1"
            assert "w0.4" in answer.text
    assert served(world) == {"rep-0": 6, f"rep-{OTHER}": 6}
    rows = await world.settled(caller, 12)
    assert {row.cause for row in rows if row.billed_micro} == {EndCause.COMPLETE}
    given_up = [row for row in rows if not row.billed_micro]
    assert len(given_up) == 6
    assert {row.cause for row in given_up} <= {EndCause.FAILED, EndCause.NOT_STARTED}
    posted, reserved = await world.balance(caller)
    assert (posted, reserved) == (sum(row.billed_micro for row in rows), 0)
    await world.dispatcher_is_empty()


async def test_without_a_replica_another_target_has_the_room(world: World, caller: Caller) -> None:
    nobody = "tiny-nobody"
    async with world.postgres.transaction() as conn:
        await registry.create_deployment(
            conn, name=nobody, version=world.manifest.version, region="local"
        )
    await falling_back(world, "capacity", first=Target(deployment=nobody), name="deserted")
    await put(world, "lonely", targets=(Target(deployment=nobody),))
    async with world.postgres.transaction() as conn:
        for name in ("deserted", "lonely"):
            price = msgspec.structs.replace(PRICE, id=name)
            await seed_prices(conn, [ListedPrice(model=name, effective_ms=0, price=price)])
    await until(lambda: world.gateway.routes.deserted(f"{nobody}@local"))
    answer = await post(world, caller, model="deserted")
    assert text_of(CHAT, answer) == whole_text(5)
    for stream in (False, True):
        refused = await post(world, caller, model="lonely", stream=stream)
        assert refused.status_code == 503


async def test_all_targets_down_is_503_and_not_500(world: World, caller: Caller) -> None:
    # Kong: with every target down the answer was 500.
    await falling_back(world)
    world.worker.script = [fails(retryable=False)]
    await world.workers[1].kill()
    refused = await post(world, caller)
    assert refused.status_code == 503, refused.text
    assert refused.headers["x-headworks-fallbacks"] == "1"
    rows = await world.settled(caller, 2)
    assert sum(row.billed_micro for row in rows) == 0
    await world.dispatcher_is_empty()


async def test_a_slow_target_is_left_for_another(world: World, caller: Caller) -> None:
    slow = Target(deployment=DEPLOYMENT, first_token_ms=300)
    await falling_back(world, "timeout", first=slow)
    for stream in (False, True):
        world.worker.script = [answers(5, delay_s=30.0)]
        answer = await post(world, caller, stream=stream)
        assert answer.status_code == 200, answer.text
        assert "w0.4" in answer.text
    assert len(world.worker.aborts) == 2
    # One that has begun may take its time: nobody else can go on with it.
    world.worker.script = [answers(5, gap_s=0.2)]
    answer = await post(world, caller)
    assert (text_of(CHAT, answer), answer.headers["x-headworks-fallbacks"]) == (whole_text(5), "0")
    await world.settled(caller, 5)
    await world.dispatcher_is_empty()


async def test_a_target_that_fails_while_it_reads_the_prompt_has_told_nothing(
    world: World, caller: Caller
) -> None:
    await falling_back(world, first=Target(deployment=DEPLOYMENT, first_token_ms=400))
    for stream in (False, True):
        for behaviour in (fails(retryable=False, after=0), hangs(after=0)):
            world.worker.script = [behaviour]
            answer = await post(world, caller, stream=stream)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-headworks-fallbacks"] == "1"
            if stream:
                told = check_openai_chat_stream(answer.content, include_usage=False)
                assert (told.texts, told.error) == ([whole_text(5)], None)
    rows = await world.settled(caller, 8)
    assert len([row for row in rows if row.billed_micro]) == 4
    await world.dispatcher_is_empty()


async def test_a_prompt_too_long_for_one_goes_to_a_model_with_a_longer_context(
    world: World, caller: Caller, tmp_path: Path
) -> None:
    store, _ = tiny_store()
    source = write_hf(tmp_path / "short", TinyLlama(context=64))
    short = pull(str(source), store, name="tiny-short")
    async with world.postgres.transaction() as conn:
        await registry.register_version(
            conn,
            version=short.version,
            model="tiny-short",
            family=short.family,
            context_tokens=short.context_tokens,
            state=VersionState.READY,
            manifest={"name": "tiny-short"},
        )
        await registry.create_deployment(
            conn, name="tiny-short", version=short.version, region="local"
        )
    # Nobody asks it anything; a pool without a replica would soon be no place for any prompt.
    replica = {
        "replica_id": "rep-short",
        "boot_id": f"boot_{'a' * 24}",
        "deployment": "tiny-short",
        "version": short.version,
    }
    await world.register(world.worker, **replica)
    await falling_back(world, "context_window", first=Target(deployment="tiny-short"))
    prompt = "word " * 30
    for stream in (False, True):
        answer = await post(world, caller, COMPLETIONS, prompt=prompt, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-headworks-fallbacks"] == "1"
    # What fits neither is told as what it is.
    refused = await post(world, caller, COMPLETIONS, prompt="word " * CONTEXT)
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "context_length_exceeded"
    assert len(await world.settled(caller, 2)) == 2  # what only had to be counted held nothing
    await world.register(world.worker, ReplicaState.STOPPED, **replica)


async def test_never_two_models_in_one_answer(world: World, caller: Caller) -> None:
    await falling_back(world)
    world.worker.default = dies(after=2)
    try:
        answer = await post(world, caller, stream=True, max_tokens=20)
    finally:
        world.worker.default = answers(5)
    told = check_openai_chat_stream(answer.content, include_usage=False)
    assert told.error is not None
    assert not only_at_second(world)
    assert answer.headers["x-headworks-fallbacks"] == "0"
    await world.settled(caller, 1)


async def test_4xx_are_not_tried_elsewhere(world: World, caller: Caller) -> None:
    # litellm #19216: bad requests were retried at every deployment.
    await falling_back(world)
    refused = await post(world, caller, max_tokens=10_000)
    assert refused.status_code == 400
    tight = await world.add_caller(limits=Limits(requests_per_min=1))
    assert (await post(world, tight)).status_code == 200
    served(world)
    limited = await post(world, tight)
    assert limited.status_code == 429
    poor = await world.add_caller(hard_cap_micro=1)
    assert (await post(world, poor)).status_code == 429
    assert sum(served(world).values()) == 0
    assert "x-headworks-fallbacks" not in refused.headers or (
        refused.headers["x-headworks-fallbacks"] == "0"
    )


async def test_which_failures_make_it_go_on_is_for_the_table_to_say(
    world: World, caller: Caller
) -> None:
    # GoModel #605: operators ask to choose the reasons.
    await falling_back(world, "capacity", "timeout")
    world.worker.script = [fails(retryable=False)]
    refused = await post(world, caller)
    assert refused.status_code == 500
    assert not only_at_second(world)
    await falling_back(world, "context_window")
    world.worker.script = [refuses("fits_never", fits_never=True)]
    assert (await post(world, caller)).status_code == 200


@pytest.mark.parametrize("at_second", [False, True])
async def test_a_client_that_leaves_between_targets_leaves_nothing_behind(
    world: World, caller: Caller, *, at_second: bool
) -> None:
    await falling_back(world, first=Target(deployment=DEPLOYMENT, first_token_ms=200))
    world.worker.script = [hangs()]
    world.workers[1].script = [answers(5, delay_s=30.0)] if at_second else []
    async with httpx.AsyncClient(base_url=world.url) as client:
        asking = asyncio.create_task(
            client.post(CHAT, json=a_body(CHAT), headers=headers_of(caller))
        )
        await until(lambda: world.workers[int(at_second)].requests)
        await asyncio.sleep(0.0 if at_second else 0.22)  # while the first is being given up
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not len(world.gateway.relay))
    await world.dispatcher_is_empty()

    async def is_settled() -> bool:
        return (await world.balance(caller))[1] == 0

    await until_answered(is_settled)
    assert {row.state for row in await world.usage(caller)} == {"settled"}


async def test_a_key_used_once_is_used_once_whatever_target_answers(
    world: World, caller: Caller
) -> None:
    await falling_back(world)
    world.worker.script = [fails(retryable=False)]
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:

        async def ask() -> httpx.Response:
            headers = headers_of(caller) | {"idempotency-key": "one"}
            return await client.post(CHAT, json=a_body(CHAT), headers=headers)

        first = await ask()
        await world.settled(caller, 2)
        second = await ask()
    assert (first.status_code, second.status_code) == (200, 200), second.text
    assert first.json()["choices"] == second.json()["choices"]
    assert served(world) == {"rep-0": 1, f"rep-{OTHER}": 1}
