"""A soak of one engine over a real model: random traffic at KV pressure, and a look at each rest.

The KV pool is far too small for what is asked at once, host memory is on, a third of all is
aborted, in whatever state it is. At each rest nothing may be left: no block, no attempt, no
object of one, no thread, no file, and no memory beyond a bound.
"""

import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from core.protocol import Failed, Finished, Generate, Started, Tokens
from tests.support.engine_traffic import Traffic
from worker.engine import Engine
from worker.metrics import Metrics
from worker.settings import WorkerSettings
from worker.startup import load_model
from worker.watchdog import NoGuard, Watchdog

ABORTS = 0.3
LIVE_MAX = 24
REST_S = 180.0
# Of resident memory between the rest after the first phase and the last one: the allocator's.
GROWTH_BYTES_MAX = 96 * 1024 * 1024
# Objects of attempts; at a rest there is none.
OF_ATTEMPTS = ("Live", "Generation", "Answer", "Sequence", "Outlet", "Detokenizer", "LLMatcher")


class Attempt:
    """One attempt: what it was told, and when it is to be aborted.

    That is, in a state: at once, when its prefill has begun, after some tokens; or never.
    """

    def __init__(self, kind: str, request: Generate, abort_in: str, abort_after: int) -> None:
        self.kind = kind
        self.request = request
        self.key = (request.request_id, request.attempt)
        self._abort_in = abort_in
        self._abort_after = abort_after  # tokens
        self.state = "waiting"
        self.faults: list[str] = []
        self.last: Finished | Failed | None = None
        self._produced = 0

    @property
    def abort_is_due(self) -> bool:
        """Said once."""
        due = self.state == self._abort_in and self._produced >= self._abort_after
        if due:
            self._abort_in = "never"
        return due

    def emit(self, events) -> None:
        """On the engine's thread."""
        for event in events:
            if self.last is not None:
                self.faults.append(f"{type(event).__name__} after the last word")
            match event:
                case Started():
                    if self.state != "waiting":
                        self.faults.append("started twice")
                    self.state = "prefill"
                case Tokens():
                    self.state = "decode"
                    self._produced += len(event.ids)
                case Finished() | Failed():
                    self.last = event
                    if event.usage.output_tokens != self._produced:
                        self.faults.append(f"{event.usage} for {self._produced} tokens")


