"""Rollouts as operators start, watch and stop them: what is taken, refused, and kept."""

import asyncio

import pytest

from store import registry, rollouts
from store.registry import VersionState
from tests.support.control_plane import assert_refused, running, the_settings
from tests.support.gateway_world import until_answered
from tests.support.registry import a_deployment
from tests.support.rollout_cases import RolloutCase

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def plane(postgres_url, valkey_url):
    async with running(the_settings(postgres_url, valkey_url, rollout_every_ms=50)) as plane:
        yield plane


@pytest.fixture
async def case(plane):
    return await RolloutCase(plane).made()


async def test_a_dry_run_tells_the_plan_and_writes_nothing(case):
    answer = await case.plane.admin("POST", "/rollouts", case.body(5, 50, 100), dry_run="true")
    assert answer.status_code == 200, answer.text
    draft = answer.json()
    assert draft["refusals"] == []
    assert (draft["plan"]["stable"], draft["plan"]["canary_version"]) == (
        case.stable,
        case.versions[case.canary],
    )
    assert [step["percent"] for step in draft["steps"]] == [5, 50, 100]
    weights = [[target.get("weight", 1) for target in step["targets"]] for step in draft["steps"]]
    assert weights == [[19, 1], [1, 1], [0, 1]]
    assert {(step["replicas_needed"], step["replicas_ready"]) for step in draft["steps"]} == {
        (1, 1)
    }
    assert draft["demand_rps"] == 0
    assert_refused(
        await case.plane.admin("GET", f"/rollouts/{case.name}"), 404, "not_found", "name"
    )


async def test_a_dry_run_tells_every_refusal_at_once(plane):
    case = await RolloutCase(plane).made(region="elsewhere")
    async with plane.services.postgres.transaction() as conn:
        await registry.set_version_state(conn, case.versions[case.canary], VersionState.RETIRED)
    answer = await plane.admin("POST", "/rollouts", case.body(5), dry_run="true")
    found = [(each["code"], each["param"]) for each in answer.json()["refusals"]]
    assert found == [
        ("unprocessable", "steps.0.percent"),
        ("conflict", "canary"),
        ("conflict", "canary"),
    ]


async def test_a_create_is_idempotent_by_name_and_a_name_moves_once_at_a_time(case):
    made = await case.create()
    assert made.status_code == 201, made.text
    again = await case.create()
    assert (again.status_code, again.json()["name"]) == (200, case.name)
    other = await case.create(20, 100)
    assert_refused(other, 409, "conflict", "name")
    assert other.json()["error"]["existing_id"] == case.name
    second = await case.create(name=f"{case.name}-2")
    assert_refused(second, 409, "conflict", "model")
    assert case.name in second.json()["error"]["message"]
    listed = await case.plane.admin("GET", "/rollouts", model=case.model)
    assert [each["name"] for each in listed.json()["rollouts"]] == [case.name]


async def test_what_cannot_be_rolled_out_is_refused_by_name(case):
    refused = [
        (case.body(canary="nowhere"), 404, "not_found", "canary"),
        (case.body(stable="nowhere"), 404, "not_found", "stable"),
        (case.body(tenant="ten_nobody"), 422, "unprocessable", "stable"),
        (case.body(canary=case.stable), 422, "unprocessable", "canary"),
        (case.body(model="nothing/there"), 422, "unprocessable", "stable"),
        (case.body(50, 10), 422, "unprocessable", "steps.1.percent"),
        (case.body(colour="blue"), 422, "unprocessable", None),
        (case.body(rules={"luck": 1}), 422, "unprocessable", None),
    ]
    for body, status, code, param in refused:
        answer = await case.plane.admin("POST", "/rollouts", body)
        assert answer.status_code == status, (body, answer.text)
        assert answer.json()["error"]["code"] == code, answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param, answer.text
    assert (await case.plane.admin("GET", f"/rollouts/{case.name}")).status_code == 404


