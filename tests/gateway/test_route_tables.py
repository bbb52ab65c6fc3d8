"""Two deployments behind one name: shares, conversations, conditions, aliases, allow-lists."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from core.pricing import ListedPrice
from core.route_table import Condition, RouteTable, Target
from gateway.conversation import Conversation
from gateway.stickiness import conversation_key
from store import registry, tenants
from store.prices import seed_prices
from store.registry import ModelAccess
from tests.support.gateway_requests import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PATHS,
    a_body,
    error_of,
    headers_of,
    post,
)
from tests.support.gateway_world import (
    DEPLOYMENT,
    MODEL,
    PRICE,
    Caller,
    World,
    a_world,
    until,
    until_answered,
)
from tests.support.scripted_worker import ScriptedWorker

pytestmark = [pytest.mark.anyio, pytest.mark.services]

OTHER = "tiny-b"
HEADER = "x-headworks-conversation"
EVERY_PATH = (
    *PATHS,
    f"{MESSAGES}/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
)


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path) as made:
        await add_deployment(made, OTHER)
        yield made


async def add_deployment(world: World, name: str) -> ScriptedWorker:
    """Of the same version, with one worker of its own, that has answered."""
    async with world.postgres.transaction() as conn:
        await registry.create_deployment(
            conn, name=name, version=world.manifest.version, region="local"
        )
    worker = ScriptedWorker(world.worker.secret, f"rep-{name}")
    world.workers.append(worker)
    await worker.start()
    await world.register(worker, deployment=name)
    await put(world, MODEL, targets=(Target(deployment=name),))
    caller = await world.add_caller()

    async def answers() -> bool:
        return (await post(world, caller, max_tokens=1)).status_code == 200

    # A pool that was empty in the test before is so until the dispatcher hears otherwise.
    await until_answered(answers)
    await put(world, MODEL, targets=(Target(deployment=DEPLOYMENT),))
    worker.requests.clear()
    return worker


async def put(world: World, name: str, **fields: Any) -> None:
    """A table, and the gateway's next view."""
    table = RouteTable(model=name, **fields)
    async with world.postgres.transaction() as conn:
        version = await registry.put_table(conn, table)
    await until(lambda: world.gateway.routes.view.version >= version)


def to(*weights: int, **when: Any) -> tuple[Target, ...]:
    condition = Condition(**when)
    return tuple(
        Target(deployment=name, weight=weight, when=condition)
        for name, weight in zip((DEPLOYMENT, OTHER), weights, strict=False)
    )


