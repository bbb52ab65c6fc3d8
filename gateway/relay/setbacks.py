"""How often a generation may be set back before it is given up, and how long it then waits.

    nack     declined before the prompt was read      for a time: it is queueing, at the head
    unsent   nobody was reached                       for a time: replicas may be restarting
    moved    the replica leaves, as it was told to  ┐
    error    an answer of 5xx                       ├ counted, together
    death    cut off, or failed                     ┘

Invariant: every kind is bounded, and nothing is repeated without a pause for long.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from core.errors import Refusal
from gateway.relay.job import BUSY, DIED, GenerationLimits

Kind = Literal["nack", "unsent", "moved", "error", "death"]
COUNTED: frozenset[Kind] = frozenset({"moved", "error", "death"})
FAULTS: frozenset[Kind] = frozenset({"unsent", "error", "death"})  # of the replica
REPEATED: frozenset[Kind] = frozenset({"error", "death"})  # work is done again, or may be
NACKS_UNPACED = 4  # in a row: as many replicas may be full, each of which then pauses by itself


class Setback(msgspec.Struct, frozen=True):
    """Why an attempt came to nothing and another may follow."""

    kind: Kind
    detail: str


class Setbacks:
    """One request's so far. `clock` is in seconds."""

    def __init__(self, limits: GenerationLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._counted = 0
        self._kind: Kind | None = None  # of the last one
        self._in_a_row = 0  # of that kind, since _since_s
        self._since_s = 0.0

    def count(self, setback: Setback) -> Refusal | None:
        """Note one; a refusal when there were too many."""
        if setback.kind != self._kind:
            self._kind, self._in_a_row, self._since_s = setback.kind, 0, self._clock()
        self._in_a_row += 1
        self._counted += setback.kind in COUNTED
        return self._too_many()

    def pause_s(self) -> float:
        """Before the next attempt. The dispatcher paces what it can: it knows who else is there."""
        match self._kind:
            case "unsent":
                doublings = self._in_a_row - 1
            case "error":
                doublings = self._in_a_row
            case "nack":
                doublings = self._in_a_row - NACKS_UNPACED
            case _:
                return 0.0
        if doublings <= 0:
            return 0.0
        return min(self._limits.pause_max_s, self._limits.pause_min_s * 2.0 ** min(doublings, 16))

    def _too_many(self) -> Refusal | None:
        if self._counted > self._limits.deaths_max:
            return DIED
        lasted_s = self._clock() - self._since_s
        if self._kind == "nack" and lasted_s > self._limits.nacked_s:
            return BUSY
        if self._kind == "unsent" and lasted_s > self._limits.unsent_s:
            return DIED
        return None
