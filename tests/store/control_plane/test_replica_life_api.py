"""How many replicas a deployment has, with what, and the drain of one: as operators ask for it."""

import asyncio
import secrets

import pytest

from core.fleet import ReplicaState
from core.worker_spec import LauncherKind
from store import fleet, launches, registry
from store.routing_view import routing_view
from tests.support.control_plane import assert_refused
from tests.support.registry import a_beat, a_deployment, a_register

pytestmark = [pytest.mark.services, pytest.mark.anyio]

DAY_MS = 86_400_000


@pytest.fixture
async def name(plane):
    """A deployment of this test's own."""
    name = f"dep-{secrets.token_hex(4)}"
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn, name)
    return name


@pytest.fixture
async def replica(plane, name):
    """A ready one of it."""
    replica = f"rep-{secrets.token_hex(4)}"
    message = a_register(replica_id=replica, boot_id=f"boot-{replica}", deployment=name, age_ms=700)
    assert (await plane.says("/register", message)).status_code == 200
    return replica


async def beat(plane, replica, seq=1, **changes):
    message = a_beat(replica_id=replica, boot_id=f"boot-{replica}", seq=seq, **changes)
    answer = await plane.says("/beat", message)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def row_of(plane, replica):
    return (await plane.admin("GET", f"/replicas/{replica}")).json()


async def test_how_many_and_with_what_is_written_read_and_audited(plane, name):
    path = f"/deployments/{name}"
    before = (await plane.admin("GET", path)).json()
    assert (before["replicas_desired"], before["launcher"], before["spec"]) == (
        None,
        "external",
        {},
    )
    body = {"replicas_desired": 3, "launcher": "local", "spec": {"threads": 2, "kv_memory_mb": 64}}
    made = (await plane.admin("PATCH", path, body)).json()
    assert {each: made[each] for each in body} == body
    only = (await plane.admin("PATCH", path, {"replicas_desired": None})).json()
    assert (only["replicas_desired"], only["launcher"]) == (None, "local"), "the rest stays"
    lines = (await plane.admin("GET", "/audit-log", subject=name)).json()["records"]
    assert [line["action"] for line in lines] == ["deployment.change"] * 2
    assert lines[1]["detail"] == body


async def test_a_count_that_a_policy_says_is_refused_by_its_name(plane, name):
    path, policy = f"/deployments/{name}", f"/scaling-policies/deployment:{name}"
    assert (await plane.admin("PUT", policy, {"max_replicas": 4})).status_code == 200
    answer = await plane.admin("PATCH", path, {"replicas_desired": 9})
    assert_refused(answer, 409, "conflict", "replicas_desired")
    assert f"deployment:{name}" in answer.json()["error"]["message"]
    assert (await plane.admin("PATCH", path, {"spec": {"threads": 2}})).status_code == 200
    assert (await plane.admin("DELETE", policy)).status_code == 200
    assert (await plane.admin("PATCH", path, {"replicas_desired": 9})).status_code == 200


async def test_two_who_change_different_things_at_once_lose_neither(plane, name):
    path = f"/deployments/{name}"
    changes = [{"launcher": "local"}, {"spec": {"threads": 3}}, {"desired_state": "draining"}]
    for _ in range(5):
        reset = {"launcher": "external", "spec": {}, "desired_state": "running"}
        assert (await plane.admin("PATCH", path, reset)).status_code == 200
        answers = await asyncio.gather(*(plane.admin("PATCH", path, each) for each in changes))
        assert [answer.status_code for answer in answers] == [200] * 3
        now = (await plane.admin("GET", path)).json()
        assert (now["launcher"], now["spec"], now["desired_state"]) == (
            "local",
            {"threads": 3},
            "draining",
        )


async def test_a_deployment_may_be_made_with_all_of_it(plane, name):
    version = (await plane.admin("GET", f"/deployments/{name}")).json()["version"]
    body = {"name": f"{name}-b", "version": version, "region": "local"}
    more = {"replicas_desired": 1, "launcher": "local", "spec": {"batch_invariant": True}}
    made = await plane.made("/deployments", body | more)
    assert {each: made[each] for each in more} == more


