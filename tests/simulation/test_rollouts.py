"""Rollouts under the virtual clock: equals are left alone, worse ones are stopped, seeds replay."""

import pytest

from control_plane.rollouts.state import State
from simulator.rollouts.figures import SCENARIOS, measure, table
from simulator.rollouts.trial import Trial

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
GRADUAL = 50  # percent: what is bad in any of these ways is stopped before it has everything


@pytest.mark.parametrize("name", ["equal", "equal, bursts", "equal, other prompts"])
def test_a_canary_like_the_stable_is_never_rolled_back(name):
    for seed in range(3):
        end = Trial(BY_NAME[name], seed).run()
        assert end.state is not State.ROLLED_BACK, (seed, end.reasons)


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS if s.is_bad and s.rps > 1])
def test_a_worse_canary_is_stopped_before_it_has_everything(name):
    end = Trial(BY_NAME[name], 1).run()
    assert end.state is State.ROLLED_BACK
    assert end.percent_max <= GRADUAL
    assert end.reasons


def test_next_to_no_traffic_pauses_rather_than_guesses():
    for name in ("equal, tiny traffic", "errors 30 %, tiny traffic"):
        end = Trial(BY_NAME[name], 1).run()
        assert (end.state, end.percent_max) == (State.PAUSED, 5)


def test_a_seed_is_replayed_and_figures_count_what_ended():
    scenario = BY_NAME["errors 1 to 30 %"]
    assert Trial(scenario, 5).run() == Trial(scenario, 5).run()
    figures = measure(scenario, range(3))
    assert (figures.runs, figures.rolled_back, figures.promoted) == (3, 3, 0)
    assert "| errors 1 to 30 % | 3 | 0.0% | 100.0% | 0.0% |" in table([figures])
