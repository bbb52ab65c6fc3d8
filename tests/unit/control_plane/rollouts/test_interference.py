"""Other hands on the table, old reads of it, and clocks that jump."""

from msgspec.structs import replace

from control_plane.rollouts import machine
from control_plane.rollouts.samples import Window
from control_plane.rollouts.state import State, Wanted
from core.route_table import Target
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
