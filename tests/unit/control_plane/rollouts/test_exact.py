"""Bounds against exact enumeration: what they may be wrong, they are, and no more."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.rollouts.exact import (
    at_most,
    band,
    beta_cdf,
    mean_high,
    mean_low,
    quantile_places,
    rate_high,
    rate_low,
)

RATES = st.floats(0.001, 0.999)


def binomial(hits: int, size: int, rate: float) -> float:
    return math.comb(size, hits) * rate**hits * (1 - rate) ** (size - hits)


@given(size=st.integers(1, 60), rate=RATES, data=st.data())
def test_at_most_is_the_sum_of_binomial_terms(size, rate, data):
    hits = data.draw(st.integers(0, size))
    exact = sum(binomial(n, size, rate) for n in range(hits + 1))
    assert at_most(hits, size, rate) == pytest.approx(exact, abs=1e-10)


def test_at_most_holds_for_millions():
    # Half a million hits of a million at a rate of a half: just above one half, by symmetry.
    assert at_most(500_000, 1_000_000, 0.5) == pytest.approx(0.5 + 0.5 * 7.98e-4, abs=1e-6)
    assert at_most(900_000, 1_000_000, 0.9) == pytest.approx(0.5, abs=1e-2)


def test_sizes_that_nobody_has_still_end():
    assert 0 <= at_most(5e11, 1e12, 0.5) <= 1


def test_the_beta_function_has_ends():
    assert (beta_cdf(-1, 2, 3), beta_cdf(0, 2, 3), beta_cdf(1, 2, 3)) == (0, 0, 1)


@given(size=st.integers(1, 14), rate=RATES, chance=st.floats(1e-4, 0.3))
def test_a_rate_is_outside_its_bounds_as_rarely_as_allowed(size, rate, chance):
    above = sum(
        binomial(n, size, rate) for n in range(size + 1) if rate_low(n, size, chance) > rate
    )
    below = sum(
        binomial(n, size, rate) for n in range(size + 1) if rate_high(n, size, chance) < rate
    )
    assert above <= chance + 1e-9
    assert below <= chance + 1e-9


@given(size=st.integers(1, 200), chance=st.floats(1e-6, 0.3), data=st.data())
def test_bounds_of_a_rate_hold_it_and_follow_the_hits(size, chance, data):
    hits = data.draw(st.integers(0, size - 1))
    low, high = rate_low(hits, size, chance), rate_high(hits, size, chance)
    assert 0 <= low <= hits / size <= high <= 1
    assert low <= rate_low(hits + 1, size, chance)
    assert high <= rate_high(hits + 1, size, chance)
    assert rate_high(hits, size, chance / 2) >= high


@given(size=st.integers(1, 30), chance=st.floats(1e-3, 0.3), quantile=st.sampled_from((0.5, 0.95)))
def test_a_quantile_is_outside_its_places_as_rarely_as_allowed(size, chance, quantile):
    # Two places: the quantile is the upper one if less than `quantile` lies at the lower one.
    for share in (quantile - 0.02, quantile):
        true = 0 if share >= quantile else 1
        wrong_low = wrong_high = 0.0
        for hits in range(size + 1):
            low, high = quantile_places([hits / size, 1.0], size, quantile, chance)
            probability = binomial(hits, size, share)
            wrong_low += probability * (low > true)
            wrong_high += probability * (high < true)
        assert wrong_low <= chance + 1e-9
        assert wrong_high <= chance + 1e-9


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.05, 0.05, 0.9)])
def test_a_mean_and_a_distribution_are_outside_as_rarely_as_allowed(shares):
    values, chance, size = (0.0, 1.0, 10.0), 0.2, 8
    true = sum(v * s for v, s in zip(values, shares, strict=True))
    wrong_low = wrong_high = wrong_band = 0.0
    for drawn in product(range(3), repeat=size):
        probability = math.prod(shares[d] for d in drawn)
        seen = [drawn.count(n) / size for n in range(3)]
        width = band(size, chance)
        wrong_low += probability * (mean_low(values, seen, width) > true)
        wrong_high += probability * (mean_high(values, seen, width, 10.0) < true)
        gaps = [sum(seen[: n + 1]) - sum(shares[: n + 1]) for n in range(3)]
        wrong_band += probability * (max(gaps) > width)
    assert max(wrong_low, wrong_high, wrong_band) <= chance


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.floats(0, 1))
def test_bounds_of_a_mean_hold_the_mean(weights, width):
    shares = [weight / sum(weights) for weight in weights]
    values = [float(n) for n in range(len(shares))]
    mean = sum(v * s for v, s in zip(values, shares, strict=True))
    assert mean_low(values, shares, width) <= mean + 1e-9
    assert mean_high(values, shares, width, values[-1]) >= mean - 1e-9


def test_no_sample_bounds_nothing():
    assert band(0, 0.05) == 1
    assert rate_low(0, 1, 0.05) == 0
    assert rate_high(1, 1, 0.05) == 1