async def test_what_cannot_be_meant_is_refused_by_its_field(plane, name):
    for body, param in [
        ({"replicas_desired": -1}, "replicas_desired"),
        ({"replicas_desired": 1001}, "replicas_desired"),
        ({"launcher": "docker"}, "launcher"),
        ({"spec": {"dtype": "float16"}}, "spec.dtype"),
        ({"spec": {"threads": 0}}, "spec.threads"),
        ({"replicas": 1}, "replicas"),
        ({}, None),
    ]:
        answer = await plane.admin("PATCH", f"/deployments/{name}", body)
        assert_refused(answer, 422, "unprocessable", param)


async def test_a_launcher_does_not_change_while_the_present_one_has_started_some(plane, name):
    async with plane.services.postgres.transaction() as conn:
        asked = {"deployment": name, "launcher": LauncherKind.EXTERNAL, "home": "far"}
        assert await launches.ask(conn, replica_id=f"{name}-0", **asked)
        assert not await launches.ask(conn, replica_id=f"{name}-0", **asked), "it is taken"
    path, body = f"/deployments/{name}", {"launcher": "local"}
    assert_refused(await plane.admin("PATCH", path, body), 409, "conflict", "launcher")
    async with plane.services.postgres.transaction() as conn:
        await launches.forget(conn, f"{name}-0")
    assert (await plane.admin("PATCH", path, body)).status_code == 200


async def test_a_drained_replica_is_passed_over_at_once_and_hears_how_long_it_has(
    plane, name, replica
):
    async with plane.services.postgres.transaction() as conn:
        await registry.put_route(conn, model=name, deployment=name, max_output_tokens=0)
    assert await ready(plane, name) == [replica]
    asked = {"within_ms": 60_000, "reason": "its machine is patched"}
    answer = await plane.admin("POST", f"/replicas/{replica}/drain", asked)
    assert answer.json()["drain_reason"] == asked["reason"]
    assert await ready(plane, name) == [], "before its worker has heard of it"
    told = await beat(plane, replica)
    assert told["drain"]
    assert 0 < told["drain_ms"] <= 60_000
    later = {"within_ms": DAY_MS, "reason": "another"}
    row = (await plane.admin("POST", f"/replicas/{replica}/drain", later)).json()
    assert (row["drain_deadline_ms"], row["drain_reason"]) == (
        answer.json()["drain_deadline_ms"],
        asked["reason"],
    )
    await plane.admin("POST", f"/replicas/{replica}/drain", {"within_ms": 0})
    assert (await beat(plane, replica, seq=2))["drain_ms"] == 0, "the earlier deadline holds"
    lines = (await plane.admin("GET", "/audit-log", subject=replica)).json()["records"]
    assert [line["detail"] for line in lines][-1] == asked


async def ready(plane, name):
    async with plane.services.postgres.connection() as conn:
        view = await routing_view(conn, "local")
    return [r.replica for r in view.replicas.get(f"{name}@local", ()) if r.ready]


async def test_a_drain_is_taken_back_in_one_write_until_its_worker_has_begun(plane, replica):
    path = f"/replicas/{replica}/drain"
    assert_refused(await plane.admin("DELETE", path), 409, "conflict")
    default = (await plane.admin("POST", path, {})).json()
    assert default["drain_reason"] == "an operator drains it"
    assert (await plane.admin("DELETE", path)).json()["drain_deadline_ms"] is None
    assert not (await beat(plane, replica))["drain"]
    await plane.admin("POST", path, {})
    await beat(plane, replica, seq=2, state=ReplicaState.DRAINING)
    assert_refused(await plane.admin("DELETE", path), 409, "conflict")


async def test_what_is_not_there_or_has_ended_cannot_be_drained(plane, replica):
    for method in ("POST", "DELETE"):
        answer = await plane.admin(method, "/replicas/none/drain", {} if method == "POST" else None)
        assert_refused(answer, 404, "not_found")
    assert_refused(await plane.admin("GET", "/replicas/none"), 404, "not_found")
    await beat(plane, replica, state=ReplicaState.STOPPED)
    assert_refused(await plane.admin("POST", f"/replicas/{replica}/drain", {}), 409, "conflict")
    for body, param in [({"within_ms": -1}, "within_ms"), ({"reason": ""}, "reason")]:
        answer = await plane.admin("POST", f"/replicas/{replica}/drain", body)
        assert_refused(answer, 422, "unprocessable", param)


async def test_a_new_life_begins_without_the_drain_of_the_last(plane, name, replica):
    await plane.admin("POST", f"/replicas/{replica}/drain", {})
    message = a_register(replica_id=replica, boot_id=f"new-{replica}", deployment=name)
    await plane.says("/register", message)
    row = await row_of(plane, replica)
    assert (row["drain_reason"], row["drain_deadline_ms"]) == ("", None)


