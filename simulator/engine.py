"""The engine in virtual time: the real scheduler and generations, stepped by the clock.

`worker.stepper` without its thread, its wall clock and its log. A step decides at its start
and tells its tokens at its end, `step_ms` later; what arrives in between waits for the next.
Invariant: as in the original, what `submit` accepts gets exactly one last event.
"""

from collections.abc import Sequence as Many
from itertools import count
from random import Random
from typing import Protocol

import msgspec

from core.protocol import Failed, FinishCause, Finished, Generate, Nack
from simulator.clock import Clock
from simulator.journal import Key
from simulator.model import Letters, SimulatedRunner
from worker.admission import SchedulerConfig, prefill_tokens, refuse
from worker.blocks import BlockPool
from worker.events import Emit, Event
from worker.generation import Generation, attempt_id, open_generation
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.step import Sampled, StepPlan

BlockPoolType = type[BlockPool]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step takes, and how often one fails."""

    base_ms: int = 8
    jitter_ms: int = 4
    tokens_per_ms: int = 8


class EngineWatch(Protocol):
    """Who judges what the engine does, as it does it."""

    def accepted(self, request: Generate, replica: str) -> None:
        """An attempt was taken."""

    def started(self, key: Key, cached_tokens: int) -> None:
        """Its first step begins, with so much of its prompt found in cache."""

    def planned(self, key: Key, deadline_ms: int) -> None:
        """A step with tokens of this attempt begins."""

    def produced(self, key: Key, choice: int, token: int) -> None:
        """A token was made."""


class _Live:
    """An accepted attempt."""

    def __init__(self, generation: Generation, emit: Emit) -> None:
        self.generation = generation
        self.emit = emit
        request = generation.request
        self.key: Key = (request.request_id, request.attempt)


class Engine:
    """One life's. `halt` ends it for good."""

    def __init__(
        self,
        clock: Clock,
        config: SchedulerConfig,
        *,
        name: str,
        boot_id: str,
        pool_type: BlockPoolType,
        times: StepTimes,
        dice: Random,
        watch: EngineWatch,
    ) -> None:
        self.config = config
        pool = pool_type(config.kv_blocks, config.block_tokens, host_blocks=config.host_blocks)
        self.scheduler = Scheduler(config, pool)
        self.failure_chance = 0.0  # of a step
        self.touched = True  # since an invariant last looked
        self.steps = 0
        self._clock = clock
        self._name = name
        self._boot_id = boot_id
        self._times = times
        self._dice = dice
        self._watch = watch
        self._text = Letters()
        self._runner = SimulatedRunner(
            config.kv_blocks, config.block_tokens, self._salt_of, host_blocks=config.host_blocks
        )
        self._numbers = count(1)
        self._salts: dict[int, bytes] = {}
        self._live: dict[str, _Live] = {}
        self._inbox: list[_Live] = []
        self._aborts: list[str] = []
        self._is_stepping = False
        self._is_halted = False

    def submit(self, request: Generate, emit: Emit) -> Nack | None:
        """Refused in this order: duplicate, fits_never, full."""
        generation = open_generation(
            request,
            self._text,
            context_tokens=self.config.context_tokens,
            numbers=self._numbers,
            arrived_ms=self._clock.now_ms,
        )
        if generation.id in self._live:
            return Nack(reason="duplicate")
        sequences = generation.sequences
        if sequences:
            nack = refuse(self.config, sequences, self._waiting_tokens)
            if nack is not None:
                return nack
        self._salts.update((sequence.number, request.tenant_salt) for sequence in sequences)
        self._watch.accepted(request, self._name)
        live = self._live[generation.id] = _Live(generation, emit)
        self._inbox.append(live)
        self._wake()
        return None

    def abort(self, key: Key) -> bool:
        """End an attempt at the next step's start. False when there is none of that name."""
        name = attempt_id(*key)
        if name not in self._live:
            return False
        self._aborts.append(name)
        self._wake()
        return True

    def halt(self) -> None:
        """The process died: no step of it ends any more."""
        self._is_halted = True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is accepted that has not ended."""
        return not self._live

    @property
    def free_blocks(self) -> int:
        """Free or cached, less what waits."""
        scheduler = self.scheduler
        arrived = (s.num_tokens for live in self._inbox for s in live.generation.sequences)
        waiting = scheduler.waiting_blocks + sum(map(self.config.blocks_for, arrived))
        return max(0, scheduler.pool.num_available - waiting)

    @property
    def _waiting_tokens(self) -> int:
        arrived = (live.generation.sequences for live in self._inbox)
        inbox = sum(prefill_tokens(sequences) for sequences in arrived if sequences)
        return self.scheduler.waiting_tokens + inbox

    def _salt_of(self, sequence: int) -> bytes:
        return self._salts[sequence]

    def _wake(self) -> None:
        self.touched = True
        if not self._is_stepping:
            self._is_stepping = True
            self._clock.after(0, f"{self._name} step", self._turn)

    def _turn(self) -> None:
        if self._is_halted:
            return
        self.touched = True
        self._collect()
        for name in sorted(self.scheduler.expired(self._clock.now_ms)):
            self._finish(self._live[name], "expired")
        plan = self.scheduler.schedule(self._clock.now_ms)
        if plan is None:
            self._is_stepping = False
            return
        for name in self.scheduler.requests_in(plan):
            live = self._live[name]
            self._watch.planned(live.key, live.generation.request.deadline_ms)
            if not live.generation.started:
                live.emit(live.generation.start(self._boot_id, self._clock.now_ms))
                self._watch.started(live.key, live.generation.usage.cached_tokens)
        step_ms = self._step_ms(plan)
        self.scheduler.observed(plan, step_ms)
        self._clock.after(
            step_ms, f"{self._name} stepped {plan.num_tokens}", lambda: self._end(plan)
        )

    def _collect(self) -> None:
        arrived, self._inbox = self._inbox, []
        for live in arrived:
            if live.generation.sequences:
                self.scheduler.add(live.generation.sequences)
            else:
                live.emit(live.generation.start(self._boot_id, self._clock.now_ms))
                self._finish(live, "complete")
        aborts, self._aborts = self._aborts, []
        for name in aborts:
            if name in self._live:
                self._finish(self._live[name], "aborted")

    def _step_ms(self, plan: StepPlan) -> int:
        times = self._times
        jitter_ms = self._dice.randint(0, times.jitter_ms)
        return times.base_ms + jitter_ms + plan.num_tokens // times.tokens_per_ms

    def _end(self, plan: StepPlan) -> None:
        if self._is_halted:
            return
        self.touched = True
        self.steps += 1
        if self._dice.random() < self.failure_chance:
            self.scheduler.failed(plan)
            for name in self.scheduler.requests_in(plan):
                live = self._live[name]
                self._close(live, live.generation.failed("internal", "a step failed"))
        else:
            self._tell(self.scheduler.complete(plan, self._runner.execute(plan)))
        self._turn()

    def _tell(self, drawn: list[tuple[Sequence, Sampled]]) -> None:
        now_ms = self._clock.now_ms
        outbox: dict[str, list[Event]] = {}
        for sequence, sampled in drawn:
            live = self._live[sequence.request]
            self._watch.produced(live.key, sequence.choice, sampled.token_id)
            tokens = live.generation.accept(sequence, sampled, now_ms)
            outbox.setdefault(sequence.request, []).append(tokens)
            if tokens.finish:
                self.scheduler.finish(sequence)
        for name, events in outbox.items():
            live = self._live[name]
            if live.generation.complete:
                self._close(live, live.generation.finished("complete", now_ms), events)
            else:
                live.emit(events)

    def _finish(self, live: _Live, cause: FinishCause) -> None:
        self._close(live, live.generation.finished(cause, self._clock.now_ms))

    def _close(self, live: _Live, last: Finished | Failed, before: Many[Event] = ()) -> None:
        del self._live[live.generation.id]
        self.scheduler.end(live.generation.id)
        live.emit([*before, last])
