"""A rollout from its first look to its end, and what each state does with what it sees."""

from msgspec.structs import replace

from control_plane.rollouts import machine
from control_plane.rollouts.samples import Side, Window
from control_plane.rollouts.state import State, Wanted
from core.fleet import ReplicaState
from core.route_table import Fallback, RouteTable, Target
from tests.support.rollout_world import (
    PLAN,
    TABLE,
    TICK_MS,
    RolloutWorld,
    replicas,
    side,
)

MUCH = 8_000


def stepping(**rules) -> RolloutWorld:
    """At its first step, with sides that neither pass nor fail."""
    world = RolloutWorld(replace(PLAN, rules=replace(PLAN.rules, **rules)))
    world.canary = world.stable = side(300)
    world.until(State.STEPPING)
    return world


def alone(**rules) -> RolloutWorld:
    """At its last step, where there is no stable to compare with."""
    world = stepping(**rules)
    world.canary = world.stable = side(MUCH)
    world.until_percent(100)
    world.canary = side(300)
    return world


def test_a_good_canary_gets_5_then_50_then_all_and_the_stable_leaves_last():
    world = RolloutWorld()
    world.canary = world.stable = side(MUCH)
    shares = []
    while not world.rollout.closed:
        world.look()
        shares.append(world.share())
    assert list(dict.fromkeys(shares)) == [0.05, 0.5, 1.0]
    assert [t.event for t in world.history] == [
        "started", "gates_open", "step_passed", "step_passed", "promoted", "warm_ended",
    ]  # fmt: skip
    assert world.rollout.state is State.PROMOTED
    assert world.table == replace(
        TABLE, targets=(Target(deployment="new"),), version=world.table.version
    )
    assert world.released == ["old"]
    assert world.writes == 4
    assert all(t.reasons for t in world.history)
    assert world.look() == machine.Decision(rollout=world.rollout)


def test_a_step_lasts_at_least_its_time_however_sure_the_verdict():
    world = stepping()
    world.canary = world.stable = side(MUCH)
    world.look()
    assert world.rollout.reasons == ("every gate that decides has passed; 10 s are left",)
    assert world.rollout.percent == 5
    world.look()
    assert world.rollout.percent == 50


def test_all_of_the_stable_stays_in_the_table_at_weight_0_until_it_ends():
    world = RolloutWorld()
    world.canary = world.stable = side(MUCH)
    world.until(State.PROMOTING)
    assert world.table is not None
    assert [(t.deployment, t.weight) for t in world.table.targets] == [("old", 0), ("new", 1)]
    world.until(State.PROMOTED)
    assert [t.deployment for t in world.table.targets] == ["new"]


def test_what_is_worse_is_rolled_back_by_one_write_to_what_was_found():
    table = RouteTable(
        model="smol",
        targets=(Target(deployment="old", weight=30), Target(deployment="other", weight=70)),
        fallbacks=(Fallback(on=("error",), target=Target(deployment="spare")),),
        max_output_tokens=100,
        version=7,
    )
    world = RolloutWorld(table=table)
    world.canary = world.stable = side(300)
    world.until(State.STEPPING)
    world.canary = side(300, errors=0.4)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK
    assert world.writes == 2
    assert world.table == replace(table, version=world.table.version)
    (why,) = world.rollout.reasons
    assert why.startswith("error rate: canary 40.00% (")
    world.look()
    assert world.rollout.state is State.ROLLED_BACK
    assert world.released == ["new"]


def test_no_conclusion_within_the_time_of_a_step_pauses_and_a_resume_goes_on():
    world = stepping()
    world.until(State.PAUSED)
    assert world.rollout.pause == "inconclusive"
    assert world.rollout.reasons[0] == "step 1 has not been decided in 100 s"
    assert world.share() == 0.05
    look, began_ms = world.rollout.look, world.rollout.began_ms
    assert look == 2  # the last one is taken with all there is
    world.say("resume")
    world.look()
    assert (world.rollout.state, world.rollout.look) == (State.STEPPING, look)
    assert world.rollout.began_ms == began_ms
    world.canary = world.stable = side(MUCH)
    world.until_percent(50)


def test_the_last_look_may_pass():
    world = stepping()
    world.look(times=9)
    look = world.rollout.look
    world.canary = world.stable = side(399)  # too little for the next look to be due
    world.canary = side(399, errors=0.9)
    world.look()
    assert world.rollout.look == look + 1
    assert world.rollout.state is State.ROLLING_BACK


