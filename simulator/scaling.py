"""Autoscalers over traces: the real `decide`, and beside it what others do, in equal bounds.

    threshold    as KEDA with `waiting > 5`: the queue over 5, each 30 s, down by the highest
                 wish of five minutes
    concurrency  as Knative's KPA: requests in flight over 70 % of the slots, a stable window
                 and a panic window, no way down in a panic

What is told of each: how many first tokens came in time, replica time over that of somebody who
knew the trace and started replicas in no time, how often it turned round, and the cost.
"""

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import msgspec

from control_plane.scaling.decide import Decision, decide
from control_plane.scaling.policy import ScalingPolicy
from control_plane.scaling.signals import Phase, Signals
from control_plane.scaling.state import State
from simulator.clock import START_MS
from simulator.scaling_fleet import Fleet, Machine
from simulator.scaling_traces import Trace

ROUND_MS = 5_000
CLAIRVOYANT_MS = 10_000
SETTLED_MS = 600_000  # from the start, in which nobody knew anything of the load
DRAIN_MS_MAX = 1_800_000  # for what still waits when the trace is over
HOUR_MS = 3_600_000

Distort = Callable[[Signals, int], Signals]  # what is observed, and when


class Scaler(Protocol):
    """Somebody who decides each round."""

    def round(self, fleet: Fleet, now_ms: int) -> int:
        """Act on the fleet; returns how many replicas are wanted."""


class Ours:
    """The decision that the control plane takes."""

    def __init__(self, policy: ScalingPolicy, distort: Distort = lambda seen, _: seen) -> None:
        self._policy = policy
        self._distort = distort
        self.state = State()
        self.decisions: list[Decision] = []

    def round(self, fleet: Fleet, now_ms: int) -> int:
        """Decide and act."""
        seen = self._distort(fleet.signals(self._policy.panic_window_ms), now_ms)
        decision = decide(self._policy, self.state, seen, START_MS + now_ms)
        self.state = decision.state
        self.decisions.append(decision)
        fleet.act(decision)
        return decision.desired


