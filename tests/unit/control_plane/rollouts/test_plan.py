"""What a plan may be, each refusal with its field; and what samples may say."""

import pytest
from msgspec.structs import replace

from control_plane.rollouts.plan import Gate, Plan, Rules, Step, fault
from control_plane.rollouts.samples import (
    BUCKETS,
    Side,
    Stratum,
    Window,
    bucket,
    least,
    merged,
    most,
    unsound,
)
from control_plane.rollouts.samples import Sample as Measured
from tests.support.rollout_world import PLAN, side

WHOLE = Step(percent=100)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"canary": "old"}, "canary"),
        ({"canary_version": "v-old"}, "canary"),
        ({"steps": ()}, "steps"),
        ({"steps": tuple(Step(percent=n) for n in range(1, 22))}, "steps"),
        ({"steps": (Step(percent=5), Step(percent=50))}, "steps.1.percent"),
        ({"steps": (WHOLE,)}, "steps.0.percent"),
        ({"steps": (Step(percent=50), Step(percent=50), WHOLE)}, "steps.1.percent"),
        ({"steps": (Step(percent=5, least_ms=9, most_ms=9), WHOLE)}, "steps.0.most_ms"),
        ({"gates": (Gate(metric="errors", plus=0.1),) * 2}, "gates.1.metric"),
        ({"gates": (Gate(metric="output_tokens"),)}, "gates.0.plus"),
        ({"gates": (Gate(metric="errors"),)}, "gates.0.plus"),
        ({"gates": (Gate(metric="errors", plus=0.1, role="guards"),)}, "gates"),
        ({"rules": Rules(tick_ms_max=10, lost_ms_max=19)}, "rules.lost_ms_max"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_its_field(changes, param):
    refused = fault(replace(PLAN, **changes))
    assert refused is not None
    assert refused.param == param


def test_what_is_left_out_is_a_sound_plan():
    plan = Plan(model="m", stable="a", canary="b", stable_version="1", canary_version="2")
    assert fault(plan) is None
    assert fault(PLAN) is None
    assert plan.sides == ("b", "a")


def test_a_value_lies_within_its_bucket():
    for value in (0.0, 0.4, 1.0, 1.01, 2.0, 37.5, 4096.0, 3_600_000.0):
        index = bucket(value)
        assert least(index) < value <= most(index) or value == 0
        assert index == 0 or most(index) / least(index) == pytest.approx(2 ** (1 / 16))
    assert bucket(float("nan")) == 0
    assert bucket(float("inf")) == BUCKETS - 1


SOUND = Stratum(name="s", causes={"complete": 3, "failed": 1}, refused=1, tokens=((4, 3),))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"causes": {"vanished": 1}, "refused": None, "tokens": ()}, "an unknown cause"),
        ({"causes": {"complete": 5, "failed": -1}}, "a negative count"),
        ({"refused": 4}, "4 refused of 3"),
        ({"tokens": ((4, 2), (4, 1))}, "a bucket of tokens twice"),
        ({"tokens": ((BUCKETS, 1),)}, "tokens outside its buckets"),
        ({"tokens": ((4, -1),)}, "tokens outside its buckets"),
        ({"tokens": ((4, 4),)}, "more of tokens than requests"),
        ({"first_token": ((4, 5),)}, "more of first_token than requests"),
    ],
)
def test_counts_that_nobody_can_have_counted_are_told(wrong, said):
    bad = Side(strata=(replace(SOUND, **wrong),))
    window = Window(from_ms=1, to_ms=2)
    assert said in str(unsound(Measured(window=window, canary=bad, stable=side())))
    assert said in str(unsound(Measured(window=window, canary=side(), stable=bad)))


def test_a_sample_is_unsound_as_a_whole():
    window = Window(from_ms=1, to_ms=2)
    twice = Side(strata=(SOUND, SOUND))
    assert "twice" in str(unsound(Measured(window=window, canary=twice, stable=side())))
    closed = Side(strata=(SOUND,), open=-1)
    assert "open" in str(unsound(Measured(window=window, canary=closed, stable=side())))
    empty = Window(from_ms=2, to_ms=2)
    assert "window" in str(unsound(Measured(window=empty, canary=side(), stable=side())))
    assert unsound(Measured(window=window, canary=Side(strata=(SOUND,)), stable=Side())) is None


def test_two_windows_of_a_side_are_one():
    other = replace(SOUND, name="t", refused=None)
    one = Side(strata=(SOUND,), open=5)
    both = merged(one, Side(strata=(SOUND, other), open=2))
    assert merged(None, one) == one
    assert both.requests == 12
    assert (both.open, both.begun) == (7, 19)
    doubled = {"complete": 6, "failed": 2}
    assert both.strata == (replace(SOUND, causes=doubled, refused=2, tokens=((4, 6),)), other)
    assert merged(Side(strata=(other,)), Side(strata=(other,))).strata[0].refused is None
