"""How often a generation may be set back before it is given up, and how long it then waits.

Invariant: every kind is bounded. A refusal before the prompt is read (nack) and a death are
counted; replicas that cannot be reached are tried for a time, since they may be restarting.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from core.errors import Refusal
from gateway.relay.job import BUSY, DIED, GenerationLimits


class Setback(msgspec.Struct, frozen=True):
    """Why an attempt came to nothing and another may follow."""

    kind: Literal["nack", "unsent", "death"]
    detail: str


class Setbacks:
    """One request's so far. `clock` is in seconds."""

    def __init__(self, limits: GenerationLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._nacks = 0
        self._deaths = 0
        self._unreached = 0  # tries in a row, since _unreached_s
        self._unreached_s = 0.0

    def count(self, setback: Setback) -> Refusal | None:
        """Note one; a refusal when there were too many."""
        if setback.kind == "unsent":
            if self._unreached == 0:
                self._unreached_s = self._clock()
            self._unreached += 1
        else:
            self._unreached = 0
        self._nacks += setback.kind == "nack"
        self._deaths += setback.kind == "death"
        return self._too_many()

    def pause_s(self) -> float:
        """A replica that cannot be reached may be restarting; the dispatcher paces the rest."""
        if self._unreached == 0:
            return 0.0
        return min(self._limits.pause_max_s, self._limits.pause_min_s * 2.0**self._unreached)

    def _too_many(self) -> Refusal | None:
        if self._nacks > self._limits.nacks_max:
            return BUSY
        if self._deaths > self._limits.deaths_max:
            return DIED
        if self._unreached and self._clock() - self._unreached_s > self._limits.unsent_s:
            return DIED
        return None