async def test_a_machine_that_is_taken_back_tells_its_own_deadline(plane, replica):
    told = await beat(plane, replica, drain_reason="taken back", drain_ms=30_000)
    assert told["drain"]
    row = await row_of(plane, replica)
    assert row["drain_reason"] == "taken back"
    await plane.admin("POST", f"/replicas/{replica}/drain", {"within_ms": DAY_MS})
    assert (await row_of(plane, replica))["drain_deadline_ms"] <= row["drain_deadline_ms"]


async def test_a_cold_start_is_measured_from_the_boot_to_its_first_readiness(plane, name):
    replica = f"rep-{secrets.token_hex(4)}"
    boot = f"boot-{replica}"
    fields = {"replica_id": replica, "boot_id": boot, "deployment": name}
    loading = a_register(**fields, state=ReplicaState.LOADING, age_ms=5000)
    await plane.says("/register", loading)
    row = await row_of(plane, replica)
    assert row["ready_ms"] is None
    await beat(plane, replica)
    ready_row = await row_of(plane, replica)
    assert ready_row["started_ms"] == row["started_ms"]
    assert ready_row["ready_ms"] - ready_row["started_ms"] >= 5000
    await beat(plane, replica, seq=2, state=ReplicaState.SLEEPING)
    await beat(plane, replica, seq=3)
    assert (await row_of(plane, replica))["ready_ms"] == ready_row["ready_ms"], "the first"


async def test_health_is_the_engines_progress(plane, replica):
    async def aged_s(seconds):
        async with plane.services.postgres.transaction() as conn:
            await conn.execute(
                "UPDATE replicas SET progress_at = progress_at - make_interval(secs => %s)"
                " WHERE replica_id = %s",
                (seconds, replica),
            )

    await beat(plane, replica, running=1, steps=5)
    await aged_s(20)
    await beat(plane, replica, seq=2, running=1, steps=5)
    assert (await row_of(plane, replica))["stalled_ms"] >= 20_000, "work, and no step"
    await beat(plane, replica, seq=3, running=1, steps=6)
    assert (await row_of(plane, replica))["stalled_ms"] < 20_000, "a long prefill steps"
    for seq, changes in ((4, {"running": 0}), (5, {"state": ReplicaState.LOADING})):
        await aged_s(20)
        await beat(plane, replica, seq=seq, **({"running": 1, "steps": 6} | changes))
        assert (await row_of(plane, replica))["stalled_ms"] < 20_000, changes


async def test_a_deployment_that_runs_again_takes_back_what_has_not_begun(plane, name, replica):
    path = f"/deployments/{name}"
    await plane.admin("PATCH", path, {"desired_state": "draining"})
    assert (await beat(plane, replica))["drain"]
    await plane.admin("PATCH", path, {"desired_state": "running"})
    assert not (await beat(plane, replica, seq=2))["drain"]


async def test_launches_are_kept_from_before_the_start_until_they_are_gone(plane, name):
    replica_id = f"{name}-0"
    async with plane.services.postgres.transaction() as conn:

        async def launch():
            return next(
                each for each in await launches.all_launches(conn) if each.replica_id == replica_id
            )

        await launches.ask(
            conn,
            replica_id=replica_id,
            deployment=name,
            launcher=LauncherKind.LOCAL,
            home="here",
        )
        asked = await launch()
        assert (asked.started_ms, asked.is_wanted, asked.home) == (None, True, "here")
        await launches.failed(conn, replica_id, reason="no room", retry_in_ms=60_000)
        failed = await launch()
        assert (failed.failures, failed.last_failure) == (1, "no room")
        assert failed.retry_ms - await fleet.now_ms(conn) > 50_000
        await launches.adopted(conn, replica_id)
        adopted = await launch()
        assert (adopted.started_ms, adopted.retry_ms) == (failed.retry_ms, None)
        await launches.started(conn, replica_id)
        await launches.settled(conn, replica_id)
        assert (await launch()).failures == 0
        for reason in ("first", "second"):
            await launches.ask_stop(conn, replica_id, reason=reason, grace_ms=5)
        stopped = await launch()
        assert (stopped.stop_reason, stopped.stop_grace_ms, stopped.is_wanted) == (
            "first",
            5,
            False,
        )
        await launches.forget(conn, replica_id)
        assert not await launches.any_of(conn, name)
