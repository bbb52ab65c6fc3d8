"""Both sides made comparable, and what each metric of either lies between.

Sides do not get the same requests: conversations that began before stay with the stable, and
their prompts are longer. So the stable's strata are weighted to the canary's mix, and count for
as many requests as their weights leave (Kish's effective size). Requests of the canary in
strata which the stable has not are left out; too many of them, and nothing is comparable.
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

import msgspec

from control_plane.rollouts.exact import (
    band,
    mean_high,
    mean_low,
    quantile_places,
    rate_high,
    rate_low,
)
from control_plane.rollouts.plan import Metric
from control_plane.rollouts.samples import (
    BUCKETS,
    ERROR_CAUSES,
    UNJUDGED_CAUSES,
    WHOLE_CAUSES,
    Histogram,
    Side,
    Stratum,
    least,
    most,
)
from control_plane.rollouts.state import Bounds

COVERED_LEAST = 0.5  # of the canary's requests, in strata that the stable has too
CANARY_PART = 0.8
TAIL = 0.99
CUT = 2.0  # times the stable's TAIL: the most that one request counts for in a mean
HISTOGRAMS: dict[Metric, str] = {
    "first_token_p95": "first_token",
    "inter_token_p95": "inter_token",
    "output_tokens": "output_tokens",
    "tokens_mean": "tokens",
    "cost_mean": "cost",
}


class Chances(msgspec.Struct, frozen=True, kw_only=True):
    """How often one gate's failure may be wrong at one look, and its pass.

    Both rest on a bound of either side. The canary's, mostly of fewer requests, gets most of it.
    """

    fail: float
    passing: float

    @property
    def canary(self) -> tuple[float, float]:
        """Of the canary's lower bound, and its upper one."""
        return self.fail * CANARY_PART, self.passing * CANARY_PART

    @property
    def stable(self) -> tuple[float, float]:
        """Of the stable's: it is the other way round."""
        return self.passing * (1 - CANARY_PART), self.fail * (1 - CANARY_PART)


class Spread(msgspec.Struct, frozen=True):
    """A side's distribution over buckets; shares sum to one. `size` is the effective one."""

    shares: dict[int, float]
    size: float

    def share_of(self, bucket: int) -> float:
        """Of one bucket."""
        return self.shares.get(bucket, 0.0)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides of one metric. `covered` is the part of the canary's that is compared."""

    canary: Spread
    stable: Spread
    covered: float


def pair(metric: Metric, canary: Side, stable: Side) -> Pair | None:
    """Of a metric; None: one side has nothing of it, or nothing that is alike."""
    ours = _by_stratum(metric, canary)
    theirs = _by_stratum(metric, stable)
    alike = sorted(ours.keys() & theirs.keys())
    if not alike:
        return None
    sizes = {name: _size(counted) for name, counted in ours.items()}
    total = sum(sizes[name] for name in alike)
    mixed: dict[int, float] = {}
    plain: dict[int, float] = {}
    spent = 0.0
    for name in alike:
        weight = sizes[name] / _size(theirs[name])
        spent += weight * sizes[name]
        for bucket, count in theirs[name]:
            mixed[bucket] = mixed.get(bucket, 0.0) + weight * count / total
        for bucket, count in ours[name]:
            plain[bucket] = plain.get(bucket, 0.0) + count / total
    return Pair(
        canary=Spread(plain, float(total)),
        stable=Spread(mixed, total * total / spent),
        covered=total / sum(sizes.values()),
    )


def _by_stratum(metric: Metric, side: Side) -> dict[str, Histogram]:
    """What is not empty. A rate is a histogram of 0 and 1."""
    if metric == "unfinished":  # nobody has sorted those that have not ended
        return {"": _hits(side.open, side.begun)} if side.begun else {}
    found = {stratum.name: _counted(metric, stratum) for stratum in side.strata}
    return {name: counted for name, counted in found.items() if _size(counted)}


def _counted(metric: Metric, stratum: Stratum) -> Histogram:
    if metric in HISTOGRAMS:
        histogram: Histogram = getattr(stratum, HISTOGRAMS[metric])
        return histogram
    causes = stratum.causes
    judged = stratum.ended - _sum(causes, UNJUDGED_CAUSES)
    whole = _sum(causes, WHOLE_CAUSES)
    if metric == "errors":
        return _hits(_sum(causes, ERROR_CAUSES), judged)
    if metric == "refused":
        return () if stratum.refused is None else _hits(stratum.refused, whole)
    if metric == "cancelled":
        return _hits(causes.get("client_cancelled", 0), stratum.ended)
    return _hits(causes.get("length" if metric == "truncated" else "filtered", 0), whole)


