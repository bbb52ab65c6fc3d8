"""What was counted of both sides, as the machine takes it and as people read it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from control_plane.rollouts.plan import Plan
from control_plane.rollouts.samples import (
    ERROR_CAUSES,
    Histogram,
    Sample,
    Side,
    Stratum,
    Window,
    least,
    most,
)
from store.rollouts import Counted

CAUSE = "cause:"
HISTOGRAMS = ("first_token", "inter_token", "output_tokens", "tokens", "cost")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of `count` values, to the 4.5 % that their buckets know them by; null without any."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None


class SideFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One side's requests. `error_rate` is null without any."""

    version: str
    requests: int
    open: int
    causes: dict[str, int]
    error_rate: float | None
    first_token_ms: Spread
    inter_token_ms: Spread
    output_tokens: Spread
    tokens: Spread
    cost_micro: Spread


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides over one window: requests that began in [from_ms, to_ms)."""

    from_ms: int
    to_ms: int
    canary: SideFigures
    stable: SideFigures


def assemble(
    plan: Plan, window: Window, counted: Iterable[Counted], still_open: Mapping[str, int]
) -> Sample:
    """By side and stratum."""
    rows: dict[str, dict[str, list[Counted]]] = defaultdict(lambda: defaultdict(list))
    for row in counted:
        rows[row.version][row.stratum].append(row)

    def side(version: str) -> Side:
        strata = tuple(_stratum(name, found) for name, found in sorted(rows[version].items()))
        return Side(strata=strata, open=still_open.get(version, 0))

    return Sample(window=window, canary=side(plan.canary_version), stable=side(plan.stable_version))


def compare(plan: Plan, sample: Sample) -> Comparison:
    """For people: no strata, no buckets."""
    return Comparison(
        from_ms=sample.window.from_ms,
        to_ms=sample.window.to_ms,
        canary=_figures(plan.canary_version, sample.canary),
        stable=_figures(plan.stable_version, sample.stable),
    )


def _stratum(name: str, rows: list[Counted]) -> Stratum:
    causes = {row.kind.removeprefix(CAUSE): row.count for row in rows if row.kind.startswith(CAUSE)}
    histograms: dict[str, Any] = {
        kind: tuple((row.bucket, row.count) for row in rows if row.kind == kind)
        for kind in HISTOGRAMS
    }
    return Stratum(name=name, causes=causes, **histograms)


def _figures(version: str, side: Side) -> SideFigures:
    causes: dict[str, int] = defaultdict(int)
    for stratum in side.strata:
        for cause, count in stratum.causes.items():
            causes[cause] += count
    errors = sum(causes[cause] for cause in ERROR_CAUSES)
    return SideFigures(
        version=version,
        requests=side.requests,
        open=side.open,
        causes={cause: count for cause, count in causes.items() if count},
        error_rate=errors / side.requests if side.requests else None,
        first_token_ms=_spread(stratum.first_token for stratum in side.strata),
        inter_token_ms=_spread(stratum.inter_token for stratum in side.strata),
        output_tokens=_spread(stratum.output_tokens for stratum in side.strata),
        tokens=_spread(stratum.tokens for stratum in side.strata),
        cost_micro=_spread(stratum.cost for stratum in side.strata),
    )


def _spread(histograms: Iterable[Histogram]) -> Spread:
    counts: dict[int, int] = defaultdict(int)
    for histogram in histograms:
        for index, count in histogram:
            counts[index] += count
    total = sum(counts.values())
    if not total:
        return Spread(count=0, mean=None, p50=None, p95=None)
    mean = sum((least(index) + most(index)) / 2 * count for index, count in counts.items()) / total
    return Spread(
        count=total, mean=mean, p50=_quantile(counts, total, 50), p95=_quantile(counts, total, 95)
    )


def _quantile(counts: Mapping[int, int], total: int, percent: int) -> float:
    """The upper end of the bucket that holds it."""
    seen, index = 0, 0
    for index in sorted(counts):
        seen += counts[index]
        if seen * 100 >= total * percent:
            break
    return most(index)
