"""The leader's look at rollouts: by evidence on, by evidence back, and each decision once."""

import asyncio

import pytest

from control_plane.rollout_runner import RolloutRunner
from control_plane.scaler import Scaler
from store import rollouts
from store.leader import NotLeaderError
from tests.support.control_plane import assert_refused, running, the_settings
from tests.support.gateway_world import until
from tests.support.rollout_cases import QUICK_GATES, QUICK_RULES, RolloutCase

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    # The process's own job stays out of it: these tests run their own rounds.
    settings = the_settings(
        fresh_postgres_url, valkey_url, rollout_every_ms=3_600_000, scaling_every_ms=3_600_000
    )
    async with running(settings) as plane:
        await until(lambda: plane.has_run("rollouts") and plane.has_run("scaler"))
        yield plane


@pytest.fixture
async def case(plane):
    return await RolloutCase(plane).made()


async def to_first_step(case, runner):
    for _ in range(2):
        await runner.round()
    assert (await case.read())["state"] == "stepping"


async def both_served(case, count=60, **canary):
    await case.served(case.stable, count)
    await case.served(case.canary, count, **canary)
    await asyncio.sleep(0.002)  # a window ends before its look


async def test_a_good_canary_goes_through_its_steps_and_is_promoted(case):
    await case.create(10, 50, 100)
    runner = RolloutRunner(case.plane.services)
    await to_first_step(case, runner)
    shares = [await case.shares()]
    for _ in range(2):
        await both_served(case)
        await runner.round()
        shares.append(await case.shares())
    assert shares == [
        {case.stable: 9, case.canary: 1},
        {case.stable: 1, case.canary: 1},
        {case.stable: 0, case.canary: 1},
    ]
    await both_served(case)
    await runner.round()
    await runner.round()
    seen = await case.read()
    assert (seen["state"], seen["closed"]) == ("promoted", True)
    assert await case.shares() == {case.canary: 1}
    assert (await case.table()).is_plain
    passed = [event for event in seen["events"] if event["event"] == "step_passed"]
    assert len(passed) == 2
    for event in passed:
        assert event["sample"]["canary"]["requests"] >= 60
        assert any("error rate" in reason for reason in event["reasons"])
    async with case.plane.services.postgres.connection() as conn:
        assert await rollouts.floors(conn) == {}


@pytest.mark.parametrize(
    "worse",
    [
        {"first_token": 9_000.0},
        {"cause": "failed", "first_token": None, "inter_token": None},
        {"cause": "length", "output": 300},
    ],
    ids=["slower", "failing", "longer"],
)
async def test_a_worse_canary_is_rolled_back_by_itself(case, worse):
    gates = [*QUICK_GATES, {"metric": "truncated", "plus": 0.3, "role": "guards"}]
    await case.create(50, 100, gates=gates)
    before = await case.table()
    runner = RolloutRunner(case.plane.services)
    await to_first_step(case, runner)
    await both_served(case, 400, **worse)
    comparison = (await case.read())["comparison"]
    assert comparison["canary"]["requests"] == comparison["stable"]["requests"] == 400
    await runner.round()
    await runner.round()
    seen = await case.read()
    assert (seen["state"], seen["closed"]) == ("rolled_back", True)
    assert (await case.table()).targets == before.targets
    failed = next(event for event in seen["events"] if event["event"] == "failed")
    assert any(verdict["outcome"] == "fail" for verdict in failed["verdicts"])
    assert failed["sample"]["canary"]["version"] == case.versions[case.canary]
    assert failed["reasons"]
    assert failed["actor"] == "rollouts"


async def test_a_leaders_old_term_decides_nothing(case):
    await case.create()
    runner = RolloutRunner(case.plane.services)
    leadership = case.plane.services.leadership
    with leadership.within_term():
        await runner.round()
        before, table = await case.read(), await case.table()
        async with case.plane.services.postgres.transaction() as conn:
            # As another that took over: there is no moment for this one to lead again.
            await conn.execute(
                "UPDATE leaders SET holder = 'other', epoch = epoch + 1,"
                " expires_at = clock_timestamp() + interval '1 hour'"
            )
        with pytest.raises(NotLeaderError):
            await runner.round()
    after = await case.read()
    assert (after["version"], after["state"], after["updated_ms"]) == (
        before["version"],
        before["state"],
        before["updated_ms"],
    )
    assert await case.table() == table


