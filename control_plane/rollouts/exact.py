"""Bounds on one side's rate, quantile, mean and distribution that hold at any sample size.

Each is one-sided and wrong with at most `chance`. None assumes a normal shape.

    rate      Clopper and Pearson 1934, by the incomplete beta function
    quantile  order statistics: where the distribution function's own such bound passes it
    band      Dvoretzky, Kiefer and Wolfowitz 1956 with Massart's constant, 1990
    mean      Anderson 1969: of all distributions within that band, the extreme mean

Sizes may be fractions: effective ones (Korn and Graubard 1998). A size of 0 bounds nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

TERMS_MAX = 20_000  # of the continued fraction: it takes some multiple of the size's square root
HALVINGS = 22  # of an interval some deviations wide
TINY = 1e-300
CLOSE = 1e-14


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function: that a Beta(a, b) variable is at most x."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x))
    # The fraction converges fast on this side of the mean; the other side is its mirror.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1 - front * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, TERMS_MAX):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < CLOSE:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY


def at_most(hits: float, size: float, rate: float) -> float:
    """That of `size` trials, each a hit by `rate`, at most so many hit: binomial for whole ones."""
    return 1.0 if hits >= size else beta_cdf(1 - rate, size - hits, hits + 1)


def rate_high(hits: float, size: float, chance: float) -> float:
    """The largest rate under which so few hits are not too unlikely."""
    if hits >= size:
        return 1.0
    low = high = hits / size
    step = (1 + math.sqrt(hits * (1 - low))) / size
    while high < 1 and at_most(hits, size, high) > chance:
        low, high, step = high, min(1.0, high + step), 2 * step
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(hits, size, middle) > chance else (low, middle)
    return high


def rate_low(hits: float, size: float, chance: float) -> float:
    """The smallest rate under which so many hits are not too unlikely."""
    return 1 - rate_high(size - hits, size, chance)


def quantile_places(
    cumulative: Sequence[float], size: float, quantile: float, chance: float
) -> tuple[int, int]:
    """Between which places of a distribution a quantile lies, each wrong with `chance`.

    `cumulative` is the share up to each place, the last one 1.
    """

    def may_be_reached(share: float) -> float:
        return at_most(share * size, size, quantile)

    def must_be_reached(share: float) -> float:
        return at_most((1 - share) * size, size, 1 - quantile)

    # The first: rises along the places. The second falls, and is small where there is no doubt.
    low = bisect_left(cumulative, chance, key=may_be_reached)
    high = bisect_left(cumulative, -chance, key=lambda share: -must_be_reached(share))
    last = len(cumulative) - 1
    return min(low, last), min(high, last)


def band(size: float, chance: float) -> float:
    """By how much a distribution function may anywhere exceed the measured one."""
    return 1.0 if size <= 0 else min(1.0, math.sqrt(math.log(1 / chance) / (2 * size)))


def mean_low(values: Sequence[float], shares: Sequence[float], width: float) -> float:
    """The least mean within a band: the uppermost share is taken away and counted as nothing."""
    total, left = 0.0, width
    for value, share in zip(reversed(values), reversed(shares), strict=True):
        kept = max(0.0, share - left)
        left = max(0.0, left - share)
        total += kept * value
    return total


def mean_high(values: Sequence[float], shares: Sequence[float], width: float, top: float) -> float:
    """The greatest: the lowest share is counted as `top`, which no value exceeds."""
    total, left = width * top, width
    for value, share in zip(values, shares, strict=True):
        total += max(0.0, share - left) * value
        left = max(0.0, left - share)
    return total
