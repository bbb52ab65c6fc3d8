"""What a side's requests are like, and counts of them drawn from a seeded generator.

Latencies and lengths are log-normal. Only how many fall into each bucket is drawn, so that a
thousand requests cost what one does.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from control_plane.rollouts.samples import BUCKETS, Histogram, Side, Stratum, most

Counts = NDArray[np.int64]

SPREADS = {"first_token": 0.6, "inter_token": 0.3, "output_tokens": 0.8, "tokens": 0.6, "cost": 0.7}
MEDIANS = {
    "first_token": 300.0,
    "inter_token": 25.0,
    "output_tokens": 180.0,
    "tokens": 700.0,
    "cost": 900.0,
}
LONG_PROMPTS = 4.0  # times the first token's time
CAUSES = ("failed", "length", "complete")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Factors on the medians, and rates. `long` is the part of prompts that are long."""

    slower: float = 1.0
    longer: float = 1.0
    errors: float = 0.01
    truncated: float = 0.05
    refused: float = 0.02
    long: float = 0.2


class Tally:
    """All of one side's requests since a window began. `prompts` are its two strata."""

    def __init__(self) -> None:
        self._causes: dict[str, Counts] = {}
        self._refused: dict[str, int] = {}
        self._buckets: dict[tuple[str, str], Counts] = {}

    def add(self, kind: Kind, requests: int, rng: np.random.Generator, slow: float) -> None:
        """So many more of a kind, `slow` times as slow as usual."""
        long = int(rng.binomial(requests, kind.long))
        for prompts, count in (("short", requests - long), ("long", long)):
            self._add(prompts, kind, count, rng, slow * (LONG_PROMPTS if prompts == "long" else 1))

    def _add(
        self, prompts: str, kind: Kind, count: int, rng: np.random.Generator, slow: float
    ) -> None:
        rates = (kind.errors, kind.truncated, 1 - kind.errors - kind.truncated)
        causes: Counts = rng.multinomial(count, rates)
        whole = int(causes[1:].sum())
        self._causes[prompts] = self._causes.get(prompts, np.zeros(3, np.int64)) + causes
        self._refused[prompts] = self._refused.get(prompts, 0) + int(
            rng.binomial(whole, kind.refused)
        )
        for name, median in MEDIANS.items():
            factor = kind.slower * slow if name == "first_token" else 1.0
            factor = kind.slower if name == "inter_token" else factor
            factor = kind.longer if name in {"output_tokens", "tokens", "cost"} else factor
            drawn: Counts = rng.multinomial(whole, _shares(median * factor, SPREADS[name]))
            had = self._buckets.get((prompts, name))
            self._buckets[prompts, name] = drawn if had is None else had + drawn

    def side(self) -> Side:
        """As the shell would have measured it."""
        return Side(strata=tuple(self._stratum(prompts) for prompts in self._causes))

    def _stratum(self, prompts: str) -> Stratum:
        counts = self._causes[prompts].tolist()
        return Stratum(
            name=prompts,
            causes=dict(zip(CAUSES, counts, strict=True)),
            refused=self._refused[prompts],
            **{name: _histogram(self._buckets[prompts, name]) for name in MEDIANS},
        )


def _histogram(counts: Counts) -> Histogram:
    present = np.flatnonzero(counts)
    return tuple(zip(present.tolist(), counts[present].tolist(), strict=True))


_KNOWN: dict[tuple[float, float], Sequence[float]] = {}


def _shares(median: float, spread: float) -> Sequence[float]:
    """Of each bucket. Few distributions are ever asked for, so they are kept."""
    if (median, spread) not in _KNOWN:
        scale = spread * math.sqrt(2)
        reached = [
            (1 + math.erf(math.log(most(bucket) / median) / scale)) / 2 for bucket in range(BUCKETS)
        ]
        reached[-1] = 1.0
        _KNOWN[median, spread] = np.diff(reached, prepend=0.0).tolist()
    return _KNOWN[median, spread]