def test_missing_metrics_are_waited_for_and_then_paused_for():
    for missing in ("canary", "stable"):
        world = stepping()
        setattr(world, missing, None)
        world.look(times=3)
        assert world.rollout.reasons == ("there are no measurements of this step",)
        assert world.rollout.state is State.STEPPING
        world.until(State.PAUSED)
        assert world.rollout.reasons[1] == "there are no measurements of this step"


def test_measurements_of_another_window_or_that_cannot_be_true_are_none():
    world = stepping()
    look = world.rollout.look
    world.canary = side(MUCH, errors=0.9)
    world.window = Window(from_ms=1, to_ms=2)
    world.look()
    assert world.rollout.reasons == ("the measurements are of another window",)
    world.window = None
    world.canary = replace(world.canary, open=-1)
    world.look()
    assert world.rollout.reasons == ("the measurements cannot be true: canary: -1 open requests",)
    assert (world.rollout.state, world.rollout.look) == (State.STEPPING, look)


def test_too_few_requests_are_said_in_numbers():
    world = RolloutWorld()
    world.canary = side(12)
    world.until(State.STEPPING)
    world.look()
    assert world.rollout.reasons == (
        (
            "12 requests of the canary and 2000 of the stable have ended, 0 and 0 are open; "
            "200 of each are needed"
        ),
    )


def test_a_canary_on_which_every_request_hangs_is_rolled_back():
    world = stepping()
    world.stable = replace(side(3_000), open=150)
    world.canary = Side(open=600)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK
    (why,) = world.rollout.reasons
    assert why.startswith("requests still open: canary 100.00% (")


def test_a_name_has_one_rollout_at_a_time():
    world = RolloutWorld()
    world.busy_with = "ro_0"
    world.look(times=3)
    assert world.rollout.state is State.PENDING
    assert world.rollout.reasons == ("rollout ro_0 of smol has not ended",)
    world.busy_with = ""
    world.until(State.STEPPING)


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


def test_a_table_of_another_hand_pauses_and_is_adopted_by_a_resume():
    world = stepping()
    world.edit(max_output_tokens=50)
    world.look()
    assert (world.rollout.state, world.rollout.pause) == (State.PAUSED, "edited")
    assert "changed by another hand: version 9" in world.rollout.reasons[0]
    writes = world.writes
    world.canary = side(MUCH, errors=0.9)
    world.look(times=30)  # nothing is decided over somebody's head
    assert (world.rollout.state, world.writes) == (State.PAUSED, writes)
    world.canary = side(300)
    world.say("resume")
    assert (world.rollout.state, world.share()) == (State.STEPPING, 0.05)
    assert world.table.max_output_tokens == 50
    world.look()
    assert world.rollout.state is State.STEPPING
    world.say("rollback")
    assert world.table.max_output_tokens == 50
    assert world.table.targets == TABLE.targets


def test_a_table_that_was_put_back_is_resumed_without_a_write():
    world = stepping()
    kept = world.table
    world.edit(targets=(Target(deployment="old"),))
    world.until(State.PAUSED)
    world.edit(targets=kept.targets)
    writes, windows = world.writes, world.rollout.windows
    world.say("resume")
    world.look()
    assert (world.rollout.state, world.writes) == (State.STEPPING, writes)
    assert world.rollout.windows == windows


def test_a_deleted_table_pauses_and_can_only_be_ended():
    world = stepping()
    world.table = None
    world.look()
    assert world.rollout.reasons == ("the route table of smol was deleted",)
    refused = world.say("resume")
    assert "cannot go on from there" in refused.message
    world.say("rollback")
    world.look()
    assert world.rollout.state is State.ROLLED_BACK
    assert world.writes == 1


def test_a_failure_against_an_earlier_time_is_left_to_people():
    world = alone()
    world.canary = side(MUCH, slower=2.0)
    world.look()
    assert (world.rollout.state, world.rollout.pause) == (State.PAUSED, "failed_alone")
    assert "at another time" in world.rollout.reasons[0]
    windows = world.rollout.windows
    world.look(times=3)
    world.say("resume")
    assert world.rollout.windows == windows + 1
    assert world.rollout.verdicts == ()
    world.canary = side(MUCH)
    world.until(State.PROMOTING)


def test_a_failure_against_an_earlier_time_rolls_back_if_so_ruled():
    world = alone(when_alone="roll_back")
    world.canary = side(MUCH, slower=2.0)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK


