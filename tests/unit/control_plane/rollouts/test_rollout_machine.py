"""Any course of events against a model of the rules that shares no code with the machine."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from control_plane.rollouts.state import Decision, State
from tests.support.rollout_world import PLAN, TABLE, TICK_MS, RolloutWorld, replicas, side

PERCENTS = (5, 50, 100)
LEAVES = {
    State.PENDING: {State.STAGING, State.PAUSED, State.ABORTED},
    State.STAGING: {State.STEPPING, State.PAUSED, State.ABORTED},
    State.STEPPING: {
        State.STEPPING, State.PAUSED, State.PROMOTING, State.ROLLING_BACK, State.ABORTED,
    },
    State.PAUSED: {
        State.PENDING, State.STAGING, State.STEPPING, State.PAUSED, State.PROMOTING,
        State.ROLLING_BACK, State.ABORTED,
    },
    State.PROMOTING: {State.PROMOTED, State.PAUSED, State.ROLLING_BACK, State.ABORTED},
    State.ROLLING_BACK: {State.ROLLING_BACK, State.ROLLED_BACK},
    State.ABORTED: {State.ABORTED, State.ROLLED_BACK},
    State.PROMOTED: set(),
    State.ROLLED_BACK: set(),
}  # fmt: skip


class Courses(RuleBasedStateMachine):
    """Traffic is such that nothing, a pass, or a failure is certain; the model knows which."""

    def __init__(self) -> None:
        super().__init__()
        self.world = RolloutWorld()
        self.world.canary = self.world.stable = side(300)
        self.traffic = "unsure"

    @rule(traffic=st.sampled_from(("unsure", "good", "bad", "none")))
    def traffic_becomes(self, traffic) -> None:
        self.traffic = traffic
        sides = {
            "unsure": (side(300), side(300)),
            "good": (side(8_000), side(8_000)),
            "bad": (side(60_000, errors=0.5), side(60_000)),
            "none": (None, None),
        }
        self.world.canary, self.world.stable = sides[traffic]

    @rule(count=st.integers(0, 3))
    def replicas_become(self, count) -> None:
        self.world.new = replicas("new", count)

    @rule()
    def replicas_cannot_be_read(self) -> None:
        self.world.new = None

    @precondition(lambda self: self.world.table is not None)
    @rule(tokens=st.integers(0, 3))
    def another_hand_edits(self, tokens) -> None:
        self.world.edit(max_output_tokens=tokens)

    @rule(word=st.sampled_from(("promote", "pause", "resume", "abort", "rollback")))
    def an_operator_says(self, word) -> None:
        before, writes = self.world.rollout, self.world.writes
        answer = self.world.say(word)
        if isinstance(answer, Decision):
            assert len(answer.transitions) == 1
            assert self.world.writes <= writes + 1  # a rollback is one write
        else:
            assert (self.world.rollout, self.world.writes) == (before, writes)
            assert answer.message.endswith(".")
        if word == "rollback" and before.base is not None and not before.closed:
            assert self.world.share() is None

    @rule(passed_ms=st.sampled_from((TICK_MS, TICK_MS, TICK_MS, 0, -TICK_MS, 10**10)))
    def the_control_plane_looks(self, passed_ms) -> None:
        before, edited = self.world.rollout, self._is_edited()
        self.world.look(passed_ms)
        after = self.world.rollout
        assert after.step <= before.step + 1  # whatever the clock does
        if before.closed:
            assert after == before
        elif before.state is State.STEPPING:
            self._stepped(before, after, edited=edited, passed_ms=passed_ms)
        elif before.state is State.PROMOTING:
            assert (after.state is State.PAUSED) >= edited
        elif before.state is State.ROLLING_BACK:
            assert self.world.share() is None

    def _is_edited(self) -> bool:
        """The canary's part of both weights, and what only another hand has changed."""
        rollout = self.world.rollout
        share = self.world.share()
        base = rollout.base
        return base is None or (
            share != rollout.percent / 100
            or self.world.table.max_output_tokens != base.max_output_tokens
        )

    def _stepped(self, before, after, *, edited, passed_ms) -> None:
        if edited:
            assert (after.state, after.pause) == (State.PAUSED, "edited")
            return
        ready = None if self.world.new is None else len(self.world.new)
        moved_on = after.step > before.step or after.state is State.PROMOTING
        if ready == 0 and after.state is State.STEPPING:
            assert after.percent == 0
        if moved_on:
            assert self.traffic != "none"
            assert ready
            assert before.percent == PERCENTS[before.step]
            assert before.held_ms + max(0, min(passed_ms, TICK_MS)) >= 2 * TICK_MS
        judged = ready and before.percent == PERCENTS[before.step] and ready >= before.granted
        if judged and self.traffic == "bad" and after.look > before.look:
            assert after.state is State.ROLLING_BACK
        if after.state is State.ROLLING_BACK:
            lost = before.lost_ms + TICK_MS > PLAN.rules.lost_ms_max and not ready
            assert lost or self.traffic == "bad"

    @invariant()
    def shares_are_of_the_plan(self) -> None:
        rollout = self.world.rollout
        assert rollout.percent in (0, *PERCENTS)
        assert 0 <= rollout.step < len(PERCENTS)
        if rollout.base is None:
            assert self.world.writes == 0
        if rollout.state in {State.ROLLED_BACK, State.PENDING, State.STAGING}:
            assert self.world.share() is None
        if rollout.state is State.ABORTED:
            assert not self.world.share()

    @invariant()
    def every_move_is_one_that_may_be_and_says_why(self) -> None:
        states = [State.PENDING, *(move.after for move in self.world.history)]
        for before, move in zip(states, self.world.history, strict=False):
            assert move.before is before
            assert move.after in LEAVES[before]
            assert move.reasons
            assert all(move.reasons)
        assert states[-1] is self.world.rollout.state

    @invariant()
    def what_is_released_is_released_once_and_at_the_end(self) -> None:
        assert len(self.world.released) == self.world.rollout.closed

    def teardown(self) -> None:
        """However it went, it can be ended, and the table is as good as found."""
        world = self.world
        if world.rollout.closed:
            return
        world.say("abort" if world.rollout.base is None else "rollback")
        world.look()
        assert self.world.rollout.closed
        assert world.table is not None
        found = replace(world.table, version=TABLE.version, max_output_tokens=0)
        assert found == TABLE


TestCourses = Courses.TestCase
TestCourses.settings = settings(max_examples=40, stateful_step_count=30)