class Threshold:
    """As KEDA does with the number of waiting requests."""

    def __init__(
        self,
        policy: ScalingPolicy,
        *,
        waiting: int = 5,
        poll_ms: int = 30_000,
        cool_ms: int = 300_000,
    ) -> None:
        self._policy = policy
        self._waiting = waiting
        self._poll_ms = poll_ms
        self._wishes: deque[int] = deque(maxlen=cool_ms // poll_ms)
        self._wanted = 0

    def round(self, fleet: Fleet, now_ms: int) -> int:
        """The highest wish of the window, at each poll."""
        if now_ms % self._poll_ms == 0:
            self._wishes.append(_within(self._policy, math.ceil(len(fleet.queue) / self._waiting)))
            self._wanted = max(self._wishes)
            fleet.scale_to(self._wanted)
        return self._wanted


class Concurrency:
    """As Knative's autoscaler does with requests in flight, waiting ones included."""

    def __init__(
        self,
        policy: ScalingPolicy,
        *,
        share: float = 0.7,
        stable_ms: int = 60_000,
        panic_ms: int = 6_000,
    ) -> None:
        self._policy = policy
        self._share = share
        self._seen: deque[int] = deque(maxlen=stable_ms // ROUND_MS)
        self._panic_rounds = max(1, panic_ms // ROUND_MS)
        self._stable_ms = stable_ms
        self._panic_until_ms = 0
        self._wanted = 0

    def round(self, fleet: Fleet, now_ms: int) -> int:
        """The mean of the window over the target, or of the panic window when that doubles."""
        self._seen.append(fleet.open + len(fleet.queue))
        each = fleet.machine.slots * self._share
        recent = list(self._seen)[-self._panic_rounds :]
        stable = math.ceil(sum(self._seen) / len(self._seen) / each)
        panic = math.ceil(sum(recent) / len(recent) / each)
        if panic >= 2 * max(1, len(fleet.of(Phase.READY))):
            self._panic_until_ms = now_ms + self._stable_ms
        wish = max(panic, self._wanted) if now_ms < self._panic_until_ms else stable
        self._wanted = _within(self._policy, wish)
        fleet.scale_to(self._wanted)
        return self._wanted


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one scaler did on one trace."""

    requests: int
    in_time: float  # share of first tokens within the objective
    in_time_settled: float  # of those that were asked for after the first ten minutes
    first_token_p95_ms: float
    replica_hours: float
    clairvoyant_hours: float
    over: float  # replica time over the clairvoyant's, less 1
    changes: int
    turns: int  # from up to down, or from down to up
    most: int
    cost_micro: int


def run(trace: Trace, policy: ScalingPolicy, scaler: Scaler, machine: Machine) -> Outcome:
    """The trace to its end, and on until nothing waits."""
    fleet = Fleet(machine, policy.min_replicas)
    end_ms = trace[-1].at_ms if trace else 0
    wanted: list[int] = []
    begin = now_ms = 0
    while now_ms < end_ms or (fleet.queue and now_ms < end_ms + DRAIN_MS_MAX):
        wanted.append(scaler.round(fleet, now_ms))
        now_ms += ROUND_MS
        begin = fleet.play(trace, now_ms, begin)
    least_ms = clairvoyant_ms(trace, policy, machine, now_ms)
    return _outcome(policy, fleet, wanted, fleet.close(), least_ms)


def clairvoyant_ms(trace: Trace, policy: ScalingPolicy, machine: Machine, until_ms: int) -> int:
    """Replica time of one who knows what comes in the next ten seconds, and needs no start."""
    stays = [0.0] * (until_ms // CLAIRVOYANT_MS + 1)
    for asked in trace:
        stays[asked.at_ms // CLAIRVOYANT_MS] += machine.stay_ms(asked, 1.0)
    each_ms = machine.slots * CLAIRVOYANT_MS
    return sum(
        CLAIRVOYANT_MS * max(policy.min_replicas, math.ceil(stay_ms / each_ms)) for stay_ms in stays
    )


def turns(wanted: list[int]) -> int:
    """How often a series of counts turned round.

    >>> turns([1, 2, 3, 3, 2, 2, 1])
    1
    >>> turns([1, 2, 1, 2])
    2
    """
    steps = [after > before for before, after in pairwise(wanted) if after != before]
    return sum(one != other for one, other in pairwise(steps))


def _outcome(
    policy: ScalingPolicy, fleet: Fleet, wanted: list[int], replica_ms: int, least_ms: int
) -> Outcome:
    firsts = sorted(first for _, first in fleet.first_tokens)
    settled = [first for at_ms, first in fleet.first_tokens if at_ms >= SETTLED_MS]
    missed = len(fleet.queue)  # never served at all
    return Outcome(
        requests=len(firsts) + missed,
        in_time=_in_time(policy, firsts, missed),
        in_time_settled=_in_time(policy, settled, missed),
        first_token_p95_ms=firsts[len(firsts) * 95 // 100] if firsts else 0.0,
        replica_hours=replica_ms / HOUR_MS,
        clairvoyant_hours=least_ms / HOUR_MS,
        over=replica_ms / max(1, least_ms) - 1,
        changes=sum(one != other for one, other in pairwise(wanted)),
        turns=turns(wanted),
        most=max(wanted, default=0),
        cost_micro=replica_ms * policy.replica_hour_micro // HOUR_MS,
    )


def _in_time(policy: ScalingPolicy, firsts: list[float], missed: int) -> float:
    in_time = sum(first <= policy.ttft_objective_ms for first in firsts)
    return in_time / max(1, len(firsts) + missed)


def _within(policy: ScalingPolicy, count: int) -> int:
    return min(policy.ceiling, max(policy.min_replicas, count))