def _sum(causes: Mapping[str, int], of: tuple[str, ...]) -> int:
    return sum(causes.get(cause, 0) for cause in of)


def _hits(hits: int, size: int) -> Histogram:
    return ((0, size - hits), (1, hits))


def _size(counted: Histogram) -> int:
    return sum(count for _, count in counted)


def rates(pair: Pair, chances: Chances) -> tuple[Bounds, Bounds]:
    """The canary's and the stable's, each bound where a verdict could rest on it."""
    return (
        _rate(pair.canary, *chances.canary),
        _rate(pair.stable, *chances.stable),
    )


def _rate(spread: Spread, low: float, high: float) -> Bounds:
    value = spread.share_of(1)
    hits = value * spread.size
    return Bounds(
        low=rate_low(hits, spread.size, low),
        value=value,
        high=rate_high(hits, spread.size, high),
        size=spread.size,
    )


def quantiles(pair: Pair, quantile: float, chances: Chances) -> tuple[Bounds, Bounds]:
    """The same of a quantile, to the outer edges of its buckets."""
    return (
        _quantile(pair.canary, quantile, *chances.canary),
        _quantile(pair.stable, quantile, *chances.stable),
    )


def _quantile(spread: Spread, quantile: float, low: float, high: float) -> Bounds:
    buckets = sorted(spread.shares)
    cumulative = [min(1.0, c) for c in accumulate(spread.shares[b] for b in buckets)]
    cumulative[-1] = 1.0
    first, _ = quantile_places(cumulative, spread.size, quantile, low)
    _, last = quantile_places(cumulative, spread.size, quantile, high)
    # So small a sample may have nothing as large as its quantile is.
    is_open = quantile**spread.size > high
    return Bounds(
        low=least(buckets[first]),
        value=middle(_at(spread, quantile)),
        high=most(BUCKETS - 1) if is_open else most(buckets[last]),
        size=spread.size,
    )


def means(pair: Pair, chances: Chances) -> tuple[Bounds, Bounds]:
    """The same of a mean, of values cut at `CUT` times the stable's `TAIL`."""
    top = max(1.0, CUT * most(_at(pair.stable, TAIL)))
    return (
        _mean(pair.canary, top, *chances.canary),
        _mean(pair.stable, top, *chances.stable),
    )


def _mean(spread: Spread, top: float, low: float, high: float) -> Bounds:
    buckets = sorted(spread.shares)
    values = [min(top, middle(bucket)) for bucket in buckets]
    shares = [spread.shares[bucket] for bucket in buckets]
    return Bounds(
        low=mean_low(values, shares, band(spread.size, low)),
        value=sum(v * s for v, s in zip(values, shares, strict=True)),
        high=mean_high(values, shares, band(spread.size, high), top),
        size=spread.size,
    )


def distance(pair: Pair, chances: Chances) -> Bounds:
    """The largest gap between both distribution functions (Kolmogorov and Smirnov's)."""
    gap, widest = 0.0, 0.0
    for bucket in sorted(pair.canary.shares | pair.stable.shares):
        gap += pair.canary.share_of(bucket) - pair.stable.share_of(bucket)
        widest = max(widest, abs(gap))
    # Half of a chance for each of a band's two edges.
    (ours_fail, ours_pass), (theirs_pass, theirs_fail) = chances.canary, chances.stable
    ours, theirs = pair.canary.size, pair.stable.size
    slack_fail = band(ours, ours_fail / 2) + band(theirs, theirs_fail / 2)
    slack_pass = band(ours, ours_pass / 2) + band(theirs, theirs_pass / 2)
    return Bounds(
        low=max(0.0, widest - slack_fail),
        value=widest,
        high=min(1.0, widest + slack_pass),
        size=min(ours, theirs),
    )


def middle(bucket: int) -> float:
    """One value for all of a bucket, off by 2.2 % at most."""
    return 0.0 if bucket == 0 else (least(bucket) * most(bucket)) ** 0.5


def _at(spread: Spread, quantile: float) -> int:
    """The bucket in which a quantile was measured."""
    buckets = sorted(spread.shares)
    place = bisect_left(list(accumulate(spread.shares[b] for b in buckets)), quantile)
    return buckets[min(place, len(buckets) - 1)]
