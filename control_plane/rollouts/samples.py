"""What is measured of both sides over one window, bounded in size whatever the traffic.

Values go into buckets of a fixed geometric grid, the same on both sides: bucket 0 holds all up
to 1, bucket k what is above `2^((k-1)/16)` and at most `2^(k/16)`; the last also all above. A
value is thereby known to 4.5 %. In SQL it is the function `rollout_bucket`.

Which requests: settled rows of `usage` whose model is the plan's (and tenant, if it has one),
whose version is the side's, and `from_ms <= created_ms < to_ms`. By when they began, so that a
slow side is not judged by its fast ones alone.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

Key = TypeVar("Key", bound=str | int)

BUCKETS = 512
PER_DOUBLING = 16
STRATA_MAX = 128

# What ended of its own, so that its length and its cost say something of the version.
WHOLE_CAUSES = ("complete", "length", "filtered")
ERROR_CAUSES = ("failed", "expired", "not_started")
# Neither the model's doing nor its fault.
UNJUDGED_CAUSES = ("client_cancelled", "lost")
CAUSES = (*WHOLE_CAUSES, *ERROR_CAUSES, *UNJUDGED_CAUSES)

Histogram = tuple[tuple[int, int], ...]  # (bucket, count), each bucket once, in any order


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that began in [from_ms, to_ms)."""

    from_ms: int
    to_ms: int


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one side that are alike in what the side did not choose.

    `name` says in what: the same words on both sides, such as the service class and
    `ceil(log4(prompt_tokens))`. A conversation that began before a rollout stays with the stable
    and has longer prompts, so that sides are compared stratum by stratum.
    """

    name: str
    causes: Mapping[str, int]  # of `CAUSES`: how many ended so
    refused: int | None = None  # of those that ended whole; None where nobody measures it
    first_token: Histogram = ()  # milliseconds, of requests that had one
    inter_token: Histogram = ()  # milliseconds, a request's mean, of those with two tokens or more
    output_tokens: Histogram = ()  # of requests that ended whole
    tokens: Histogram = ()  # prompt and output, of requests that ended whole
    cost: Histogram = ()  # billed micro-units, of requests that ended whole

    @property
    def ended(self) -> int:
        """Requests of any cause."""
        return sum(self.causes.values())


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side's requests. `open` began in the window and have not ended."""

    strata: tuple[Stratum, ...] = ()
    open: int = 0

    @property
    def requests(self) -> int:
        """Those that ended."""
        return sum(stratum.ended for stratum in self.strata)

    @property
    def begun(self) -> int:
        """Those that are open too."""
        return self.requests + self.open


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides over the same window."""

    window: Window
    canary: Side
    stable: Side


def merged(one: Side | None, other: Side) -> Side:
    """The requests of two windows of one side."""
    if one is None:
        return other
    strata = {stratum.name: stratum for stratum in one.strata}
    for stratum in other.strata:
        had = strata.get(stratum.name)
        strata[stratum.name] = stratum if had is None else _merged_stratum(had, stratum)
    return Side(strata=tuple(strata.values())[:STRATA_MAX], open=one.open + other.open)


def _merged_stratum(one: Stratum, other: Stratum) -> Stratum:
    known = one.refused is not None and other.refused is not None
    return Stratum(
        name=one.name,
        causes=_summed(one.causes, other.causes),
        refused=(one.refused or 0) + (other.refused or 0) if known else None,
        first_token=tuple(_summed(dict(one.first_token), dict(other.first_token)).items()),
        inter_token=tuple(_summed(dict(one.inter_token), dict(other.inter_token)).items()),
        output_tokens=tuple(_summed(dict(one.output_tokens), dict(other.output_tokens)).items()),
        tokens=tuple(_summed(dict(one.tokens), dict(other.tokens)).items()),
        cost=tuple(_summed(dict(one.cost), dict(other.cost)).items()),
    )


def _summed(one: Mapping[Key, int], other: Mapping[Key, int]) -> dict[Key, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}


def bucket(value: float) -> int:
    """Where a value is counted."""
    if not value > 1:  # NaN too
        return 0
    return min(BUCKETS - 1, math.ceil(PER_DOUBLING * math.log2(min(value, 2.0**64))))


def least(index: int) -> float:
    """What the values of a bucket are above."""
    return 0.0 if index == 0 else 2 ** ((index - 1) / PER_DOUBLING)


def most(index: int) -> float:
    """What they are at most."""
    return 2 ** (index / PER_DOUBLING)


def unsound(sample: Sample) -> str | None:
    """The first thing in it that nobody can have counted, or None."""
    if sample.window.from_ms >= sample.window.to_ms:
        return "an empty window"
    for name, side in (("canary", sample.canary), ("stable", sample.stable)):
        for what in _unsound_side(side):
            return f"{name}: {what}"
    return None


def _unsound_side(side: Side) -> Iterator[str]:
    names = {stratum.name for stratum in side.strata}
    if len(names) < len(side.strata) or len(names) > STRATA_MAX:
        yield f"a stratum twice, or more than {STRATA_MAX}"
    if side.open < 0:
        yield f"{side.open} open requests"
    for stratum in side.strata:
        yield from _unsound_stratum(stratum)


def _unsound_stratum(stratum: Stratum) -> Iterator[str]:
    if not set(stratum.causes) <= set(CAUSES):
        yield f"{stratum.name}: an unknown cause"
    if min(stratum.causes.values(), default=0) < 0:
        yield f"{stratum.name}: a negative count"
    whole = sum(stratum.causes.get(cause, 0) for cause in WHOLE_CAUSES)
    if stratum.refused is not None and not 0 <= stratum.refused <= whole:
        yield f"{stratum.name}: {stratum.refused} refused of {whole}"
    limits = {"first_token": stratum.ended, "inter_token": stratum.ended}
    limits |= dict.fromkeys(("output_tokens", "tokens", "cost"), whole)
    for field, limit in limits.items():
        counted: Histogram = getattr(stratum, field)
        if len({index for index, _ in counted}) < len(counted):
            yield f"{stratum.name}: a bucket of {field} twice"
        if any(not 0 <= index < BUCKETS or count < 0 for index, count in counted):
            yield f"{stratum.name}: {field} outside its buckets"
        if sum(count for _, count in counted) > limit:
            yield f"{stratum.name}: more of {field} than requests"
