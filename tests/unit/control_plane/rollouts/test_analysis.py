"""Verdicts: monotonic in evidence, never passed by nothing, and rarely wrong between equals."""

import random
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from control_plane.rollouts.analysis import (
    LOOKS_MAX,
    chances,
    judge,
    look_due,
    outcome,
    told,
    tolerated,
)
from control_plane.rollouts.evidence import Chances, distance, means, pair, quantiles, rates
from control_plane.rollouts.plan import GATES, METRICS, Gate
from control_plane.rollouts.samples import Side, Stratum, bucket, most
from control_plane.rollouts.state import Verdict
from tests.support.rollout_world import PLAN, side, stratum

RANK = {"pass": 0, "inconclusive": 1, "fail": 2}
ALLOWED = Chances(fail=0.01, passing=0.01)


def verdict(metric, canary, stable, look=1) -> Verdict:
    gates = tuple(gate for gate in GATES if gate.metric == metric)
    (found,) = judge(replace(PLAN, gates=gates), canary, stable, window=1, look=look)
    return found


def outcomes(canary, stable) -> dict[str, str]:
    return {v.metric: v.outcome for v in judge(PLAN, canary, stable, window=1, look=1)}


def test_equal_sides_pass_every_gate_with_enough_requests():
    assert set(outcomes(side(20_000), side(20_000)).values()) == {"pass"}


@pytest.mark.parametrize(
    ("worse", "failed"),
    [
        ({"errors": 0.06}, {"errors"}),
        ({"truncated": 0.2}, {"truncated"}),
        ({"filtered": 0.1}, {"filtered"}),
        ({"refused": 0.2}, {"refused"}),
        ({"left": 0.2}, {"cancelled"}),
        ({"slower": 2.0}, {"first_token_p95", "inter_token_p95"}),
        ({"longer": 2.0}, {"output_tokens", "tokens_mean", "cost_mean"}),
        ({"longer": 0.5}, {"output_tokens"}),  # shorter answers cost less and are others
    ],
)
def test_what_is_worse_fails_its_own_gates_alone(worse, failed):
    found = outcomes(side(5_000, **worse), side(5_000))
    assert {metric for metric, seen in found.items() if seen == "fail"} == failed


def test_few_requests_decide_nothing():
    assert set(outcomes(side(15), side(5_000)).values()) == {"inconclusive"}


def test_nothing_measured_is_never_a_pass():
    for nothing in (Side(), Side(strata=(Stratum(name="all", causes={}),))):
        found = judge(PLAN, nothing, side(), window=1, look=1)
        assert {v.outcome for v in found} == {"inconclusive"}
        assert {v.reason.partition(": ")[2] for v in found} == {"not measured on both sides"}
        assert outcome(found) == "inconclusive"
    assert verdict("refused", side(refused=None), side()).outcome == "inconclusive"
    assert outcome(()) == "inconclusive"


def test_requests_unlike_any_of_the_other_side_are_not_compared():
    ours = Side(strata=(stratum(900, name="long"), stratum(100, name="all")))
    found = verdict("errors", ours, side())
    assert (found.outcome, found.canary) == ("inconclusive", None)
    assert "only 10% of the canary's requests are like any of the stable's" in found.reason


def test_a_stable_with_longer_prompts_is_no_better_canary():
    # Long prompts take four times as long, and the stable has most of them.
    def mixed(short, long):
        return Side(strata=(stratum(short, name="short"), stratum(long, name="long", slower=4.0)))

    both = pair("first_token_p95", mixed(1000, 4000), mixed(8000, 2000))
    assert both is not None
    canary, stable = quantiles(both, 0.95, ALLOWED)
    assert canary.value == pytest.approx(stable.value, rel=0.05)
    # Its 2,000 long ones stand for four of five: it knows less than its 10,000 requests.
    assert both.stable.size == pytest.approx(25e6 / (16e6 / 2000 + 1e6 / 8000), rel=0.02)
    assert verdict("first_token_p95", mixed(1000, 4000), mixed(8000, 2000)).outcome == "pass"


def test_one_stratum_alone_counts_for_what_it_is():
    both = pair("errors", side(1000), side(3000))
    assert both is not None
    assert (both.canary.size, both.stable.size, both.covered) == (1000, 3000, 1)


def test_a_small_sample_has_no_upper_bound_of_its_tail():
    both = pair("first_token_p95", side(30), side(30))
    assert both is not None
    canary, _ = quantiles(both, 0.95, ALLOWED)
    assert canary.high == most(511)


def test_each_look_and_window_has_its_part_of_what_is_allowed():
    acting = sum(gate.role != "told" for gate in PLAN.gates)
    spent = sum(
        chances(PLAN, window, look).fail * acting
        for window in range(1, 200)
        for look in range(1, LOOKS_MAX)
    )
    assert 0.98 * PLAN.rules.false_alarm < spent < PLAN.rules.false_alarm
    missed = sum(chances(PLAN, 3, look).passing for look in range(1, LOOKS_MAX))
    assert 0.98 * PLAN.rules.missed < missed < PLAN.rules.missed
    for allowed in (chances(PLAN, 1, 1), chances(PLAN, 2, 5)):
        assert allowed.canary[0] + allowed.stable[1] == pytest.approx(allowed.fail)
        assert allowed.canary[1] + allowed.stable[0] == pytest.approx(allowed.passing)


