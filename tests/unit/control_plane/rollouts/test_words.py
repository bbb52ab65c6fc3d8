"""What an operator may say in each state, and why not."""

import pytest
from msgspec.structs import replace

from control_plane.rollouts.samples import Window
from control_plane.rollouts.state import Decision, State
from core.route_table import Target
from tests.support.rollout_world import PLAN, TABLE, RolloutWorld, replicas, side


def at(state: State) -> RolloutWorld:
    """A rollout that has come to a state by itself or by words."""
    world = RolloutWorld()
    world.canary = world.stable = side(300)
    if state is State.PENDING:
        return world
    if state is State.STAGING:
        world.new = ()
        world.look()
        return world
    if state in {State.PROMOTING, State.PROMOTED}:
        world.canary = world.stable = side(8_000)
        world.until(state)
        return world
    world.until(State.STEPPING)
    said = {
        State.PAUSED: "pause",
        State.ROLLING_BACK: "rollback",
        State.ROLLED_BACK: "rollback",
        State.ABORTED: "abort",
    }
    if state in said:
        world.say(said[state])
    if state is State.ROLLED_BACK:
        world.look()
    return world


# What each word makes of each state; a piece of the refusal where it may not be said.
OUTCOMES = {
    State.PENDING: ("cannot be promoted", State.PAUSED, "not paused", State.ABORTED, "Abort"),
    State.STAGING: ("cannot be promoted", State.PAUSED, "not paused", State.ABORTED, "Abort"),
    State.STEPPING: (
        State.PROMOTING, State.PAUSED, "not paused", State.ABORTED, State.ROLLING_BACK,
    ),
    State.PAUSED: (
        State.PROMOTING, "cannot be paused", State.STEPPING, State.ABORTED, State.ROLLING_BACK,
    ),
    State.PROMOTING: (
        "cannot be promoted", State.PAUSED, "not paused", State.ABORTED, State.ROLLING_BACK,
    ),
    State.PROMOTED: ("has ended",) * 5,
    State.ROLLING_BACK: ("nothing stops",) * 5,
    State.ROLLED_BACK: ("has ended",) * 5,
    State.ABORTED: (
        "cannot be promoted", "cannot be paused", "not paused", "already", State.ROLLED_BACK,
    ),
}  # fmt: skip
WORDS = ("promote", "pause", "resume", "abort", "rollback")


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("word", WORDS)
def test_every_word_in_every_state(state, word):
    world = at(state)
    assert world.rollout.state is state
    before, writes = world.rollout, world.writes
    answer = world.say(word)
    expected = OUTCOMES[state][WORDS.index(word)]
    if isinstance(expected, State):
        assert isinstance(answer, Decision)
        assert world.rollout.state is expected
        assert len(answer.transitions) == 1
        assert answer.transitions[0].event == word
    else:
        assert expected in answer.message
        assert (world.rollout, world.writes) == (before, writes)


def test_an_abort_before_any_weight_ends_at_once_and_touches_no_table():
    world = at(State.STAGING)
    world.table = replace(TABLE, targets=(*TABLE.targets, Target(deployment="new", weight=0)))
    world.say("abort")
    assert (world.rollout.closed, world.writes, world.released) == (True, 0, ["new"])


def test_an_abort_keeps_conversations_a_rollback_moves_them():
    world = at(State.STEPPING)
    world.say("abort")
    assert world.share() == 0  # in the table: those bound to it stay
    world.look()
    assert world.rollout.reasons == ("new keeps its conversations for another 20 s",)
    world.look(times=2)
    assert (world.rollout.state, world.rollout.closed) == (State.ABORTED, True)
    assert world.table.targets == TABLE.targets
    assert world.released == ["new"]
    moved = at(State.STEPPING)
    moved.say("rollback")
    assert moved.share() is None


def test_a_rollback_ends_an_aborted_one_in_one_write():
    """It has given the name up: another may move that by now, and only one may."""
    world = at(State.ABORTED)
    writes = world.writes
    world.say("rollback")
    assert (world.rollout.state, world.rollout.closed) == (State.ROLLED_BACK, True)
    assert (world.table.targets, world.writes) == (TABLE.targets, writes + 1)
    assert world.released == ["new"]


def test_an_abort_whose_table_was_deleted_ends_at_once():
    world = at(State.STEPPING)
    world.table = None
    world.say("abort")
    assert (world.rollout.closed, world.released) == (True, ["new"])


def test_a_rollback_works_on_a_table_of_any_hand():
    world = at(State.STEPPING)
    world.edit(targets=(Target(deployment="new", weight=4), Target(deployment="x", weight=2)))
    world.say("rollback")
    assert [(t.deployment, t.weight) for t in world.table.targets] == [("x", 1), ("old", 2)]


def test_a_promotion_needs_the_capacity_for_everything():
    world = at(State.STEPPING)
    world.new = replicas("new", 1)
    assert "1 of 2 replicas of new are ready" in world.say("promote").message
    world.new = None
    assert "could not be read" in world.say("promote").message
    world.new = replicas("new", 2)
    world.edit(max_output_tokens=5)
    assert "another hand" in world.say("promote").message
    world.look()
    world.say("promote", why="it is fine")
    assert world.rollout.reasons == ("an operator's word: it is fine",)
    assert (world.rollout.percent, world.share()) == (100, 1)
    assert world.table.max_output_tokens == 5
    world.until(State.PROMOTED)


def test_a_table_that_lost_the_stable_cannot_be_gone_on_with():
    world = at(State.STEPPING)
    world.edit(targets=(Target(deployment="x"),))
    world.look()
    for word in ("resume", "promote"):
        assert "old has no weight in the table" in world.say(word).message


def test_a_pause_before_any_weight_goes_back_to_where_it_was():
    for state in (State.PENDING, State.STAGING):
        world = at(state)
        world.say("pause")
        world.new = replicas("new", 2)
        world.look(times=5)
        assert (world.rollout.state, world.writes) == (State.PAUSED, 0)
        world.say("resume")
        assert world.rollout.state is state
        world.look()
        assert world.rollout.state is State.STEPPING


def test_a_resume_after_a_retreat_goes_on_from_there():
    world = at(State.STEPPING)
    world.new = ()
    world.look()
    world.say("pause")
    world.new = replicas("new", 2)
    world.window = Window(from_ms=1, to_ms=2)
    world.look()  # nothing has a share: there is nothing to judge
    world.window = None
    world.edit(max_output_tokens=5)
    world.say("resume")
    assert (world.rollout.state, world.share()) == (State.STEPPING, 0)
    world.look(times=3)
    assert world.share() == 0.05


def test_plans_steps_are_kept_by_a_promotion_from_the_first_one():
    world = at(State.STEPPING)
    world.say("promote")
    assert world.rollout.step == len(PLAN.steps) - 1
    world.say("pause")
    world.look()
    world.say("resume")
    assert world.rollout.state is State.PROMOTING