async def test_two_looks_at_once_keep_a_decision_once(case):
    await case.create()
    runners = [RolloutRunner(case.plane.services) for _ in range(4)]
    for _ in range(3):
        await asyncio.gather(*(runner.round() for runner in runners))
    assert await case.events() == ["created", "started", "gates_open"]
    table = await case.table()
    log = (await case.plane.admin("GET", "/audit-log", subject=case.model)).json()
    assert [each["action"] for each in log["records"]] == ["route.put"]
    assert log["records"][0]["detail"]["before"]["version"] < table.version


async def test_a_word_between_a_look_and_its_write_wins(case):
    await case.create()
    runner = RolloutRunner(case.plane.services)
    await to_first_step(case, runner)

    async def words():
        for _ in range(5):
            paused = (await case.say("pause")).json()
            assert (await case.say("resume", if_version=paused["version"])).status_code == 200

    async def looks():
        for _ in range(20):
            await runner.round()

    await asyncio.gather(words(), looks())
    assert (await case.say("rollback")).status_code == 200
    await runner.round()
    seen = await case.read()
    assert (seen["state"], await case.shares()) == ("rolled_back", {case.stable: 1})
    assert_refused(await case.say("pause"), 409, "conflict", "name")


async def test_a_rollout_that_cannot_be_read_keeps_no_other_from_moving(plane, caplog):
    ill, well = [await RolloutCase(plane).made() for _ in range(2)]
    await ill.create()
    await well.create()
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("UPDATE rollouts SET body = '{}' WHERE name = %s", (ill.name,))
    runner = RolloutRunner(plane.services)
    for _ in range(2):
        with pytest.raises(Exception, match="missing required field"):
            await runner.round()
    assert (await well.read())["state"] == "stepping"
    assert "a rollout failed" in caplog.text


async def test_a_round_that_is_cut_short_goes_on_where_it_was(plane):
    """Else those behind one that takes long are never looked at, a failing canary among them."""
    slow, quick = [await RolloutCase(plane).made() for _ in range(2)]
    await slow.create()
    await quick.create()
    runner = RolloutRunner(plane.services)
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("SELECT FROM rollouts WHERE name = %s FOR UPDATE", (slow.name,))
        for _ in range(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await runner.round()
            if (await quick.read())["state"] != "pending":
                break
    assert (await quick.read())["state"] != "pending"
    assert (await slow.read())["state"] == "pending"


async def test_what_cannot_be_measured_is_no_evidence(case, caplog):
    await case.create()
    runner = RolloutRunner(case.plane.services)
    await to_first_step(case, runner)
    await both_served(case)
    await case.plane.services.books.close()
    await runner.round()
    seen = await case.read()
    assert (seen["state"], seen["percent"], seen["comparison"]) == ("stepping", 10, None)
    assert "a rollout could not be measured" in caplog.text


async def test_a_history_is_never_altered(case):
    await case.create()
    for statement in ("UPDATE rollout_events SET event = ''", "DELETE FROM rollout_events"):
        with pytest.raises(Exception, match="rollout_events"):
            async with case.plane.services.postgres.transaction() as conn:
                await conn.execute(statement)


async def test_the_autoscaler_keeps_what_a_rollout_needs(case):
    policy = {"max_replicas": 4, "work_rate_prior": 100}
    target = f"/scaling-policies/deployment:{case.canary}"
    assert (await case.plane.admin("PUT", target, policy)).status_code == 200
    await case.create(10, 100, rules={**QUICK_RULES, "least_replicas": 3})
    scaler = Scaler(case.plane.services)

    async def wanted():
        await scaler.round()
        deployment = await case.plane.admin("GET", f"/deployments/{case.canary}")
        return deployment.json()["replicas_desired"]

    await RolloutRunner(case.plane.services).round()
    async with case.plane.services.postgres.connection() as conn:
        assert (await rollouts.floors(conn))[case.canary] == 3
    assert await wanted() == 3, (await case.plane.admin("GET", "/scaling-decisions")).text
    assert (await case.say("abort")).status_code == 200
    async with case.plane.services.postgres.connection() as conn:
        assert await rollouts.floors(conn) == {}