def test_errors_roll_back_at_any_time():
    world = alone()
    world.canary = side(MUCH, errors=0.2)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK


def test_a_pause_still_watches_over_what_has_weight():
    world = stepping()
    world.say("pause", why="lunch")
    assert world.rollout.reasons == ("an operator's word: lunch",)
    world.look(times=20)
    assert world.rollout.state is State.PAUSED
    assert world.rollout.reasons == ("an operator's word: lunch",)
    world.canary = world.stable = side(MUCH)
    world.look(times=20)
    assert (world.rollout.state, world.rollout.percent) == (State.PAUSED, 5)
    world.canary = side(4 * MUCH, errors=0.5)
    world.stable = side(4 * MUCH)
    world.look()
    assert world.rollout.state is State.ROLLING_BACK


def test_a_pause_rolls_back_a_canary_that_is_gone_but_not_an_edited_table():
    world = stepping()
    world.say("pause")
    world.new = ()
    world.look(times=3)
    assert world.rollout.state is State.ROLLING_BACK
    world = stepping()
    world.say("pause")
    world.new = ()
    world.edit(max_output_tokens=5)
    world.look(times=9)
    assert world.rollout.state is State.PAUSED


def test_a_failure_alone_while_paused_stays_resumable():
    world = alone()
    world.say("pause")
    world.canary = side(MUCH, slower=2.0)
    world.look()
    assert (world.rollout.pause, world.rollout.resumes) == ("failed_alone", State.STEPPING)


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


def test_promoting_pauses_for_another_hand_and_goes_on():
    world = RolloutWorld()
    world.canary = world.stable = side(MUCH)
    world.until(State.PROMOTING)
    world.edit(max_output_tokens=5)
    decision = world.look()
    assert (world.rollout.state, world.rollout.resumes) == (State.PAUSED, State.PROMOTING)
    assert Wanted(deployment="new", replicas=2) in decision.wanted
    world.look()
    assert "is paused cannot be promoted" in world.say("promote").message
    world.say("resume")
    assert (world.rollout.state, world.share()) == (State.PROMOTING, 1)
    world.until(State.PROMOTED)
    assert world.table.max_output_tokens == 5


def test_a_canary_put_in_again_while_rolling_back_is_taken_out_again():
    world = stepping()
    kept = world.table
    world.say("rollback")
    world.edit(targets=kept.targets)
    decision = world.look()
    assert decision.transitions[0].event == "rewritten"
    assert world.rollout.state is State.ROLLING_BACK
    world.look()
    assert world.rollout.state is State.ROLLED_BACK


def test_a_table_older_than_the_last_write_is_waited_out():
    world = stepping()
    world.table, kept = TABLE, world.table
    decision = world.look(times=3)
    assert (world.rollout.state, decision.write) == (State.STEPPING, None)
    assert "read before the last change" in world.say("rollback").message
    world.table = kept
    world.look()
    assert world.rollout.state is State.STEPPING


def test_a_jump_of_the_clock_neither_skips_nor_rolls_back():
    world = stepping()
    world.look(passed_ms=10 * 24 * 3_600_000)
    assert (world.rollout.percent, world.rollout.state) == (5, State.STEPPING)
    world.look(passed_ms=-20 * 24 * 3_600_000)
    assert (world.rollout.percent, world.rollout.state) == (5, State.STEPPING)
    assert world.rollout.began_ms == world.now_ms
    world.look(times=2)
    assert world.rollout.reasons[0].startswith("look 1 does not decide")
    lost = stepping()
    lost.new = ()
    lost.look()
    lost.look(passed_ms=10 * 24 * 3_600_000)
    assert lost.rollout.state is State.STEPPING
    lost.new = replicas("new", 2)
    lost.look(times=3)
    assert lost.rollout.percent == 5


def test_a_window_is_what_has_settled_of_one_step_and_a_day_at_most():
    world = stepping()
    plan = replace(PLAN, rules=replace(PLAN.rules, settle_ms=TICK_MS))
    rollout = replace(world.rollout, plan=plan, began_ms=1000)
    assert machine.window(rollout, 1000 + TICK_MS) is None
    assert machine.window(rollout, 2000 + TICK_MS) == Window(from_ms=1000, to_ms=2000)
    day_ms = 24 * 3_600_000
    assert machine.window(rollout, 9 * day_ms) == Window(from_ms=1000, to_ms=1000 + day_ms)
    assert machine.window(replace(rollout, closed=True), 2000 + TICK_MS) is None


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
