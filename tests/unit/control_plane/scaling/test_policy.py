"""Policies that are none, and what was seen that is not a number."""

import pytest

from control_plane.scaling.policy import REPLICAS_MAX, fault
from control_plane.scaling.signals import EVER_MS, Missing, Observed, fresh, mean, plight
from tests.unit.control_plane.scaling.cases import a_policy


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"deployment": ""}, "deployment"),
        ({"model": "m"}, "deployment"),
        ({"min_replicas": 11}, "min_replicas"),
        ({"budget_hour_micro": 5}, "replica_hour_micro"),
        ({"budget_hour_micro": 5, "replica_hour_micro": 6, "min_replicas": 0}, "budget_hour_micro"),
        (
            {"budget_hour_micro": 20, "replica_hour_micro": 10, "warm_replicas": 2},
            "budget_hour_micro",
        ),
        ({"panic_window_ms": 200_000}, "panic_window_ms"),
        ({"season_ms": 700_000}, "season_ms"),
    ],
)
def test_what_is_no_policy_names_its_field(changes, field):
    wrong = fault(a_policy(**changes))
    assert wrong is not None
    assert wrong[0] == field
    assert wrong[1]


def test_a_sound_policy_has_no_fault():
    assert fault(a_policy()) is None
    assert fault(a_policy(deployment="", model="m")) is None
    assert a_policy().affordable == REPLICAS_MAX
    dear = a_policy(budget_hour_micro=45, replica_hour_micro=10, warm_replicas=1)
    assert (dear.affordable, dear.ceiling, fault(dear)) == (3, 3, None)


def test_missing_and_stale_are_never_a_number():
    assert fresh(Missing("gone"), EVER_MS) is None
    assert fresh(Observed(0.0, 31), 30) is None
    assert fresh(Observed(0.0, 30), 30) == 0.0
    for value in (-1.0, float("nan"), float("inf")):
        assert fresh(Observed(value), 30) is None
    assert plight(Missing("gone"), 30) == "missing (gone)"
    assert plight(Observed(1.0, 9_000), 30) == "stale (9 s old)"
    assert plight(Observed(-1.0), 30) == "no number (-1.0)"
    assert plight(Observed(1.0), 30) is None


def test_a_mean_is_of_what_is_known():
    assert mean([Observed(1.0), Missing("x"), Observed(3.0)], 30) == (2.0, 1)
    assert mean([Missing("x")], 30) == (None, 1)
    assert mean([], 30) == (None, 0)
