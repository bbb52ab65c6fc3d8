"""How fast a replica is: what counts as seen, and what a wrong measure is corrected by."""

from control_plane.scaling.decide import decide
from control_plane.scaling.signals import Observed
from control_plane.scaling.state import State
from control_plane.scaling.view import look
from tests.unit.control_plane.scaling.cases import (
    ROUND_MS,
    a_look,
    a_policy,
    replicas,
    rounds,
)

UNKNOWN = a_policy(work_rate_prior=0)


def served(work, used, ready=1):
    return a_look(
        ready=ready,
        arrived=Observed(work),
        served=Observed(work),
        replicas=replicas(ready, used=used),
    )


def test_a_rate_is_measured_only_while_the_count_holds_and_slots_are_in_use():
    told = rounds(UNKNOWN, State(), lambda _: served(800, 1.0), 20)
    early, late = told[3].state, told[-1].state
    assert (early.rate_samples, early.rate_guess) == (0, 0.0)
    assert (late.rate, late.rate_guess) == (800, 800)
    joined = decide(UNKNOWN, late, served(800, 0.5, ready=2), late.wall_ms + ROUND_MS)
    assert joined.state.rate == 800  # two that share what one did are not half as fast


def test_with_slots_to_spare_a_rate_is_guessed_by_those_in_use():
    told = rounds(UNKNOWN, State(), lambda _: served(200, 0.25), 20)
    assert told[-1].state.rate_samples == 0
    assert told[-1].state.rate_guess == 800
    state = told[-1].state
    seen, _ = look(UNKNOWN, state, served(200, 0.25))
    assert (seen.rate, seen.rate_source) == (800, "by slots in use")
    prior, _ = look(a_policy(work_rate_prior=500), state, served(200, 0.25))
    assert (prior.rate, prior.rate_source) == (500, "the policy's")
    unseen, _ = look(UNKNOWN, State(), served(200, 0.25))
    assert (unseen.rate, unseen.rate_source) == (None, "unknown")


def test_a_rate_that_was_measured_too_low_is_raised_by_what_is_done():
    slow = rounds(UNKNOWN, State(), lambda _: served(300, 1.0), 20)[-1].state
    assert slow.rate == 300
    quick = rounds(UNKNOWN, slow, lambda _: served(700, 0.3), 20, slow.wall_ms)[-1].state
    assert quick.rate == 700  # though nothing waited
