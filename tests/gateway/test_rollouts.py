"""Rollouts under load, from end to end: two gateways, a control plane that leads, and clients.

No request fails, no conversation changes its version but by a rollback, and what is worse goes
back by itself.
"""

import asyncio
import functools
import itertools
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from artifacts.manifest import Manifest
from artifacts.pull import pull
from artifacts.store import ModelStore
from core.pricing import ListedPrice
from core.route_table import Fallback, RouteTable, Target
from store import registry
from store.prices import seed_prices
from tests.support.control_plane import ControlPlane, running, the_settings
from tests.support.gateway_requests import CHAT, headers_of
from tests.support.gateway_world import (
    CONTEXT,
    DEPLOYMENT,
    MODEL,
    PRICE,
    Caller,
    World,
    a_world,
    until,
    until_answered,
)
from tests.support.scripted_worker import Behaviour, Run, ScriptedWorker, fails, says
from tests.support.tiny_llama import TinyLlama, write_hf

pytestmark = [pytest.mark.anyio, pytest.mark.services, pytest.mark.slow]

OLD, NEW = "old", "new"
_log = logging.getLogger(__name__)

CLIENTS = 12
ASKED = {"role": "user", "content": "Tell me."}
SOON_S = 150.0
RULES = {"settle_ms": 0, "tick_ms_max": 1000, "false_alarm": 0.5, "restore_ms": 0}
ERRORS = {"metric": "errors", "plus": 0.6}
GATES = [
    ERRORS,
    {"metric": "first_token_p95", "ratio": 1.0, "plus": 2500.0, "role": "guards"},
    {"metric": "output_tokens", "plus": 0.3, "role": "guards"},
]


@functools.cache
def two_versions() -> tuple[ModelStore, Manifest, Manifest]:
    """A store with two tiny models in it, of one name and different weights."""
    root = Path(tempfile.mkdtemp(prefix="headworks-two-"))
    store = ModelStore(root / "models")
    made = [
        pull(str(write_hf(root / f"source{seed}", TinyLlama(context=CONTEXT, seed=seed))), store,
             name=MODEL)
        for seed in (0, 1)
    ]  # fmt: skip
    return store, made[0], made[1]


class Talk(msgspec.Struct):
    """One conversation: what has answered it, in order."""

    model: str
    name: str
    answers: list[str] = []

    def turns(self) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
        return ((ASKED, {"role": "assistant", "content": answer}) for answer in self.answers)


class Load:
    """Clients that begin conversations under these names, and go on with some of them."""

    def __init__(self, world: World, caller: Caller, *models: str, clients: int = CLIENTS) -> None:
        self._world = world
        self._caller = caller
        self._models = itertools.cycle(models)
        self._count = itertools.count()
        self._clients = clients
        self._going = True
        self.talks: dict[str, list[Talk]] = defaultdict(list)
        self.failures: list[str] = []

    def served(self, model: str) -> set[str]:
        return {answer for talk in self.talks[model] for answer in talk.answers}

    def changed(self, model: str) -> list[Talk]:
        return [talk for talk in self.talks[model] if len(set(talk.answers)) > 1]

    async def _client(self, at: int) -> None:
        url = self._world.url_of(at % len(self._world.servers))
        kept: list[Talk] = []
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while self._going:
                talk = Talk(next(self._models), f"c{next(self._count)}")
                self.talks[talk.model].append(talk)
                kept = [*kept[-4:], talk]
                await self._turn(client, talk)
                if len(self.talks[talk.model]) % 3 == 0:
                    await self._turn(client, kept[0])

    async def _turn(self, client: httpx.AsyncClient, talk: Talk) -> None:
        headers = headers_of(self._caller) | {"x-headworks-conversation": talk.name}
        body = {
            "model": talk.model,
            "max_tokens": 90,
            "messages": [*itertools.chain.from_iterable(talk.turns()), ASKED],
        }
        answer = await client.post(CHAT, json=body, headers=headers)
        if answer.status_code != 200:
            self.failures.append(answer.text)
            return
        text = answer.json()["choices"][0]["message"]["content"]
        talk.answers.append(text.split()[0])

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        async with asyncio.TaskGroup() as group:
            for at in range(self._clients):
                group.create_task(self._client(at))
            try:
                yield self
            finally:
                self._going = False


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    store, _, _ = two_versions()
    async with a_world(postgres_url, valkey_url, tmp_path, models_dir=str(store.root)) as made:
        await made.start_gateway()
        made.worker.default = says(*[f"{OLD} "] * 5)
        yield made