async def test_regions_and_retired_versions_conflict(plane):
    away = await RolloutCase(plane).made(region="elsewhere")
    answer = await away.create()
    assert_refused(answer, 409, "conflict", "canary")
    assert "region elsewhere" in answer.json()["error"]["message"]
    case = await RolloutCase(plane).made()
    async with plane.services.postgres.transaction() as conn:
        await registry.set_version_state(conn, case.versions[case.canary], VersionState.RETIRED)
    assert_refused(await case.create(), 409, "conflict", "canary")


async def test_a_canary_without_replicas_gets_no_weight(plane):
    # kserve #5983: a canary took traffic before it was ready.
    case = await RolloutCase(plane).made(ready=False)
    await case.create()
    seen = await case.until("staging")
    await asyncio.sleep(0.2)
    seen = await case.read()
    assert (seen["state"], seen["percent"]) == ("staging", 0)
    assert any("0 of 1 replicas" in reason for reason in seen["reasons"])
    assert (await case.table()).is_plain
    async with plane.services.postgres.connection() as conn:
        assert (await rollouts.floors(conn))[case.canary] == 1
    await case.add_replica(case.canary)
    await case.until_step(10)
    assert await case.shares() == {case.stable: 9, case.canary: 1}


async def test_a_route_and_a_version_stay_while_a_rollout_moves_them(case):
    await case.create()
    await case.until_step(10)
    version = (await case.table()).version
    body = {"deployment": case.canary, "if_version": version}
    put = await case.plane.admin("PUT", f"/routes/{case.model}", body)
    assert_refused(put, 409, "conflict", "model")
    assert case.name in put.json()["error"]["message"]
    deleted = await case.plane.admin("DELETE", f"/routes/{case.model}")
    assert_refused(deleted, 409, "conflict", "model")
    retired = {"state": "retired"}
    for deployment in (case.canary, case.stable):
        path = f"/models/{case.versions[deployment]}"
        assert_refused(await case.plane.admin("PATCH", path, retired), 409, "conflict", "state")
    assert (await case.table()).version == version
    await case.say("rollback")
    await case.until("rolled_back", closed=True)
    assert (await case.plane.admin("PUT", f"/routes/{case.model}", body)).status_code == 409
    plain = {"deployment": case.stable}
    assert (await case.plane.admin("PUT", f"/routes/{case.model}", plain)).status_code == 200
    path = f"/models/{case.versions[case.canary]}"
    assert (await case.plane.admin("PATCH", path, retired)).status_code == 200


async def test_a_version_is_not_retired_beside_a_rollout_that_begins(case):
    """Each would have looked before the other had written."""
    await case.create()
    await case.say("abort")
    await case.until("aborted", closed=True)
    path = f"/models/{case.versions[case.canary]}"
    async with case.plane.services.postgres.transaction() as conn:
        await registry.hold_routes(conn)  # as a create does first
        await conn.execute("UPDATE rollouts SET closed = false WHERE name = %s", (case.name,))
        asked = asyncio.create_task(case.plane.admin("PATCH", path, {"state": "retired"}))
        await until_answered(lambda: waits_or_is_done(conn, asked))
    assert_refused(await asked, 409, "conflict", "state")


async def waits_or_is_done(conn, asked):
    cursor = await conn.execute(
        "SELECT pg_backend_pid() = ANY (pg_blocking_pids(pid)) FROM pg_stat_activity"
    )
    return asked.done() or (True,) in await cursor.fetchall()


async def test_a_table_edited_by_another_hand_pauses_it(case):
    await case.create()
    await case.until_step(10)
    async with case.plane.services.postgres.transaction() as conn:
        await a_deployment(conn, f"x-{case.name}")
        await registry.put_route(
            conn, model=case.model, deployment=f"x-{case.name}", max_output_tokens=0
        )
    seen = await case.until("paused")
    assert seen["pause"] == "edited"
    assert (await case.shares()) == {f"x-{case.name}": 1}
    assert_refused(await case.say("resume", if_version=seen["version"]), 409, "conflict", "name")
    assert (await case.say("abort")).status_code == 200
    assert (await case.read())["state"] == "aborted"


