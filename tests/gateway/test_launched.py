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

import msgspec
import pytest

from core.fleet import ReplicaState
from core.launch import LaunchSpec
from core.tickets import ReplicaView
from core.worker_spec import LauncherKind, WorkerSpec
from store import launches, registry
from tests.support.gateway_requests import CHAT, post, text_of
from tests.support.gateway_world import (
    DEPLOYMENT,
    POOL,
    Caller,
    World,
    a_world,
    until,
    until_answered,
)
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

    def ready(self) -> list[ReplicaView]:
        """Those that the gateway places on."""
        return [view for view in self.world.gateway.routes.replicas(POOL) if view.ready]

    def setbacks(self) -> dict[str, float]:
        """By kind: what befell attempts, so that others were made."""
        [family] = self.world.gateway.metrics.setbacks.collect()
        return {str(sample.labels): sample.value for sample in family.samples if sample.value}

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
        await until_answered(lambda: plane.busy(0))  # by their beats, and the busiest would stay
        await plane.want(1)
        assert await plane.until_serving(1) == [first], "the oldest stays"
        rows = {r["replica_id"]: r for r in (await plane.admin("GET", "/replicas"))["replicas"]}
        assert {rows[name]["state"] for name in names if name != first} == {"stopped"}
        assert rows[first]["ready_ms"] >= rows[first]["started_ms"] > 0, "a cold start is measured"
        said = await plane.admin("GET", "/audit-log", subject=names[-1])
        assert {line["actor"] for line in said["records"]} == {"launcher"}
        assert "replica.ask" in {line["action"] for line in said["records"]}


async def test_a_control_plane_that_comes_back_adopts_what_runs(
    machine: Machine, caller: Caller
) -> None:
    async with machine.plane() as plane:
        await plane.want(2, launcher="local")
        names = await plane.until_serving(2)
        pids = {place.pid for place in plane.alive().values()}
        await until(lambda: len(machine.world.gateway.routes.replicas(POOL)) >= 2)
    assert text_of(CHAT, await post(machine.world, caller)) == whole_text(5), "without one"
    async with machine.plane() as plane:
        assert await plane.until_serving(2) == names
        assert {place.pid for place in plane.alive().values()} == pids
        await plane.want(0)
        await plane.until_serving(0)
        await until(lambda: plane.launcher.places() == ())


async def test_a_crash_between_start_and_its_record_leaves_no_orphan_unknown(
    machine: Machine,
) -> None:
    async with machine.plane() as plane:
        deployment = await plane.admin("GET", f"/deployments/{DEPLOYMENT}")
    # As left by a control plane that died just after a start, and by one whose database was
    # restored from before it: one that was asked for, and one that nobody knows.
    launcher, kind, none = machine.launcher, LauncherKind.LOCAL, WorkerSpec()
    async with machine.world.postgres.transaction() as conn:
        await registry.set_replicas_desired(conn, DEPLOYMENT, 1)
        await registry.set_launching(conn, DEPLOYMENT, launcher=kind, spec=none)
        asked = {"deployment": DEPLOYMENT, "launcher": kind, "home": launcher.home}
        await launches.ask(conn, replica_id="known-0", **asked)
    spec = LaunchSpec(
        replica_id="known-0",
        deployment=DEPLOYMENT,
        region="local",
        version=deployment["version"],
        worker=none,
    )
    launcher.start(spec)
    launcher.start(msgspec.structs.replace(spec, replica_id="orphan-0"))
    async with machine.plane() as plane:
        assert await plane.until_serving(1) == ["known-0"]
        async with plane.services.postgres.connection() as conn:
            [launch] = await launches.all_launches(conn)
        assert (launch.replica_id, launch.failures) == ("known-0", 0), "adopted as it runs"