async def ask(
    world: World, caller: Caller, path: str = CHAT, *, name: str = MODEL, **headers: str
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        sent = headers_of(caller, path) | {k.replace("_", "-"): v for k, v in headers.items()}
        body = a_body(path, model=name, max_tokens=3)
        answer = await client.post(path, json=body, headers=sent)
    assert answer.status_code == 200, answer.text
    return answer


def served(world: World) -> Counter[str]:
    """Requests by worker, since it was last asked."""
    counts = Counter({worker.replica_id: len(worker.requests) for worker in world.workers})
    for worker in world.workers:
        worker.requests.clear()
    return counts


async def conversations(
    world: World, caller: Caller, *, first: int, second: int, part: tuple[int, int]
) -> list[str]:
    """Names of so many that the first target's part of all draws gets, and of so many others."""
    async with world.postgres.connection() as conn:
        tenant = await tenants.tenant_by_id(conn, caller.tenant_id)
    assert tenant is not None
    talk = Conversation(dialect="openai", kind="chat", model=MODEL)
    names: dict[bool, list[str]] = {True: [], False: []}
    for at in range(1_000):
        key = conversation_key(talk, salt=tenant.salt, route=MODEL, header=f"c{at}")
        names[key.draw * part[1] < part[0] * 2**64].append(f"c{at}")
    return names[True][:first] + names[False][:second]


async def test_shares_are_honoured_and_conversations_stay(world: World, caller: Caller) -> None:
    await put(world, MODEL, targets=to(3, 1))
    names = await conversations(world, caller, first=9, second=3, part=(3, 4))

    async def turn() -> Counter[str]:
        await asyncio.gather(*(ask(world, caller, **{HEADER: name}) for name in names))
        return served(world)

    at_first = await turn()
    assert at_first == {"rep-0": 9, f"rep-{OTHER}": 3}
    # Whatever happens to the shares, those who have begun stay, even with one that gets no more.
    await put(world, MODEL, targets=to(0, 1))
    assert await turn() == at_first
    # The last word is the table's: who is not in it serves nobody.
    await put(world, MODEL, targets=(Target(deployment=OTHER),))
    assert await turn() == {"rep-0": 0, f"rep-{OTHER}": len(names)}


async def test_what_has_no_name_is_known_by_how_it_begins(world: World, caller: Caller) -> None:
    await put(world, MODEL, targets=to(1, 1))
    for _ in range(4):
        await ask(world, caller)
    assert sorted(served(world).values()) == [0, 4]


async def test_every_gateway_chooses_alike_and_so_without_valkey(
    world: World, caller: Caller
) -> None:
    await put(world, MODEL, targets=to(1, 1))
    await world.start_gateway()
    second = world.servers[1][0]._gateway
    await until(lambda: second.routes.view.version >= world.gateway.routes.view.version)
    chosen: dict[str, set[str]] = {}
    names = await conversations(world, caller, first=2, second=2, part=(1, 2))

    async def ask_all() -> None:
        for name in names:
            for gateway in (0, 1):
                headers = headers_of(caller) | {HEADER: name}
                async with httpx.AsyncClient(base_url=world.url_of(gateway), timeout=30) as client:
                    body = a_body(CHAT, max_tokens=1)
                    assert (await client.post(CHAT, json=body, headers=headers)).status_code == 200
                chosen.setdefault(name, set()).update(+served(world))

    await ask_all()
    for gateway in (world.gateway, second):
        await gateway._bindings.close()
    await ask_all()
    assert all(len(workers) == 1 for workers in chosen.values())
    assert len(set.union(*chosen.values())) == 2


async def test_conditions_choose_among_targets(world: World, caller: Caller) -> None:
    short = Target(deployment=DEPLOYMENT, when=Condition(prompt_tokens_max=40))
    tagged = Target(deployment=OTHER, when=Condition(prompt_tokens_max=40, tags={"to": "b"}))
    long = Target(deployment=OTHER, when=Condition(prompt_tokens_min=41))
    await put(world, MODEL, targets=(short, long))
    await ask(world, caller)
    assert served(world) == {"rep-0": 1, f"rep-{OTHER}": 0}
    answer = await post(world, caller, COMPLETIONS, prompt="long " * 60, max_tokens=3)
    assert answer.status_code == 200
    assert served(world) == {"rep-0": 0, f"rep-{OTHER}": 1}
    await put(
        world,
        MODEL,
        targets=(tagged, Target(deployment=DEPLOYMENT, when=Condition(tags={"to": "a"}))),
    )
    for tags, worker in (("to=b", f"rep-{OTHER}"), ("x=y, to=a", "rep-0")):
        await ask(world, caller, x_headworks_tags=tags)
        assert served(world)[worker] == 1
    for path in PATHS:
        nobody = await post(world, caller, path)
        assert nobody.status_code == 404
    async with httpx.AsyncClient(base_url=world.url) as client:
        headers = headers_of(caller) | {"x-headworks-tags": "?"}
        bad = await client.post(CHAT, json=a_body(CHAT), headers=headers)
    assert bad.status_code == 400
    assert error_of(bad)["param"] == "x-headworks-tags"


async def test_an_alias_is_billed_the_same_streamed_or_not(world: World, caller: Caller) -> None:
    # litellm #37923: an alias in a chunk had no price, so that streams cost nothing.
    dear = msgspec.structs.replace(PRICE, id="dear", input_micro=9_000_000)
    async with world.postgres.transaction() as conn:
        await seed_prices(conn, [ListedPrice(model="dear", effective_ms=0, price=dear)])
    await put(world, "fast", alias=MODEL)
    await put(world, "dear", alias="fast")
    for path in PATHS:
        for name in (MODEL, "fast", "dear"):
            for stream in (False, True):
                answer = await post(world, caller, path, model=name, stream=stream, max_tokens=3)
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-headworks-model"] == MODEL
                assert answer.headers["x-headworks-fallbacks"] == "0"
                assert f'"model":"{name}"' in answer.text
    rows = await world.settled(caller, 18)
    by_name: dict[str, set[tuple[int, str]]] = {}
    for row in rows:
        paid = (row.billed_micro, row.price_id)
        by_name.setdefault(f"{row.endpoint} {row.model}", set()).add(paid)
    # Under its own price an alias is a product of its own; without one it is what it leads to.
    assert {key.split()[1] for key in by_name} == {MODEL, "dear"}
    assert all(len(paid) == 1 for paid in by_name.values())
    assert all(micro > 0 for paid in by_name.values() for micro, _ in paid)


async def test_a_name_without_a_price_is_refused_whatever_it_leads_to(
    world: World, caller: Caller
) -> None:
    # litellm #35524: a model without a price passed every budget.
    await put(world, "bare", targets=to(1, 1))
    await put(world, "bare-alias", alias="bare")
    for name in ("bare", "bare-alias"):
        for path in PATHS:
            refused = await post(world, caller, path, model=name)
            assert refused.status_code == 403
            assert name in error_of(refused)["message"]
    assert await world.usage(caller) == []


async def test_a_tenants_own_table_is_for_nobody_else(world: World, caller: Caller) -> None:
    other = await world.add_caller()
    await put(world, MODEL, tenant=caller.tenant_id, targets=(Target(deployment=OTHER),))
    await ask(world, caller)
    await ask(world, other)
    assert served(world) == {"rep-0": 1, f"rep-{OTHER}": 1}


async def allow(world: World, caller: Caller, *models: str, key: bool) -> None:
    async with world.postgres.transaction() as conn:
        access = ModelAccess(key=caller.key_id if key else "", models=models)
        await registry.put_access(conn, caller.tenant_id, access)
        if key:
            await tenants.touch_key(conn, caller.key_id)
        else:
            await tenants.touch_tenant(conn, caller.tenant_id)


@pytest.mark.parametrize("key", [True, False])
async def test_what_a_key_may_not_ask_for_does_not_exist_on_any_path(
    world: World, caller: Caller, *, key: bool
) -> None:
    # litellm #26399, #41295: paths that looked no model up let every key through.
    await put(world, "fast", alias=MODEL)
    await allow(world, caller, "fast", key=key)
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:

        async def is_denied() -> bool:
            return (await post(world, caller, max_tokens=1)).status_code == 404

        await until_answered(is_denied)  # with the next poll of changed keys, at the latest
        for path in EVERY_PATH:
            told = []
            for name in (MODEL, "no-such", "fast"):
                body = _request(path, name)
                told.append(await client.post(path, json=body, headers=headers_of(caller, path)))
            denied, absent, allowed = told
            assert (path, denied.status_code) == (path, 404), denied.text
            message = error_of(absent)["message"].replace("no-such", MODEL)
            assert error_of(denied)["message"] == message
            assert (path, allowed.status_code) == (path, 200), allowed.text
        headers = headers_of(caller)
        listed = (await client.get("/v1/models", headers=headers)).json()["data"]
        assert [model["id"] for model in listed] == ["fast"]
        for name, code in ((MODEL, 404), ("fast", 200)):
            one = await client.get(f"/v1/models/{name}", headers=headers)
            assert one.status_code == code


async def test_an_answer_that_is_kept_is_told_again_only_to_who_may_ask_for_it(
    world: World, caller: Caller
) -> None:
    async def again() -> httpx.Response:
        headers = headers_of(caller) | {"idempotency-key": "once"}
        async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
            return await client.post(CHAT, json=a_body(CHAT, max_tokens=2), headers=headers)

    assert (await again()).status_code == 200
    assert (await again()).status_code == 200
    await allow(world, caller, "other", key=True)

    async def is_denied() -> bool:
        return (await again()).status_code == 404

    await until_answered(is_denied)
    assert served(world) == {"rep-0": 1, f"rep-{OTHER}": 0}


def _request(path: str, name: str) -> dict[str, Any]:
    """A body of any of our paths."""
    if path.startswith("/v1/responses"):
        return {"model": name, "input": "Tell me a story."}
    counts = path.endswith("/count_tokens")
    shape = MESSAGES if counts else path
    return a_body(shape, model=name, max_tokens=None if counts else 1)
