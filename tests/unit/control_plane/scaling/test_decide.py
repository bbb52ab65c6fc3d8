"""The decision as a whole: its bounds, its quiet, its direction, and its clock."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.scaling.decide import decide
from control_plane.scaling.signals import Missing, Observed
from control_plane.scaling.state import State
from tests.unit.control_plane.scaling.cases import (
    RATE,
    ROUND_MS,
    START_MS,
    a_look,
    a_policy,
    any_signals,
    policies,
    replicas,
    rounds,
    settled,
)

QUIET = settled(a_policy(), 2_000, 3, 100)


@given(policy=policies, seen=st.lists(any_signals, min_size=1, max_size=12), data=st.data())
def test_whatever_is_seen_and_whatever_the_clock_does_the_bounds_are_kept(policy, seen, data):
    state = State()
    for signals in seen:
        decision = decide(policy, state, signals, data.draw(st.integers(0, 2**45)))
        assert policy.min_replicas <= decision.desired <= policy.ceiling
        assert min(decision.wake, decision.start, decision.stop, decision.warm) >= 0
        assert not (decision.stop and (decision.wake or decision.start > len(decision.lost)))
        assert decision.reasons
        assert len(decision.state.peaks) <= 11
        state = msgspec.convert(msgspec.to_builtins(decision.state), State)
        assert state == decision.state


@settings(max_examples=25)
@given(
    per_s=st.floats(0, 9_000),
    least=st.integers(0, 2),
    start=st.integers(1, 10),
    share=st.integers(40, 90),
    prior=st.sampled_from([0, RATE]),
)
def test_under_a_constant_load_the_count_settles_and_never_changes_again(
    per_s, least, start, share, prior
):
    policy = a_policy(min_replicas=least, load_target_percent=share, work_rate_prior=prior)

    def look(last):
        """Replicas come at once, and as many serve as are wanted."""
        ready = start if last is None else last.desired
        queued = 0 if per_s <= ready * RATE else 20
        return a_look(ready=ready, work=per_s, queued=queued)

    told = [decision.desired for decision in rounds(policy, State(), look, 250, every_ms=20_000)]
    assert len(set(told[-100:])) == 1
    ups = [after > before for before, after in pairwise(told) if after != before]
    assert sum(one != other for one, other in pairwise(ups)) <= 1


@settings(max_examples=25)
@given(per_s=st.floats(100, 7_000), noise=st.lists(st.floats(0.95, 1.05), min_size=20, max_size=20))
def test_a_load_that_trembles_within_the_band_turns_nothing(per_s, noise):
    policy, turn = a_policy(), iter(noise * 20)

    def look(last):
        ready = 1 if last is None else last.desired
        work = per_s * next(turn)
        return a_look(ready=ready, work=work, queued=0 if work <= ready * RATE else 20)

    told = [one.desired for one in rounds(policy, State(), look, 250, every_ms=20_000)]
    assert len(set(told[-100:])) == 1


@given(
    seen=st.lists(st.tuples(st.integers(1, 6), st.floats(0, 8_000)), max_size=40),
    low=st.floats(0, 20_000),
    more=st.floats(0, 20_000),
    queued=st.integers(0, 50),
    longer=st.integers(0, 50),
)
def test_more_load_never_wants_fewer_replicas(seen, low, more, queued, longer):
    policy, state, now_ms = a_policy(), State(), START_MS
    for ready, work in seen:
        state = decide(policy, state, a_look(ready=ready, work=work), now_ms).state
        now_ms += ROUND_MS
    ready = seen[-1][0] if seen else 1

    def wanted(work, waiting):
        look = a_look(ready=ready, queued=waiting, arrived=Observed(work), served=Observed(0.0))
        return decide(policy, state, look, now_ms).desired

    assert wanted(low, queued) <= wanted(low + more, queued + longer)


@given(jumps=st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=8))
def test_a_clock_that_jumps_changes_no_count(jumps):
    policy, state, now_ms = a_policy(), QUIET, START_MS * 2
    for jump in jumps:
        now_ms = max(1, now_ms + jump)
        decision = decide(policy, state, a_look(ready=3, work=2_000), now_ms)
        state = decision.state
        assert decision.desired == 3


def test_a_jump_is_told_and_ends_no_window():
    policy = a_policy()
    state = settled(policy, 5_000, 7, 20)
    day_later = decide(policy, state, a_look(ready=7), START_MS + 86_400_000)
    assert day_later.desired == 7
    assert "the clock jumped" in day_later.alarms


def test_it_wakes_at_once_and_starts_behind():
    policy = a_policy(warm_replicas=2)
    state = settled(policy, 500, 1)
    seen = a_look(ready=1, work=500, replicas=replicas(1, asleep=2), arrived=Observed(3_500))
    decision = decide(policy, state, seen, state.wall_ms + ROUND_MS)
    assert (decision.desired, decision.wake, decision.start) == (7, 2, 4)
    assert decision.warm == 2  # and the pool is filled again
    assert decision.reasons[0].startswith("panic: 7 needed: 3500 tokens/s arrive")


def test_a_budget_caps_and_says_so():
    policy = a_policy(replica_hour_micro=2_000_000, budget_hour_micro=7_000_000, warm_replicas=1)
    decision = decide(policy, State(), a_look(ready=1, arrived=Observed(8_000)), START_MS)
    assert decision.desired == 2
    assert "capped: the budget bears 2" in decision.reasons


def test_max_replicas_caps_and_says_so():
    policy = a_policy(max_replicas=2)
    decision = decide(policy, State(), a_look(ready=2, arrived=Observed(8_000)), START_MS)
    assert decision.reasons[-2:] == ("capped: max_replicas is 2", "stays at 2")


def test_bounds_that_were_changed_hold_at_once():
    state = settled(a_policy(), 500, 1)
    raised = decide(a_policy(min_replicas=4), state, a_look(ready=1), state.wall_ms + 1)
    lowered = decide(a_policy(max_replicas=2), raised.state, a_look(ready=4), state.wall_ms + 2)
    assert (raised.desired, lowered.desired, lowered.stop) == (4, 2, 2)


def test_it_goes_down_only_when_fewer_would_have_borne_the_peak():
    policy = a_policy()
    busy = settled(policy, 4_400, 6)
    assert busy.target == 6
    held = rounds(policy, busy, lambda _: a_look(ready=6, work=4_400), 200, busy.wall_ms)
    assert {decision.desired for decision in held} == {6}
    assert "would not have borne" in held[-1].reasons[0]
    quiet = rounds(policy, busy, lambda last: a_look(ready=last.desired if last else 6), 400)
    assert quiet[-1].desired == 1
    first = next(decision for decision in quiet if decision.desired < 6)
    assert first.desired >= 3  # at most half at once
    assert first.reasons[0].startswith(f"down to {first.desired}: it would have borne the peak")


def test_kv_that_fewer_could_not_hold_keeps_them():
    policy = a_policy()
    full = a_look(ready=2, work=200, replicas=replicas(2, used=0.6))
    told = rounds(policy, State(), lambda _: full, 150)
    assert {decision.desired for decision in told} == {2}
    assert told[-1].reasons == ("stays at 2: one less would not have borne the recent peak",)


def test_the_reason_that_holds_a_count_is_told():
    policy = a_policy()
    told = rounds(policy, State(), lambda _: a_look(ready=3), 110)
    whys = {decision.reasons[0] for decision in told}
    assert "stays at 3: it was raised within the scale-down window" in whys
    assert told[-1].desired == 1
    late = rounds(policy, State(), lambda _: a_look(ready=3, wait_ms=Observed(9_000)), 70)
    assert all(decision.desired >= 3 for decision in late)
    assert "late: 4 needed: objectives missed for 30 s" in {
        decision.reasons[0].partition(": wait")[0] for decision in late
    }


@pytest.mark.parametrize("ttft", [Observed(9_000.0), Missing("none ended")])
def test_a_slow_first_token_behind_which_nobody_waits_is_cured_by_no_replica(ttft):
    look = a_look(ready=2, work=500, ttft_ms=ttft)
    told = rounds(a_policy(min_replicas=2), State(), lambda _: look, 100)
    assert {decision.desired for decision in told} == {2}