@pytest.fixture
async def plane(world: World) -> AsyncIterator[ControlPlane]:
    urls = world.settings.database_url, world.settings.redis_url
    # Scripted workers send no beats.
    settings = the_settings(*urls, rollout_every_ms=100, replica_lost_ms=600_000)
    async with running(settings) as plane:
        await until(lambda: plane.services.leadership.held, SOON_S)
        yield plane


async def add_canary(world: World, name: str, behaviour: Behaviour) -> ScriptedWorker:
    """A deployment of the other version, with one worker."""
    _, _, other = two_versions()
    async with world.postgres.transaction() as conn:
        await registry.register_version(
            conn,
            version=other.version,
            model=MODEL,
            family=other.family,
            context_tokens=other.context_tokens,
            state=registry.VersionState.READY,
            manifest={"name": MODEL},
        )
        await registry.create_deployment(conn, name=name, version=other.version, region="local")
    worker = ScriptedWorker(world.worker.secret, f"rep-{name}")
    worker.default = behaviour
    world.workers.append(worker)
    await worker.start()
    await world.register(worker, deployment=name, version=other.version)
    return worker


async def add_name(world: World, model: str) -> None:
    """A public name of the stable, which is also where requests go that a target failed."""
    back = Fallback(on=("error",), target=Target(deployment=DEPLOYMENT))
    table = RouteTable(model=model, targets=(Target(deployment=DEPLOYMENT),), fallbacks=(back,))
    async with world.postgres.transaction() as conn:
        await seed_prices(
            conn,
            [
                ListedPrice(
                    model=model,
                    effective_ms=0,
                    price=msgspec.structs.replace(PRICE, id=f"{model}-1"),
                )
            ],
        )
        version = await registry.put_table(conn, table)
    await until(
        lambda: all(s._gateway.routes.view.version >= version for s, _ in world.servers), SOON_S
    )


async def start_rollout(
    plane: ControlPlane,
    model: str,
    canary: str,
    *percents: int,
    keep_warm_ms: int,
    least: int,
    gates: list[dict[str, Any]],
) -> str:
    name = f"to-{canary}"
    steps = [
        {"percent": percent, "least_ms": 0, "most_ms": 600_000, "least_requests": least}
        for percent in percents
    ]
    body = {
        "name": name,
        "model": model,
        "stable": DEPLOYMENT,
        "canary": canary,
        "steps": steps,
        "gates": gates,
        "rules": {**RULES, "keep_warm_ms": keep_warm_ms},
    }
    await plane.made("/rollouts", body)
    return name


async def until_state(plane: ControlPlane, name: str, *states: str) -> Any:
    seen: Any = None

    async def there() -> bool:
        nonlocal seen
        answer = await plane.admin("GET", f"/rollouts/{name}")
        if answer.status_code == 503:  # all of this runs in one process, on a busy machine
            return False
        seen = answer.json()
        assert seen["state"] != "paused", seen
        return seen["state"] in states

    try:
        await until_answered(there, SOON_S)
    except TimeoutError as error:
        raise AssertionError(f"{name}: {seen['state']} because of {seen['reasons']}") from error
    return seen


