"""One thread's worth of engine: generations, their scheduler and the runner, step by step.

No threads and no locks here; `engine` calls from its thread alone. A runner that fails costs
the attempts of that step. Invariant: each attempt taken gets exactly one last event.
"""

import logging
import time
from collections import abc

from core.protocol import Failed, FinishCause, Finished
from worker.admission import SchedulerConfig
from worker.events import Emit, EngineLoad, Event
from worker.generation import Generation
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.step import Runner, Sampled, StepPlan, StepResult

SinkError = abc.Callable[[str, Exception], None]

_log = logging.getLogger(__name__)


def monotonic_ms() -> float:
    """Milliseconds on the clock that all timings use."""
    return time.monotonic() * 1000


class EngineConfig(SchedulerConfig, frozen=True, kw_only=True):
    """The scheduler's bounds, and who this engine is."""

    version: str  # model version hash: any other is refused
    boot_id: str
    failures_max: int = 3  # failed steps in a row that make the engine unhealthy


class RunnerError(Exception):
    """The runner's answer does not fit its plan."""


class Live:
    """An accepted attempt, and where its events go."""

    __slots__ = ("emit", "generation")

    def __init__(self, generation: Generation, emit: Emit) -> None:
        self.generation = generation
        self.emit = emit


class Stepper:
    """Alternates `plan` and `execute`; `take` and `abort` come between.

    `on_end` hears each attempt's id before its last event leaves. `sink_error` hears of an
    `emit` that raised; that attempt is aborted.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        vocab_size: int,
        config: EngineConfig,
        on_end: abc.Callable[[str], None],
        sink_error: SinkError,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.integrity = True
        self._runner = runner
        self._vocab_size = vocab_size
        self._config = config
        self._on_end = on_end
        self._sink_error = sink_error
        self._live: dict[str, Live] = {}
        self._came_finished: list[Live] = []
        self._steps = 0
        self._computed_tokens = 0
        self._output_tokens = 0
        self._preemptions = 0
        self._swaps = 0
        self._failed_steps = 0
        self._failures_in_a_row = 0

    @property
    def has_work(self) -> bool:
        """Whether `plan` would do anything."""
        return self.scheduler.has_work or bool(self._came_finished)

    def take(self, live: Live) -> None:
        """Queue an accepted attempt. Emits nothing yet."""
        self._live[live.generation.id] = live
        sequences = live.generation.sequences
        if sequences:
            self.scheduler.add(sequences)
        else:
            self._came_finished.append(live)

    def abort(self, name: str) -> None:
        """End an attempt as aborted, if it has not ended by itself."""
        live = self._live.get(name)
        if live is not None:
            self._finish(live, "aborted")

    def plan(self, wall_ms: int) -> StepPlan | None:
        """End what is over, decide the next step, and tell whom it starts.

        `wall_ms` is Unix milliseconds, for deadlines. None when there is nothing to compute.
        """
        came_finished, self._came_finished = self._came_finished, []
        for live in came_finished:
            if live.generation.id in self._live:
                self._announce(live)
                self._finish(live, "complete")
        for name in self.scheduler.expired(wall_ms):
            self._finish(self._live[name], "expired")
        waited = bool(self.scheduler.waiting)
        plan = self.scheduler.schedule(wall_ms)
        if waited or self.scheduler.waiting:
            self._time_phases()
        if plan is not None:
            for name in self.scheduler.requests_in(plan):
                if not self._live[name].generation.started:
                    self._announce(self._live[name])
        return plan

    def execute(self, plan: StepPlan) -> None:
        """Run the step and tell what it produced."""
        self._steps += 1
        started_ms = monotonic_ms()
        try:
            result = self._runner.execute(plan)
            self._check(plan, result)
        except Exception as error:  # noqa: BLE001 -- whatever a model or a device can raise
            _log.exception("a step failed", extra={"facts": {"rows": len(plan.rows)}})
            self._failed_steps += 1
            self._failures_in_a_row += 1
            self.scheduler.failed(plan)
            for name in self.scheduler.requests_in(plan):
                self._fail(self._live[name], "internal", f"step failed: {type(error).__name__}")
            return
        self._judge(result)
        self.scheduler.observed(plan, monotonic_ms() - started_ms)
        self._computed_tokens += plan.num_tokens
        self._output_tokens += sum(not sampled.fault for sampled in result.sampled)
        outbox = self._tell_prompts(plan, result)
        self._tell(self.scheduler.complete(plan, result), outbox)

    def deliver(self, name: str, emit: Emit, events: abc.Sequence[Event]) -> bool:
        """Call `emit`; False when it raised."""
        try:
            emit(events)
        except Exception as error:  # noqa: BLE001 -- told to the owner of `emit`
            self._sink_error(name, error)
            return False
        return True

    def check(self) -> None:
        """Look for leaked blocks and wrong counts. O(blocks): for when there is time."""
        problems = self.scheduler.problems()
        if problems:
            self.integrity = False
            _log.error("KV bookkeeping is wrong", extra={"facts": {"problems": problems[:20]}})

    def reset(self, error: Exception) -> None:
        """Our own bookkeeping raised: trust none of it, fail everyone, start with an empty pool."""
        _log.error("the engine starts over", exc_info=error)
        self.integrity = False
        self._failures_in_a_row += 1
        self._preemptions += self.scheduler.num_preemptions
        self._swaps += self.scheduler.num_swaps
        self.scheduler = Scheduler(self._config)
        self._came_finished = []
        self.fail_all("internal", f"the engine started over: {type(error).__name__}")

    def fail_all(self, code: str, message: str) -> None:
        """The last word to everyone."""
        for live in list(self._live.values()):
            self._fail(live, code, message)

    def measure(self) -> EngineLoad:
        """The numbers as they are now."""
        pool = self.scheduler.pool
        return EngineLoad(
            kv_blocks_total=pool.num_blocks,
            kv_blocks_free=max(0, pool.num_available - self.scheduler.waiting_blocks),
            kv_blocks_in_use=pool.num_in_use,
            kv_blocks_cached=pool.num_cached,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            output_tokens=self._output_tokens,
            preemptions=self._preemptions + self.scheduler.num_preemptions,
            swaps=self._swaps + self.scheduler.num_swaps,
            host_blocks_total=pool.host.num_blocks,
            host_blocks_in_use=pool.host.num_blocks - pool.host.num_available,
            host_blocks_cached=pool.host.num_cached,
            failed_steps=self._failed_steps,
            integrity=self.integrity,
            healthy=self._failures_in_a_row < self._config.failures_max,
            draining=False,
        )

    def _check(self, plan: StepPlan, result: StepResult) -> None:
        drawn = sum(row.draw is not None for row in plan.rows)
        if len(result.sampled) != drawn:
            raise RunnerError(f"{len(result.sampled)} tokens for {drawn} draws")
        good = [sampled.token_id for sampled in result.sampled if not sampled.fault]
        if any(not 0 <= token_id < self._vocab_size for token_id in good):
            raise RunnerError("a token is outside the vocabulary")
        wanted = [len(row.targets) for row in plan.rows if row.targets]
        if [len(told) for told in result.targets] != wanted:
            raise RunnerError("not the logprobs that were asked for")

    def _judge(self, result: StepResult) -> None:
        """A step that drew nothing but what is no number is as bad as one that raised."""
        if result.sampled:
            ours = (bool(each.fault) and not each.unanswerable for each in result.sampled)
            self._failures_in_a_row = self._failures_in_a_row + 1 if all(ours) else 0

    def _time_phases(self) -> None:
        # Only where a sequence waits, or did: otherwise nobody was preempted or admitted.
        now_ms = monotonic_ms()
        for live in self._live.values():
            if live.generation.started:
                live.generation.scheduled(now_ms)

    def _announce(self, live: Live) -> None:
        self._send(live, live.generation.start(self._config.boot_id, monotonic_ms()))

    def _tell_prompts(self, plan: StepPlan, result: StepResult) -> dict[Live, list[Event]]:
        outbox: dict[Live, list[Event]] = {}
        for sequence, start, logprobs in self.scheduler.prompted(plan, result):
            live = self._live[sequence.request]
            outbox.setdefault(live, []).extend(live.generation.prompted(start, logprobs))
        return outbox

    def _tell(self, drawn: list[tuple[Sequence, Sampled]], outbox: dict[Live, list[Event]]) -> None:
        now_ms = monotonic_ms()
        for sequence, sampled in drawn:
            live = self._live.get(sequence.request)
            if live is None:
                continue
            if sampled.fault:
                self._end(live, live.generation.undrawn(sampled), outbox.pop(live, []))
                continue
            try:
                tokens = live.generation.accept(sequence, sampled, now_ms)
            except Exception as error:  # noqa: BLE001 -- one answer's text must not end all
                _log.exception("a token has no text")
                failed = live.generation.failed("internal", f"no text: {type(error).__name__}")
                self._end(live, failed, outbox.pop(live, []))
                continue
            outbox.setdefault(live, []).append(tokens)
            if tokens.finish:
                self.scheduler.finish(sequence)
        for live, events in outbox.items():
            if live.generation.complete:
                self._end(live, live.generation.finished("complete", now_ms), events)
            else:
                self._send(live, events)

    def _finish(self, live: Live, cause: FinishCause) -> None:
        self._end(live, live.generation.finished(cause, monotonic_ms()))

    def _fail(self, live: Live, code: str, message: str) -> None:
        self._end(live, live.generation.failed(code, message))

    def _end(self, live: Live, last: Finished | Failed, before: abc.Sequence[Event] = ()) -> None:
        name = live.generation.id
        del self._live[name]
        self.scheduler.end(name)
        self._on_end(name)
        self._send(live, [*before, last])

    def _send(self, live: Live, events: abc.Sequence[Event]) -> None:
        if not self.deliver(live.generation.id, live.emit, events):
            self.abort(live.generation.id)