class Errors(logging.Handler):
    """What the worker logged as an error: there is to be none, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.getMessage()} {record.exc_info}")


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """What was there when nothing ran."""

    at_s: float
    resident_bytes: int
    threads: int
    files: int
    attempts: int
    objects: int


class Soak:
    """`tell` hears a line at each rest. Raises AssertionError for whatever should not be."""

    def __init__(self, settings: WorkerSettings, seed: int, tell: Callable[[str], None]) -> None:
        model = load_model(settings)
        self.metrics = Metrics()
        self.engine: Engine = model.open("boot_soak", self.metrics)
        config = self.engine.config
        self._traffic = Traffic(
            seed,
            version=config.version,
            vocab_size=self.engine._text.vocab_size,
            pool_tokens=config.kv_blocks * config.block_tokens,
        )
        self._tell = tell
        self._stuck = threading.Event()
        self._watchdog = Watchdog(self.engine, on_stuck=self._stuck.set, guard=NoGuard())
        self._errors = Errors()
        self._live: list[Attempt] = []
        self._next: Attempt | None = None
        self.started_s = time.monotonic()
        self.kinds: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.rests: list[Rest] = []
        self.cached_tokens = self.prompt_tokens = 0

    def run(self, seconds: float, phases: int) -> None:
        """Traffic for so long, with a rest after each of the phases."""
        logging.getLogger("worker").addHandler(self._errors)
        self.engine.start()
        self._watchdog.start()
        try:
            for _ in range(phases):
                self._phase(seconds / phases)
                self._rest()
            self._judge_growth()
        finally:
            logging.getLogger("worker").removeHandler(self._errors)
            self._watchdog.stop()
            self.engine.stop(30)

    def report(self) -> str:
        """What happened, in lines."""
        load = self.engine.load()
        first, last = self.rests[0], self.rests[-1]
        growth = (last.resident_bytes - first.resident_bytes) / (1 << 20)
        lines = (
            f"{sum(self.kinds.values())} requests in {last.at_s:.0f} s: {_told(self.kinds)}",
            f"ended: {_told(self.ends)}; refused: {_told(self.refused)}",
            f"asked to abort while: {_told(self.aborted)}",
            f"{load.steps} steps, {load.computed_tokens} tokens fed, {load.output_tokens} drawn",
            f"{load.preemptions} preemptions, {load.swaps} of them to host memory",
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens were cached",
            f"{last.resident_bytes >> 20} MiB resident, {growth:+.0f} since the first rest",
            f"(bound {GROWTH_BYTES_MAX >> 20}); {last.threads} threads, {last.files} files",
            f"at {len(self.rests)} rests: nothing left, no request stuck, one last word each",
        )
        return "\n".join(lines)

    def _phase(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert not self._stuck.is_set(), "a step is stuck"
            self._live = [attempt for attempt in self._live if not self._is_over(attempt)]
            self._abort_due()
            if len(self._live) < LIVE_MAX:
                self._submit()
            time.sleep(0.01 if self._next or len(self._live) >= LIVE_MAX else 0.001)

    def _submit(self) -> None:
        """A new attempt, or the one that found the waiting list full."""
        attempt = self._next or self._drawn()
        nack = self.engine.submit(attempt.request, attempt.emit)
        self._next = attempt if nack is not None and nack.reason == "full" else None
        if nack is None:
            self._live.append(attempt)
        elif self._next is None:
            self.refused[nack.reason] += 1

    def _drawn(self) -> Attempt:
        kind, request = self._traffic.request()
        self.kinds[kind] += 1
        dice = self._traffic.dice
        state = dice.choice(("waiting", "prefill", "decode")) if dice.random() < ABORTS else "never"
        after = dice.randint(1, 20) if state == "decode" else 0
        return Attempt(kind, request, state, after)

    def _abort_due(self) -> None:
        for attempt in self._live:
            state = attempt.state
            if attempt.abort_is_due and self.engine.abort(*attempt.key):
                self.aborted[state] += 1

    def _is_over(self, attempt: Attempt) -> bool:
        assert not attempt.faults, (attempt.kind, attempt.key, attempt.faults)
        last = attempt.last
        if last is None:
            return False
        self.ends[last.cause if isinstance(last, Finished) else last.code] += 1
        if isinstance(last, Failed):
            assert last.code == "bad_request" or attempt.kind == "odd", (attempt.kind, last)
        self.cached_tokens += last.usage.cached_tokens
        self.prompt_tokens += last.usage.prompt_tokens
        return True

    def _rest(self) -> None:
        deadline = time.monotonic() + REST_S
        while self._live:
            assert time.monotonic() < deadline, [(a.kind, a.key, a.state) for a in self._live]
            assert not self._stuck.is_set(), "a step is stuck"
            self._live = [attempt for attempt in self._live if not self._is_over(attempt)]
            self._abort_due()
            time.sleep(0.01)
        time.sleep(0.5)  # long enough for the engine to look at itself
        self._judge_rest()
        load = self.engine.load()
        rest = self.rests[-1]
        self._tell(
            f"{rest.at_s:6.0f} s: {sum(self.kinds.values())} requests, {load.steps} steps,"
            f" {load.preemptions} preemptions, {rest.resident_bytes >> 20} MiB"
        )

    def _judge_rest(self) -> None:
        engine, load = self.engine, self.engine.load()
        pool = engine._stepper.scheduler.pool
        assert self._errors.messages == []
        assert load.integrity
        assert load.healthy
        assert (load.running, load.waiting) == (0, 0)
        assert load.kv_blocks_in_use == load.host_blocks_in_use == 0
        assert load.kv_blocks_free == load.kv_blocks_total
        assert pool.num_available == pool.num_blocks, "free + cached == all"
        assert engine._stepper.scheduler.problems() == []
        left = (engine._accepted, engine._stepper._live, engine._inbox, engine._faults)
        assert not any(left), left
        scheduler = engine._stepper.scheduler
        assert not scheduler._requests
        assert not scheduler._numbered
        gc.collect()
        objects = Counter(type(each).__name__ for each in gc.get_objects())
        self.rests.append(
            Rest(
                at_s=time.monotonic() - self.started_s,
                resident_bytes=_resident_bytes(),
                threads=threading.active_count(),
                files=sum(1 for _ in Path("/proc/self/fd").iterdir()),
                attempts=sum(objects[name] for name in OF_ATTEMPTS),
                objects=sum(objects.values()),
            )
        )

    def _judge_growth(self) -> None:
        first, last = self.rests[0], self.rests[-1]
        assert last.attempts <= first.attempts, "objects of attempts are left"
        assert last.threads <= first.threads
        assert last.files <= first.files
        assert last.resident_bytes - first.resident_bytes < GROWTH_BYTES_MAX


def soak_settings(root: Path, version: str) -> WorkerSettings:
    """A small pool, host memory, and more asked at once than either holds."""
    return WorkerSettings(
        internal_secret="x" * 16,
        replica_id="soak",
        models_dir=root,
        model_version=version,
        journal_dir=root,
        control_plane_url="http://127.0.0.1:9",
        kv_blocks=64,
        host_memory_mb=12,
        max_sequences=16,
        max_batched_tokens=256,
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items())) or "none"