async def test_a_good_version_is_promoted_and_taken_back_by_one_write(
    world: World, plane: ControlPlane
) -> None:
    canary = await add_canary(world, "good", says(*[f"{NEW} "] * 5))
    caller = await world.add_caller()
    async with Load(world, caller, MODEL).running() as load:
        await until(lambda: len(load.talks[MODEL]) > 2 * CLIENTS, SOON_S)
        assert load.served(MODEL) == {OLD}
        name = await start_rollout(
            plane, MODEL, "good", 5, 50, 100, keep_warm_ms=600_000, least=15, gates=GATES
        )
        promoting = await until_state(plane, name, "promoting")
        assert load.served(MODEL) == {OLD, NEW}
        # Those that had begun with the old version are still served by it.
        assert load.changed(MODEL) == []

        began = time.monotonic()
        answer = await plane.admin("POST", f"/rollouts/{name}/rollback", {"why": "a drill"})
        assert answer.status_code == 200, answer.text
        async with plane.services.postgres.connection() as conn:
            table = await registry.route(conn, MODEL)
        assert table is not None
        await until(
            lambda: all(s._gateway.routes.view.version >= table.version for s, _ in world.servers),
            SOON_S,
        )
        _log.info("a rollback was everywhere after %.3f s", time.monotonic() - began)
        before = len(canary.requests)
        await until(lambda: len(load.changed(MODEL)) > CLIENTS, SOON_S)
        assert len(canary.requests) - before <= CLIENTS, "what was under way, and no more"
        await until_state(plane, name, "rolled_back")
    assert load.failures == []
    for talk in load.changed(MODEL):
        assert talk.answers == sorted(talk.answers), "from new to old, and never back"
    events = [event["event"] for event in promoting["events"]][::-1]
    assert events == ["created", "started", "gates_open", *["step_passed"] * 2, "promoted"]


async def slow(run: Run) -> None:
    """After two seconds."""
    answer = says(*[f"{NEW} "] * 5)
    assert callable(answer)
    if await run.pause(2.0):
        await run.finish("aborted")
    else:
        await answer(run)


SLOWER, FAILING, LONGER = "slower", "failing", "longer"
# How it behaves, the metric that tells, and its gate.
WORSE: dict[str, tuple[Behaviour, str, dict[str, Any] | None]] = {
    SLOWER: (
        slow,
        "first_token_p95",
        # Decides: as a guard it would let a step pass that it says nothing of yet.
        {"metric": "first_token_p95", "plus": 200.0},
    ),
    FAILING: (fails(retryable=False), "errors", None),
    LONGER: (
        says(*[f"{NEW} "] * 40),
        "output_tokens",
        {"metric": "output_tokens", "plus": 0.3, "role": "guards"},
    ),
}


async def test_worse_versions_go_back_by_themselves(world: World, plane: ControlPlane) -> None:
    for name, (behaviour, _, gate) in WORSE.items():
        await add_canary(world, name, behaviour)
        await add_name(world, name)
        least = 75 if name == SLOWER else 30  # what bounds of a p95 take
        gates = [ERRORS, gate] if gate else [ERRORS]
        await start_rollout(plane, name, name, 50, 100, keep_warm_ms=0, least=least, gates=gates)
    caller = await world.add_caller()
    async with asyncio.TaskGroup() as group:
        for name in WORSE:
            # The slow one waits, and costs nothing meanwhile.
            load = Load(world, caller, name, clients=36 if name == SLOWER else 4)
            group.create_task(goes_back(plane, load, name))


async def goes_back(plane: ControlPlane, load: Load, name: str) -> None:
    metric = WORSE[name][1]
    async with load.running():
        seen = await until_state(plane, f"to-{name}", "rolled_back")
        marked = len(load.talks[name])
        await until(lambda: len(load.talks[name]) > marked + 40, SOON_S)
    failed = next(event for event in seen["events"] if event["event"] == "failed")
    assert [v["metric"] for v in failed["verdicts"] if v["outcome"] == "fail"] == [metric]
    assert load.failures == []
    for talk in load.changed(name):
        assert talk.answers == sorted(talk.answers), "from new to old, and never back"
    late = load.talks[name][marked + 36 :]
    assert {answer for talk in late for answer in talk.answers} <= {OLD}
