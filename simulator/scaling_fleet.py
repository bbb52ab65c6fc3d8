"""Replicas as a queueing model: they start, serve in slots, sleep, wake and drain.

One queue in front of all of them, served in order. A request holds a slot for its prefill and
its decode steps, which take longer the more slots are in use, as batches do. The invariant: a
request that was taken is finished, whatever becomes of its replica's place in the count.
"""

import heapq
from collections import deque

import msgspec

from control_plane.scaling.decide import Decision
from control_plane.scaling.policy import WORK_OF_AN_OUTPUT_TOKEN
from control_plane.scaling.signals import Missing, Observed, Phase, ReplicaSignal, Signal, Signals
from simulator.scaling_traces import Asked, Trace

MEMORY = 32  # requests that a running mean is of, roughly
CHECK_MS = 1_000_000  # no event lies further ahead of another


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica is."""

    slots: int = 16
    prefill_per_s: float = 8_000.0
    step_ms: float = 20.0  # of decoding alone; twice that with every slot in use
    cold_start_ms: int = 60_000
    wake_ms: int = 4_000

    def prefill_ms(self, asked: Asked) -> float:
        """Until its first token."""
        return asked.input_tokens / self.prefill_per_s * 1_000

    def stay_ms(self, asked: Asked, used: float) -> float:
        """In its slot, with that share of all slots in use."""
        return self.prefill_ms(asked) + asked.output_tokens * self.step_ms * (1 + used)


class Replica(msgspec.Struct, kw_only=True, eq=False):
    """One of them. `ready_ms` is when its phase ends, while it is coming."""

    name: str
    phase: Phase
    since_ms: int
    born_ms: int
    ready_ms: int = 0
    busy: int = 0


class Fleet:
    """All replicas, the queue, and what was observed of both."""

    def __init__(self, machine: Machine, replicas: int) -> None:
        self.machine = machine
        self.now_ms = 0
        self.queue: deque[Asked] = deque()
        self.replicas: list[Replica] = []
        self.replica_ms = 0
        self.first_tokens: list[tuple[int, float]] = []  # when it was asked for, how long it took
        self._named = 0
        self._ends: list[tuple[float, int, Asked, Replica, float]] = []
        self._order = 0
        self._arrived: deque[Asked] = deque()
        self._served: deque[tuple[float, float]] = deque()
        self._firsts: deque[tuple[float, float]] = deque()
        self._mean_output = 0.0
        self._stay_ms = 0.0
        for _ in range(replicas):
            self._born(Phase.READY, 0)

    def play(self, trace: Trace, until_ms: int, begin: int) -> int:
        """All that happens until then; returns how many of the trace have arrived."""
        while True:
            arrives_ms = trace[begin].at_ms if begin < len(trace) else until_ms
            next_ms = min(
                until_ms, arrives_ms, self._ends[0][0] if self._ends else until_ms, self._due_ms()
            )
            self.now_ms = int(next_ms)
            self._mature()
            while self._ends and self._ends[0][0] <= next_ms:
                self._end(*heapq.heappop(self._ends))
            while begin < len(trace) and trace[begin].at_ms <= next_ms:
                self.queue.append(trace[begin])
                self._arrived.append(trace[begin])
                begin += 1
            self._place()
            if next_ms >= until_ms:
                return begin

    @property
    def open(self) -> int:
        """Requests in slots."""
        return sum(replica.busy for replica in self.replicas)

    def of(self, phase: Phase) -> list[Replica]:
        """The replicas that are in it."""
        return [replica for replica in self.replicas if replica.phase is phase]

    # What a scaler does.

    def act(self, decision: Decision) -> None:
        """Wake, start and stop as decided; what is to be stopped may fill the warm pool."""
        for replica in self.of(Phase.ASLEEP)[: decision.wake]:
            self._turn(replica, Phase.COMING, self.now_ms + self.machine.wake_ms)
        self.start(decision.start)
        warm = decision.warm
        for replica in self._spare()[: decision.stop]:
            asleep = warm > 0 and replica.phase is Phase.READY and not replica.busy
            warm -= asleep
            self._turn(replica, Phase.ASLEEP if asleep else Phase.LEAVING, 0)
        for _ in range(warm):
            self._born(Phase.FILLING, self.now_ms + self.machine.cold_start_ms)
        self._bury()

    def scale_to(self, count: int) -> None:
        """As a scaler that knows only a number does."""
        serving = len(self.of(Phase.READY)) + len(self.of(Phase.COMING))
        self.start(count - serving)
        for replica in self._spare()[: max(0, serving - count)]:
            self._turn(replica, Phase.LEAVING, 0)
        self._bury()

    def start(self, count: int) -> None:
        """So many more, cold."""
        for _ in range(count):
            self._born(Phase.COMING, self.now_ms + self.machine.cold_start_ms)

    def close(self) -> int:
        """Everything that is there has cost until now; returns replica milliseconds."""
        return self.replica_ms + sum(self.now_ms - one.born_ms for one in self.replicas)

    # What is seen.

    def signals(self, window_ms: int) -> Signals:
        """As the control plane reads them of a real fleet, over that window."""
        since_ms = self.now_ms - window_ms
        _drop(self._served, since_ms)
        _drop(self._firsts, since_ms)
        while self._arrived and self._arrived[0].at_ms < since_ms:
            self._arrived.popleft()
        seconds = window_ms / 1_000
        open_now = self.open
        wait_ms = len(self.queue) * self._stay_ms / open_now if open_now else 0.0
        return Signals(
            replicas=tuple(self._signal(replica) for replica in self.replicas),
            queued=Observed(len(self.queue)),
            queued_any=Observed(len(self.queue)),
            queued_work=Observed(self._work(self.queue)),
            wait_ms=Observed(wait_ms),
            ttft_ms=self._ttft(),
            arrived=Observed(self._work(self._arrived) / seconds),
            served=Observed(sum(work for _, work in self._served) / seconds),
            cold_start_ms=Observed(self.machine.cold_start_ms),
            wake_ms=Observed(self.machine.wake_ms),
        )

    def _work(self, asked: deque[Asked]) -> float:
        """By prompts as they are and answers as they are on average: nobody knows them yet."""
        answers = len(asked) * self._mean_output * WORK_OF_AN_OUTPUT_TOKEN
        return sum(one.input_tokens for one in asked) + answers

    def _ttft(self) -> Signal:
        if not self._firsts:
            return Missing("no first token in the window")
        firsts = sorted(first for _, first in self._firsts)
        return Observed(firsts[len(firsts) * 95 // 100])

    def _signal(self, replica: Replica) -> ReplicaSignal:
        used = Observed(replica.busy / self.machine.slots)
        return ReplicaSignal(
            replica=replica.name,
            phase=replica.phase,
            phase_ms=self.now_ms - replica.since_ms,
            kv_use=used,
            slots_use=used,
        )

    # What happens.

    def _due_ms(self) -> int:
        return min((one.ready_ms for one in self.replicas if one.ready_ms), default=CHECK_MS**2)

    def _mature(self) -> None:
        for replica in self.replicas:
            if replica.ready_ms and replica.ready_ms <= self.now_ms:
                filling = replica.phase is Phase.FILLING
                self._turn(replica, Phase.ASLEEP if filling else Phase.READY, 0)

    def _place(self) -> None:
        while self.queue:
            free = min(self.of(Phase.READY), key=lambda one: one.busy, default=None)
            if free is None or free.busy == self.machine.slots:
                return
            asked = self.queue.popleft()
            free.busy += 1
            stay_ms = self.machine.stay_ms(asked, free.busy / self.machine.slots)
            first_ms = self.now_ms - asked.at_ms + self.machine.prefill_ms(asked)
            self.first_tokens.append((asked.at_ms, first_ms))
            self._firsts.append((self.now_ms, first_ms))
            self._order += 1
            end_ms = self.now_ms + stay_ms
            heapq.heappush(self._ends, (end_ms, self._order, asked, free, stay_ms))

    def _end(self, at_ms: float, _: int, asked: Asked, replica: Replica, stay_ms: float) -> None:
        replica.busy -= 1
        answer = asked.output_tokens
        self._served.append((at_ms, asked.input_tokens + WORK_OF_AN_OUTPUT_TOKEN * answer))
        first = not self._stay_ms
        self._mean_output += (answer - self._mean_output) / (1 if first else MEMORY)
        self._stay_ms += (stay_ms - self._stay_ms) / (1 if first else MEMORY)
        if replica.phase is Phase.LEAVING:
            self._bury()

    def _spare(self) -> list[Replica]:
        """Those to stop first: the ones that do not serve yet, then the idlest."""
        able = [one for one in self.replicas if one.phase in (Phase.COMING, Phase.READY)]
        return sorted(able, key=lambda one: (one.phase is Phase.READY, one.busy, -one.born_ms))

    def _born(self, phase: Phase, ready_ms: int) -> None:
        self._named += 1
        self.replicas.append(
            Replica(
                name=f"r{self._named}",
                phase=phase,
                since_ms=self.now_ms,
                born_ms=self.now_ms,
                ready_ms=ready_ms,
            )
        )

    def _turn(self, replica: Replica, phase: Phase, ready_ms: int) -> None:
        replica.phase, replica.since_ms, replica.ready_ms = phase, self.now_ms, ready_ms

    def _bury(self) -> None:
        for replica in self.of(Phase.LEAVING):
            if not replica.busy:
                self.replica_ms += self.now_ms - replica.born_ms
                self.replicas.remove(replica)


def _drop(seen: deque[tuple[float, float]], since_ms: int) -> None:
    while seen and seen[0][0] < since_ms:
        seen.popleft()