async def test_words_are_followed_explained_and_never_over_what_was_not_seen(case):
    await case.create()
    seen = await case.until_step(10)
    for word in ("promote", "resume"):
        assert_refused(await case.say(word), 409, "conflict", "if_version")
        stale = await case.say(word, if_version=seen["version"] + 1)
        assert_refused(stale, 409, "conflict", "if_version")
    paused = (await case.say("pause", why="lunch")).json()
    assert (paused["state"], paused["pause"], paused["percent"]) == ("paused", "manual", 10)
    assert "lunch" in str(paused["reasons"])
    # The second of two operators has not seen the pause.
    assert_refused(
        await case.say("promote", if_version=seen["version"]), 409, "conflict", "if_version"
    )
    assert (await case.say("resume", if_version=paused["version"])).json()["state"] == "stepping"
    promoted = await case.say("promote", if_version=paused["version"] + 1)
    assert promoted.status_code == 200, promoted.text
    await case.until("promoted", closed=True)
    assert await case.shares() == {case.canary: 1}
    assert_refused(await case.say("rollback"), 409, "conflict", "name")
    events = await case.events()
    assert events == [
        "created", "started", "gates_open", "pause", "resume", "promote", "warm_ended",
    ]  # fmt: skip
    log = (await case.plane.admin("GET", "/audit-log", subject=case.name)).json()
    actions = {(each["action"], each["actor"]) for each in log["records"]}
    assert ("rollout.pause", "admin") in actions
    assert ("rollout.gates_open", "rollouts") in actions


async def test_words_need_a_known_rollout_and_known_fields(case):
    assert_refused(await case.say("pause"), 404, "not_found", "name")
    await case.create()
    assert (await case.say("pause", force=True)).status_code == 422
    assert (await case.say("explode")).status_code == 404


async def test_a_rollback_puts_back_what_was_found_in_one_write(case):
    before = await case.table()
    await case.create(50, 100)
    await case.until_step(50)
    weighted = await case.table()
    answer = await case.say("rollback", why="complaints")
    assert (answer.status_code, answer.json()["percent"]) == (200, 0)
    after = await case.table()
    assert after.targets == before.targets
    assert after.version > weighted.version
    seen = await case.until("rolled_back", closed=True)
    assert "complaints" in str([event["reasons"] for event in seen["events"]])


async def test_an_aborted_canary_keeps_its_conversations_and_gets_no_new_ones(case):
    await case.create(rules={"keep_warm_ms": 600_000, "settle_ms": 0, "tick_ms_max": 1000})
    await case.until_step(10)
    assert (await case.say("abort")).json()["state"] == "aborted"
    assert (await case.shares())[case.canary] == 0
    # The next one waits for it, and does not fight it.
    second = await case.create(name=f"{case.name}-2")
    assert second.status_code == 201, second.text
    assert (await case.plane.admin("GET", f"/rollouts/{case.name}-2")).json()["state"] == "pending"
    await case.plane.admin("POST", f"/rollouts/{case.name}-2/abort", {})


async def test_an_aborted_one_is_rolled_back_while_the_next_waits_for_it(case):
    found = await case.table()
    await case.create(rules={"keep_warm_ms": 600_000, "settle_ms": 0, "tick_ms_max": 1000})
    await case.until_step(10)
    await case.say("abort")
    next_one = f"{case.name}-2"
    assert (await case.create(name=next_one)).status_code == 201
    answer = await case.say("rollback")
    assert answer.status_code == 200, answer.text
    assert (answer.json()["state"], answer.json()["closed"]) == ("rolled_back", True)
    case.name = next_one
    await case.until("stepping")
    await case.say("rollback")
    assert (await case.table()).targets == found.targets


async def test_lists_are_filtered_and_paged(case):
    await case.create()
    page = await case.plane.admin("GET", "/rollouts", only_open="true", limit=1)
    assert len(page.json()["rollouts"]) == 1
    assert page.json()["after"]
    states = await case.plane.admin("GET", "/rollouts", state="promoted", model=case.model)
    assert states.json() == {"rollouts": [], "after": None}
    await case.until_step(10)
    events = f"/rollouts/{case.name}/events"
    first = (await case.plane.admin("GET", events, limit=2)).json()
    rest = (await case.plane.admin("GET", events, before=first["before"])).json()
    found = [event["event"] for event in first["events"] + rest["events"]]
    assert found == ["gates_open", "started", "created"]
    assert rest["before"] is None
