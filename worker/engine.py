"""The engine as other threads see it: a door, and the thread that steps behind it.

Callers touch the inbox and snapshots, under one lock that is never held while a step runs;
everything else belongs to the thread. Invariant: what `submit` accepts gets exactly one last
event, whatever happens to the thread but its process dying.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from itertools import count

import msgspec

from core.protocol import Failed, Generate, Grammar, Nack, Usage
from text.grammar import Compiled, GrammarError
from worker.admission import prefill_tokens, refuse
from worker.detokenize import TokenText
from worker.events import Emit, EngineLoad
from worker.faults import BadRequestError
from worker.generation import attempt_id, open_generation
from worker.outlet import Outlet
from worker.patience import Patience, Turn
from worker.step import Runner, StepPlan
from worker.stepper import EngineConfig, Live, SinkError, Stepper, monotonic_ms

__all__ = ["Engine", "EngineConfig"]

OnStep = Callable[[int, int, float], None]

STEP_TIMEOUT_S = 60.0
# How long the engine is idle before it spends time on checking itself.
QUIET_S = 0.2
# Most accepted requests that the thread has not looked at yet. Those with a prefill are bounded
# far lower, by its tokens; this is for those without one.
INBOX_MAX = 1024

# For an `emit` under way to return, before its attempt is given up without a word.
CUT_S = 0.5

_log = logging.getLogger(__name__)


def _log_sink_error(name: str, error: Exception) -> None:
    _log.error("an emit raised", exc_info=error, extra={"facts": {"attempt": name}})


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Engine:
    """Continuous batching over one runner.

    `sink_error` hears of an `emit` that raised, with the attempt's id; that attempt is
    aborted. `wall_ms` is Unix milliseconds, for deadlines. `compile_grammar` raises
    GrammarError, and may take half a second; without it grammars are the runner's business.
    `step_timeout_s` is what any step may take; `on_step` hears of each one's rows, tokens and
    seconds, on the engine's thread.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        text: TokenText,
        config: EngineConfig,
        sink_error: SinkError = _log_sink_error,
        wall_ms: Callable[[], int] = _wall_ms,
        compile_grammar: Callable[[Grammar], Compiled] | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
        on_step: OnStep = lambda _rows, _tokens, _seconds: None,
    ) -> None:
        self.turn: Turn | None = None
        self.patience = Patience(step_timeout_s)
        self._on_step = on_step
        self._text = text
        self._compile_grammar = compile_grammar
        self.config = config
        self._wall_ms = wall_ms
        self._sink_error = sink_error
        self._numbers = count(1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stepper = Stepper(
            runner=runner,
            vocab_size=text.vocab_size,
            config=config,
            on_end=self._forget,
            sink_error=sink_error,
        )
        # Guarded by the lock.
        self._wake = threading.Condition()
        self._accepted: dict[str, Live] = {}
        self._inbox: list[Live] = []
        self._faults: list[tuple[str, Emit, Failed]] = []
        self._aborts: list[str] = []
        self._waiting_tokens = 0  # in the scheduler's waiting list and in the inbox
        self._snapshot = self._stepper.measure()
        self._draining = False
        self._stopping = False
        self._given_up = False

    @property
    def thread_id(self) -> int | None:
        """Of the thread that steps."""
        return self._thread.ident

    @property
    def is_stepping(self) -> bool:
        """Whether that thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def drain(self) -> None:
        """Refuse new work; what was accepted goes on."""
        with self._wake:
            self._draining = True

    def stop(self, timeout_s: float) -> None:
        """End after the step in progress; whatever is left fails as `shutting_down`.

        A step that outlasts `timeout_s` is left behind: its thread ends with the process, and
        its attempts are told without it.
        """
        with self._wake:
            self._draining = self._stopping = True
            self._wake.notify_all()
        if self._thread.ident is None:
            self._shut_down()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.error("a step outlasted the stop", extra={"facts": {"timeout_s": timeout_s}})
            self.give_up("shutting_down", "the worker is stopping")

    def give_up(self, code: str, message: str) -> None:
        """From another thread, when the engine's does not come back: fail everyone, retryable.

        Should it come back after all, it finds that nobody listens, and ends.
        """
        with self._wake:
            self._draining = self._stopping = self._given_up = True
            lives = list(self._accepted.values())
            faults, self._faults = self._faults, []
            self._wake.notify_all()
        for live in lives:
            self._cut(live.generation.id, live.emit, live.generation.failed(code, message))
        for name, emit, failed in faults:
            self._cut(name, emit, failed)

    def _cut(self, name: str, emit: Emit, last: Failed) -> None:
        assert isinstance(emit, Outlet)
        try:
            told = emit.cut(last, CUT_S)
        except Exception as error:  # noqa: BLE001 -- told to the owner of `emit`
            self._sink_error(name, error)
            return
        if not told:
            _log.error("an attempt gets no last word", extra={"facts": {"attempt": name}})

    def prepare(self, request: Generate) -> None:
        """What takes long about accepting it. In any thread but the engine's; never raises."""
        # Whatever is wrong, `submit` meets it again, and tells.
        with contextlib.suppress(Exception):
            compiled = self._compiled(request) if request.version == self.config.version else None
            if compiled is not None:
                for choice in request.choices:
                    compiled.follows(choice.output_ids)  # so that it is quick the second time

    def submit(self, request: Generate, emit: Emit) -> Nack | None:
        """Accept a request, or say why not. Its events come on the engine's thread.

        `emit` must not block. Refused in this order: wrong_version, draining, duplicate,
        fits_never, full. A request that is wrong in itself is accepted and told `Failed`.
        """
        if request.version != self.config.version:
            return Nack(reason="wrong_version")
        try:
            generation = open_generation(
                request,
                self._text,
                context_tokens=self.config.context_tokens,
                numbers=self._numbers,
                arrived_ms=monotonic_ms(),
                grammar=self._compiled(request),
            )
        except BadRequestError as error:
            failed = Failed(code="bad_request", message=str(error), retryable=False)
            return self._accept_fault(request, emit, failed)
        except Exception as error:  # noqa: BLE001 -- an accepted peer is answered in frames
            _log.exception("a request could not be opened")
            failed = Failed(code="internal", message=type(error).__name__, retryable=True)
            return self._accept_fault(request, emit, failed)
        return self._accept(Live(generation, Outlet(emit)))

    def abort(self, request_id: str, attempt: int) -> bool:
        """End an attempt within two steps. False when there is none of that name."""
        name = attempt_id(request_id, attempt)
        with self._wake:
            if name not in self._accepted:
                return False
            self._aborts.append(name)
            self._wake.notify_all()
        return True

    def load(self) -> EngineLoad:
        """As of the step in progress, and with everything accepted since it began."""
        with self._wake:
            arrived = [sequence for live in self._inbox for sequence in live.generation.sequences]
            blocks = sum(self.config.blocks_for(sequence.num_tokens) for sequence in arrived)
            return msgspec.structs.replace(
                self._snapshot,
                waiting=self._snapshot.waiting + len(arrived),
                kv_blocks_free=max(0, self._snapshot.kv_blocks_free - blocks),
                draining=self._draining,
                healthy=self._snapshot.healthy and not self._given_up,
            )

    def progress(self) -> list[tuple[str, int, Usage]]:
        """Request id, attempt and totals so far of every attempt that has started."""
        with self._wake:
            accepted = [live.generation for live in self._accepted.values()]
        return [
            (generation.request.request_id, generation.request.attempt, generation.usage)
            for generation in accepted
            if generation.started
        ]

    def _compiled(self, request: Generate) -> Compiled | None:
        """Its grammar. Raises BadRequestError."""
        grammar = request.sampling.grammar
        if grammar is None or self._compile_grammar is None:
            return None
        try:
            return self._compile_grammar(grammar)
        except GrammarError as error:
            raise BadRequestError(f"the grammar {error}") from error

    def _accept_fault(self, request: Generate, emit: Emit, failed: Failed) -> Nack | None:
        name = attempt_id(request.request_id, request.attempt)
        with self._wake:
            nack = self._refusal(name)
            if nack is None:
                self._faults.append((name, Outlet(emit), failed))
                self._wake.notify_all()
        return nack

    def _accept(self, live: Live) -> Nack | None:
        sequences = live.generation.sequences
        with self._wake:
            nack = self._refusal(live.generation.id)
            if nack is None and sequences:
                nack = refuse(self.config, sequences, self._waiting_tokens)
                self._waiting_tokens += 0 if nack else prefill_tokens(sequences)
            if nack is None:
                self._accepted[live.generation.id] = live
                self._inbox.append(live)
                self._wake.notify_all()
        return nack

    def _refusal(self, name: str) -> Nack | None:
        if self._draining:
            return Nack(reason="draining")
        if name in self._accepted:
            return Nack(reason="duplicate")
        if len(self._inbox) + len(self._faults) >= INBOX_MAX:
            return Nack(reason="full")
        return None

    def _run(self) -> None:
        while self._await_work():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 -- logged by reset; the thread must live
                self._stepper.reset(error)
                self._publish()
        self._shut_down()

    def _await_work(self) -> bool:
        """Sleep until there is something to do; False when that is to stop."""
        if not self._sleep(QUIET_S):
            self._stepper.check()
            self._publish()
            self._sleep(None)
        return not self._stopping

    def _sleep(self, timeout_s: float | None) -> bool:
        with self._wake:
            return self._wake.wait_for(self._is_due, timeout_s)

    def _is_due(self) -> bool:
        due = self._stopping or self._inbox or self._faults or self._aborts
        return bool(due) or self._stepper.has_work

    def _turn(self) -> None:
        self.turn = Turn()
        try:
            self._collect()
            plan = self._stepper.plan(self._wall_ms())
            self._publish()
            if plan is not None:
                self._step(plan)
                self._publish()
        finally:
            self.turn = None

    def _step(self, plan: StepPlan) -> None:
        tokens = plan.num_tokens
        self.turn = Turn(tokens=tokens)
        started = time.monotonic()
        self._stepper.execute(plan)
        seconds = time.monotonic() - started
        self.patience.observe(tokens, seconds)
        self._on_step(len(plan.rows), tokens, seconds)

    def _collect(self) -> None:
        """Take what arrived and what was aborted since the last turn."""
        with self._wake:
            arrived, self._inbox = self._inbox, []
            faults, self._faults = self._faults, []
            aborts, self._aborts = self._aborts, []
            for live in arrived:
                self._stepper.take(live)
            self._publish()
        for name, emit, failed in faults:
            self._stepper.deliver(name, emit, [failed])
        for name in aborts:
            self._stepper.abort(name)

    def _publish(self) -> None:
        """Let `load` and `submit` see the numbers as they are now."""
        with self._wake:
            self._snapshot = self._stepper.measure()
            arrived = (live.generation.sequences for live in self._inbox)
            self._waiting_tokens = self._stepper.scheduler.waiting_tokens + sum(
                prefill_tokens(sequences) for sequences in arrived if sequences
            )

    def _forget(self, name: str) -> None:
        with self._wake:
            del self._accepted[name]

    def _shut_down(self) -> None:
        self._collect()
        self._stepper.fail_all("shutting_down", "the worker is stopping")
        self._publish()
