"""What was observed of one deployment, each thing with its age.

What nobody could read is `Missing` with the reason, and what is old says how old it is: neither
is ever a number, because a gauge that was renamed is not an idle replica.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

EVER_MS = 2**53  # no age is too high


class Observed(msgspec.Struct, frozen=True, tag="observed"):
    """`age_ms` is how long ago it was so, by the clock of who told it."""

    value: float
    age_ms: int = 0


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """Nobody knows."""

    reason: str


Signal = Observed | Missing
UNKNOWN = Missing("never observed")


class Phase(StrEnum):
    """Where a replica is, as far as capacity goes."""

    COMING = "coming"  # starting, loading, warming
    READY = "ready"
    ASLEEP = "asleep"  # loaded, to be woken
    FILLING = "filling"  # coming, to be put to sleep
    LEAVING = "leaving"  # draining, stopped, lost


class ReplicaSignal(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. `phase_ms` is how long it has been in its phase."""

    replica: str
    phase: Phase
    phase_ms: int = 0
    kv_use: Signal = UNKNOWN  # of 1
    slots_use: Signal = UNKNOWN  # sequences that run, of those that may


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """Of one deployment. Work is in tokens, rates are a second's."""

    replicas: tuple[ReplicaSignal, ...] = ()
    queued: Signal = UNKNOWN  # requests that wait for a replica, batch aside
    queued_any: Signal = UNKNOWN  # batch too: what a deployment without replicas is woken by
    queued_work: Signal = UNKNOWN
    wait_ms: Signal = UNKNOWN  # a newcomer's
    ttft_ms: Signal = UNKNOWN  # p95
    arrived: Signal = UNKNOWN  # work a second, over the panic window
    served: Signal = UNKNOWN  # the same of all replicas together
    cold_start_ms: Signal = UNKNOWN
    wake_ms: Signal = UNKNOWN

    def of(self, phase: Phase) -> tuple[ReplicaSignal, ...]:
        """The replicas that are there."""
        return tuple(replica for replica in self.replicas if replica.phase is phase)


def fresh(signal: Signal, stale_ms: int) -> float | None:
    """The value, if it may be acted on. What cannot be (a negative, NaN) is nobody's value."""
    if isinstance(signal, Missing) or signal.age_ms > stale_ms:
        return None
    return signal.value if 0 <= signal.value < float("inf") else None


def plight(signal: Signal, stale_ms: int) -> str | None:
    """What is wrong with it, for people; None for a fresh one."""
    if isinstance(signal, Missing):
        return f"missing ({signal.reason})"
    if signal.age_ms > stale_ms:
        return f"stale ({signal.age_ms / 1000:.0f} s old)"
    return None if fresh(signal, stale_ms) is not None else f"no number ({signal.value})"


def mean(signals: Iterable[Signal], stale_ms: int) -> tuple[float | None, int]:
    """Of those that are fresh, and how many are not: one silent worker spoils no mean."""
    values = [fresh(signal, stale_ms) for signal in signals]
    known = [value for value in values if value is not None]
    return (sum(known) / len(known) if known else None), len(values) - len(known)
