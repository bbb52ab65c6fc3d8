"""Replicas: before any weight, for each share, lost and there again."""

from msgspec.structs import replace

from control_plane.rollouts import machine
from control_plane.rollouts.samples import Window
from control_plane.rollouts.state import State, Wanted
from core.fleet import ReplicaState
from tests.support.rollout_world import (
    MUCH,
    PLAN,
    TABLE,
    TICK_MS,
    RolloutWorld,
    replicas,
    side,
    stepping,
)


def test_no_weight_before_the_canary_is_there_ready_and_right():
    world = RolloutWorld()
    cases = [
        (None, "the replicas of new could not be read"),
        ((), "0 of 1 replicas of new are ready"),
        (replicas("new", 3, ReplicaState.WARMING), "0 of 1 replicas of new are ready"),
        (replicas("new", 2, version="v-x"), "new-0 serves version v-x, not v-new"),
    ]
    for seen, said in cases:
        world.new = seen
        world.look(times=2)
        assert any(reason.startswith(said) for reason in world.rollout.reasons)
    world.new = replicas("new", 2)
    for old, said in ((None, "could not be read"), ((), "old has no ready replica")):
        world.old = old
        world.look()
        assert said in world.rollout.reasons[0]
    world.old = replicas("old", 2)
    world.table = replace(TABLE, alias="fast", targets=())
    world.look()
    assert "smol is an alias of fast" in world.rollout.reasons
    assert (world.rollout.state, world.writes) == (State.STAGING, 0)
    # A dead one of another version holds nobody up.
    world.table = TABLE
    world.new = (*replicas("new", 1), *replicas("gone", 1, ReplicaState.LOST))
    world.look()
    assert world.share() == 0.05


def test_a_canary_that_is_not_staged_in_time_pauses():
    world = RolloutWorld(replace(PLAN, rules=replace(PLAN.rules, stage_ms_max=3 * TICK_MS)))
    world.new = ()
    world.until(State.PAUSED)
    assert world.rollout.pause == "staging"
    assert world.rollout.reasons[0] == "not staged after 30 s"
    world.look(times=5)
    world.new = replicas("new", 1)
    world.say("resume")
    world.look()
    assert world.rollout.state is State.STEPPING


def test_capacity_is_said_with_its_numbers():
    world = RolloutWorld()
    world.canary = world.stable = side(MUCH)
    world.demand_rps, world.replica_rps = 10.0, 2.5
    decision = world.look(times=5)
    assert world.rollout.percent == 5
    assert world.rollout.reasons == (
        "step 1 has passed; 50 % cannot be carried yet",
        (
            "2 of 3 replicas of new are ready (50 % of 10.00 requests a second with headroom 1.20 "
            "is 6.00; a replica carries 2.50, as measured)"
        ),
    )
    # The floor for whoever starts replicas is what the next step needs.
    assert decision.wanted == (
        Wanted(deployment="old", replicas=2),
        Wanted(deployment="new", replicas=3),
    )
    world.new = replicas("new", 3)
    world.look()
    assert world.rollout.percent == 50
    world.until(State.PAUSED)
    assert "100 % cannot be carried yet" in world.rollout.reasons[1]


def test_capacity_that_is_set_comes_before_what_was_measured():
    world = RolloutWorld(replace(PLAN, rules=replace(PLAN.rules, replica_rps=0.1)))
    world.demand_rps, world.replica_rps = 10.0, 1000.0
    world.look()
    assert "2 of 6 replicas" in world.rollout.reasons[0]
    assert "as set" in world.rollout.reasons[0]
    for unknown in (float("nan"), float("inf"), -1.0, None):
        world.demand_rps = unknown
        world.rollout = replace(world.rollout, state=State.STAGING)
        assert "not known" in machine.need(world.rollout, world.observed(), 5).why