def test_looks_are_due_by_growth():
    due = [look_due(n, 200, 2.0) for n in (0, 199, 200, 399, 400, 1600, 10**80)]
    assert due == [0, 0, 1, 1, 2, 4, LOOKS_MAX]


@given(
    size=st.integers(20, 3000),
    metric=st.sampled_from(("errors", "truncated", "refused", "filtered")),
    rate=st.floats(0, 0.4),
    more=st.floats(0, 0.4),
    look=st.integers(1, 9),
)
def test_more_bad_requests_never_make_a_better_verdict(size, metric, rate, more, look):
    before = verdict(metric, side(size, **{metric: rate}), side(), look)
    after = verdict(metric, side(size, **{metric: rate + more}), side(), look)
    assert RANK[before.outcome] <= RANK[after.outcome]


@given(
    size=st.integers(20, 3000),
    metric=st.sampled_from(("first_token_p95", "inter_token_p95", "tokens_mean", "cost_mean")),
    factor=st.floats(0.5, 3),
    more=st.floats(1, 2),
    look=st.integers(1, 9),
)
def test_larger_values_never_make_a_better_verdict(size, metric, factor, more, look):
    kind = "slower" if metric.endswith("p95") else "longer"
    before = verdict(metric, side(size, **{kind: factor}), side(), look)
    after = verdict(metric, side(size, **{kind: factor * more}), side(), look)
    assert RANK[before.outcome] <= RANK[after.outcome]


@given(worse=st.sampled_from(({"errors": 0.2}, {"slower": 3.0}, {"longer": 3.0}, {})))
def test_the_same_evidence_tenfold_is_never_less_certain(worse):
    few = outcomes(side(300, **worse), side(300))
    many = outcomes(side(3000, **worse), side(3000))
    assert all(many[m] == few[m] for m in METRICS if few[m] != "inconclusive")


def test_symmetric_sides_rarely_fail():
    """Both sides of 120 seeds are drawn from one population, and next to nothing is tolerated."""
    gates = (Gate(metric="errors", plus=1e-9), Gate(metric="truncated", plus=1e-9))
    plan = replace(PLAN, gates=gates)
    failed = sum(
        any(
            outcome(judge(plan, canary, stable, window=1, look=look)) == "fail"
            for look, (canary, stable) in enumerate(_growing(random.Random(seed)), 1)
        )
        for seed in range(120)
    )
    assert failed <= 120 * plan.rules.false_alarm / 2  # a window's part of what is allowed


def _growing(rng):
    """Both sides at two looks, each with all that the one before had."""
    seen = tuple(dict.fromkeys(("failed", "length", "complete"), 0) for _ in range(2))
    for _ in range(2):
        for causes in seen:
            for cause in rng.choices(tuple(causes), weights=(5, 10, 85), k=100):
                causes[cause] += 1
        yield tuple(Side(strata=(Stratum(name="s", causes=dict(c)),)) for c in seen)


def test_with_no_margin_false_alarms_are_as_rare_as_allowed_exactly():
    """The worst case, summed over everything that can be drawn: both sides of one rate."""
    size, rate, allowed = 60, 0.2, Chances(fail=0.05, passing=0.05)
    bounds = []
    for hits in range(size + 1):
        both = pair("errors", _failed(hits, size), _failed(hits, size))
        assert both is not None
        canary, stable = rates(both, allowed)
        chance = comb(size, hits) * rate**hits * (1 - rate) ** (size - hits)
        bounds.append((chance, canary.low, stable.high))
    gate = Gate(metric="errors")
    wrong = sum(
        ours * theirs
        for ours, low, _ in bounds
        for theirs, _, high in bounds
        if low > tolerated(gate, high)
    )
    assert 0 < wrong <= allowed.fail


def _failed(failed, size):
    causes = {"failed": failed, "complete": size - failed}
    return Side(strata=(Stratum(name="s", causes=causes),))


def test_runaway_answers_count_for_a_bounded_amount_of_a_mean():
    runaway = ((bucket(150), 950), (bucket(1e9), 50))
    wild = Side(strata=(replace(stratum(1000), tokens=runaway, causes={"complete": 1000}),))
    both = pair("tokens_mean", wild, side(1000))
    assert both is not None
    canary, stable = means(both, ALLOWED)
    assert canary.value < 2 * stable.value


def test_a_distance_is_that_of_the_distributions():
    both = pair("output_tokens", side(1000), side(1000))
    assert both is not None
    assert distance(both, ALLOWED).value == 0
    apart = pair("output_tokens", side(1000, longer=100.0), side(1000))
    assert apart is not None
    assert distance(apart, ALLOWED).value == pytest.approx(1)


def test_only_gates_that_act_make_an_outcome_and_are_told():
    found = judge(PLAN, side(9_000, left=0.3), side(9_000), window=1, look=1)
    assert outcome(found) == "pass"  # clients that leave are told, not acted on
    assert all("pass" in reason for reason in told(found, "pass"))
    guarded = judge(PLAN, side(9_000, truncated=0.3), side(9_000), window=1, look=1)
    assert outcome(guarded) == "fail"
    (why,) = told(guarded, "fail")
    assert why.startswith("truncation rate: canary 30.0")
    assert "is tolerated: fail" in why
    assert {gate.metric for gate in GATES} == set(METRICS)