@pytest.mark.parametrize("deploys", [False, True])
async def test_a_long_stream_survives_drain_scale_down_and_deploy_of_its_worker(
    machine: Machine, caller: Caller, *, deploys: bool
) -> None:
    # kthena #1589, kserve P5485, PostHog P73863, GAIE #549: live streams were cut after 30 s.
    script = {"SCRIPT_TOKENS": "50", "SCRIPT_GAP_S": "0.06"}
    async with machine.plane(script=script) as plane:
        await plane.want(3, launcher="local")
        names = await plane.until_serving(3)
        await until(lambda: len(machine.ready()) == 3)
        streams = [asyncio.create_task(post(machine.world, caller, stream=True)) for _ in range(9)]
        await until_answered(lambda: plane.busy(9))
        before = machine.setbacks()
        pids = {name: place.pid for name, place in plane.alive().items()}
        if deploys:
            await plane.admin("PATCH", f"/deployments/{DEPLOYMENT}", {"desired_state": "draining"})
        else:
            await plane.admin("POST", f"/replicas/{names[0]}/drain", {"within_ms": 60_000})
            os.kill(pids[names[1]] or 0, signal.SIGTERM)  # a machine that is taken back
            await plane.want(0)
        await until(lambda: not {view.replica for view in machine.ready()} & set(names))
        for stream in await asyncio.gather(*streams):
            told = check_openai_chat_stream(stream.content, include_usage=False)
            assert (told.texts, told.done) == ([whole_text(50)], True)
        await plane.until_serving(0)
        await machine.world.settled(caller, 9)
        assert machine.setbacks() == before, "nothing had to be resumed"
        await machine.world.dispatcher_is_empty()


async def test_a_worker_that_comes_back_under_its_id_while_a_stream_ends_is_never_below_nothing(
    machine: Machine, caller: Caller
) -> None:
    # AIBrix #2421: the end of a stream was counted for the new life, which then looked idlest.
    script = {"SCRIPT_TOKENS": "40", "SCRIPT_GAP_S": "0.05"}
    async with machine.plane(script=script) as plane:
        await plane.want(2, launcher="local")
        await plane.until_serving(2)
        await until(lambda: len(machine.ready()) == 2)
        boots = {row["replica_id"]: row["boot_id"] for row in await plane.replicas()}
        streams = [asyncio.create_task(post(machine.world, caller, stream=True)) for _ in range(4)]
        await until_answered(lambda: plane.busy(4))
        name, place = min(plane.alive().items())
        os.kill(place.pid or 0, signal.SIGKILL)
        early = 0
        for stream in await asyncio.gather(*streams):
            told = check_openai_chat_stream(stream.content, include_usage=False)
            # Resumed, or ended by an error after another setback; never a word twice, and never
            # an end that looks like one.
            text = "".join(told.texts)
            assert whole_text(40).startswith(text)
            assert told.done == (text == whole_text(40))
            early += not told.done
        assert sum(machine.setbacks().values()) >= 2 * early, machine.setbacks()
        await until_answered(lambda: plane.is_another(name, place.pid), WAIT_S)
        await until_answered(lambda: plane.is_reborn(boots), WAIT_S)
        assert set(await plane.until_serving(2)) == set(boots)
        await machine.world.dispatcher_is_empty()


async def test_a_death_while_nobody_watches_is_found_by_looking_again(
    machine: Machine, caller: Caller
) -> None:
    # production-stack #1091: a delete event was lost while the watch was away, for 22 hours.
    async with machine.plane() as plane:
        await plane.want(1, launcher="local")
        [name] = await plane.until_serving(1)
        place = plane.alive()[name]
        boots = {row["replica_id"]: row["boot_id"] for row in await plane.replicas()}
    os.kill(place.pid or 0, signal.SIGKILL)
    async with machine.plane() as plane:
        await until_answered(lambda: plane.is_reborn(boots), WAIT_S)
        assert await plane.until_serving(1) == [name]
        await until(lambda: len(machine.ready()) == 1)
        assert text_of(CHAT, await post(machine.world, caller)) == whole_text(5)


async def test_one_that_has_work_and_makes_no_step_is_replaced(machine: Machine) -> None:
    async with machine.plane(script={"SCRIPT_MODE": "stuck"}, replica_stalled_ms=800) as plane:
        await plane.want(1, launcher="local")
        [name] = await plane.until_serving(1)
        pid = plane.alive()[name].pid
        await until_answered(lambda: plane.is_another(name, pid), WAIT_S)
        said = await plane.admin("GET", "/audit-log", subject=name)
        assert "replica.fail" in {line["action"] for line in said["records"]}


async def test_what_ends_at_once_is_not_started_without_end(machine: Machine) -> None:
    async with machine.plane(script={"SCRIPT_MODE": "dies"}) as plane:
        await plane.want(1, launcher="local")

        async def failed_twice() -> bool:
            async with plane.services.postgres.connection() as conn:
                found = await launches.all_launches(conn)
            return bool(found) and found[0].failures > 1

        await until_answered(failed_twice, WAIT_S)
        async with plane.services.postgres.connection() as conn:
            [launch] = await launches.all_launches(conn)
        assert launch.last_failure == "ended with 7"
        metric = plane.services.metrics.replicas_short.labels(DEPLOYMENT)
        assert metric._value.get() == 1