def test_less_replicas_take_the_share_back_and_enough_give_it_again():
    world = stepping()
    world.new = world.old = None
    world.look()
    assert world.rollout.reasons == ("the replicas of new could not be read",)
    world.new, world.old = replicas("new", 2), replicas("old", 2)
    world.canary = world.stable = side(MUCH)
    world.demand_rps, world.replica_rps = 10.0, 3.0
    world.until_percent(50)
    world.canary = world.stable = side(300)
    world.new = replicas("new", 1)
    world.look()
    assert (world.rollout.percent, world.share()) == (5, 0.05)
    assert world.history[-1].event == "retreated"
    assert "share of new conversations: 50 % to 5 %; bound ones stay" in world.rollout.reasons
    world.new = replicas("new", 2)
    world.look()
    assert world.rollout.percent == 5
    assert "back to 50 % once enough replicas are ready for 10 s" in world.rollout.reasons[0]
    world.look()
    assert (world.rollout.percent, world.history[-1].event) == (50, "restored")
    assert world.rollout.windows == 4  # 5, 50, 5 and 50: each judged by its own requests


def test_a_share_may_be_held_through_a_loss():
    world = stepping(on_loss="hold")
    world.canary = world.stable = side(MUCH)
    world.demand_rps, world.replica_rps = 10.0, 3.0
    world.until_percent(50)
    world.canary = world.stable = side(300)
    world.new = replicas("new", 1)
    world.look(times=3)
    assert world.rollout.percent == 50
    assert world.rollout.state is State.STEPPING
    assert "1 of 2 replicas" in world.rollout.reasons[0]
    world.new = ()
    world.look()
    assert world.rollout.percent == 0  # nobody at all is no matter of holding


def test_demand_alone_takes_no_share_back_and_what_has_fallen_needs_fewer():
    world = stepping()
    world.canary = world.stable = side(MUCH)
    world.demand_rps, world.replica_rps = 10.0, 3.0
    world.until_percent(50)
    world.canary = world.stable = side(300)
    world.demand_rps = 1_000.0
    world.look()
    assert (world.rollout.percent, world.history[-1].event) == (50, "step_passed")
    world.demand_rps, world.new = 2.0, replicas("new", 1)
    world.look()
    assert world.rollout.percent == 50
    assert world.rollout.reasons[0].startswith("look 1 does not decide")


def test_a_canary_without_replicas_gets_nothing_and_is_rolled_back_if_it_lasts():
    world = stepping()
    world.new = replicas("new", 2, ReplicaState.LOST)
    world.look()
    assert (world.rollout.state, world.share()) == (State.STEPPING, 0)
    assert machine.window(world.rollout, world.now_ms) is None
    world.window = Window(from_ms=1, to_ms=2)
    world.look()
    assert world.rollout.state is State.STEPPING
    world.window = None
    world.look()
    assert world.rollout.state is State.ROLLING_BACK
    assert world.rollout.reasons == ("new has had no ready replica for 20 s; 20 s are tolerated",)
    world.look()
    assert world.rollout.state is State.ROLLED_BACK


def test_replicas_of_another_version_carry_nothing():
    world = stepping()
    world.new = replicas("new", 2, version="v-x")
    world.look()
    assert world.share() == 0


def test_promoting_waits_for_replicas_and_never_ends_without_them():
    world = RolloutWorld()
    world.canary = world.stable = side(MUCH)
    world.until(State.PROMOTING)
    world.new = None
    world.look(times=9)
    assert world.rollout.reasons == ("the replicas of new could not be read",)
    world.new = ()
    world.look()
    assert world.rollout.reasons == ("new has no ready replica; old is kept",)
    world.look(times=2)
    assert world.rollout.state is State.ROLLING_BACK
    assert world.share() is None


def test_floors_are_there_as_long_as_they_are_needed():
    world = RolloutWorld()
    world.busy_with = "ro_0"
    assert world.look().wanted == ()
    world.busy_with = ""
    world.new = None
    world.old = None
    assert world.look().wanted == (Wanted(deployment="new", replicas=1),)
    world.new, world.old = replicas("new", 2), replicas("old", 4)
    both = (Wanted(deployment="old", replicas=4), Wanted(deployment="new", replicas=1))
    assert world.look().wanted == both
    assert world.say("rollback").wanted == both[:1]
    assert world.look().wanted == ()
    world = stepping()
    assert world.say("abort").wanted == (
        Wanted(deployment="old", replicas=2),
        Wanted(deployment="new", replicas=1),
    )
