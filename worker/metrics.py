"""The worker's Prometheus metrics, under `headworks_worker_`. docs/operations.md lists them.

What happens is counted when it happens; what is, is read from the engine when someone asks.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.protocol import Failed, Finished, Timings, Usage
from worker.events import EngineLoad

NAME = "headworks_worker_"

_STEP_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_WAIT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Metrics:
    """One registry for each process: nothing global, so tests may make many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.attempts = self._counter("attempts", "Attempts by how they ended", "end")
        self.refused = self._counter("refused", "Attempts refused before prefill", "reason")
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, all looked up in the prefix cache"
        )
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found there")
        self.output_tokens = self._counter("output_tokens", "Output tokens produced")
        self.journal_refused = self._counter(
            "journal_refused", "Journal entries that the control plane would not take"
        )
        self.stuck = self._counter("stuck", "Engines given up by the watchdog")
        self.changes = self._counter("changes", "Sleeps, wakes, changes of version", "to")
        self.journal_unacked = Gauge(
            NAME + "journal_unacked",
            "Attempts whose newest totals are not in Postgres",
            registry=self.registry,
        )
        self.step_seconds = self._histogram("step_seconds", "One step", _STEP_S, "phase")
        self.step_tokens = self._histogram("step_tokens", "Tokens fed in one step", _TOKENS)
        self.first_token_seconds = self._histogram(
            "first_token_seconds", "Arrival to an attempt's first token", _WAIT_S
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds", "Between two tokens of one choice", _STEP_S
        )
        self.grammar_seconds = self._histogram(
            "grammar_seconds", "Compiling a grammar", _STEP_S, "result"
        )
        self.phase_seconds = self._histogram(
            "phase_seconds", "What an attempt spent in each phase", _WAIT_S, "phase"
        )

    def step(self, rows: int, tokens: int, seconds: float) -> None:
        """A step was made. Phase `prefill` is one with a prefill in it."""
        self.step_seconds.labels("decode" if tokens == rows else "prefill").observe(seconds)
        self.step_tokens.observe(tokens)

    def grammar(self, seconds: float, ok: bool) -> None:  # noqa: FBT001 - the hook's second word
        """A grammar was compiled, or could not be."""
        self.grammar_seconds.labels("compiled" if ok else "refused").observe(seconds)

    def ended(self, last: Finished | Failed) -> None:
        """An attempt had its last word."""
        end = last.cause if isinstance(last, Finished) else "failed"
        self._used(end, last.usage)
        if isinstance(last, Finished):
            self._timed(last.timings)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _used(self, end: str, usage: Usage) -> None:
        self.attempts.labels(end).inc()
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.output_tokens.inc(usage.output_tokens)

    def _timed(self, timings: Timings) -> None:
        self.phase_seconds.labels("queue").observe(timings.queue_ms / 1000)
        self.phase_seconds.labels("prefill").observe(timings.prefill_ms / 1000)
        self.phase_seconds.labels("decode").observe(timings.decode_ms / 1000)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(NAME + name, told, labels, registry=self.registry)

    def _histogram(
        self, name: str, told: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(NAME + name, told, labels, buckets=buckets, registry=self.registry)


class EngineNow(Collector):
    """The engine's own numbers, as of the scrape. Sums are over all engines of this process."""

    def __init__(self, load: Callable[[], EngineLoad | None], state: Callable[[], str]) -> None:
        self._load = load
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield _gauge("state", "1 for where it is in its life", "state", {self._state(): 1})
        now = self._load()
        if now is None:
            return
        yield _gauge(
            "kv_blocks",
            "KV blocks; the three are all there are",
            "state",
            {
                "free": now.kv_blocks_total - now.kv_blocks_in_use - now.kv_blocks_cached,
                "cached": now.kv_blocks_cached,
                "in_use": now.kv_blocks_in_use,
            },
        )
        yield _gauge(
            "host_kv_blocks",
            "KV blocks in host memory",
            "state",
            {
                "free": now.host_blocks_total - now.host_blocks_in_use - now.host_blocks_cached,
                "cached": now.host_blocks_cached,
                "in_use": now.host_blocks_in_use,
            },
        )
        yield _gauge(
            "sequences",
            "Sequences in the engine",
            "state",
            {"running": now.running, "waiting": now.waiting},
        )
        yield _gauge(
            "sound",
            "1 while all is well",
            "what",
            {"integrity": int(now.integrity), "steps": int(now.healthy)},
        )
        preempted = {"swap": now.swaps, "recompute": now.preemptions - now.swaps}
        yield _sums("preemptions", "By what becomes of the KV", "kind", preempted)
        yield _sum("steps", "Steps made, failed ones included", now.steps)
        yield _sum("failed_steps", "Steps that failed", now.failed_steps)
        yield _sum("computed_tokens", "Tokens fed, prefill and decode", now.computed_tokens)


def summed(past: EngineLoad | None, now: EngineLoad | None) -> EngineLoad | None:
    """`now`, with the sums of engines before it; with none now, only those."""
    if past is None or now is None:
        return now or past
    sums = {name: getattr(past, name) + getattr(now, name) for name in SUMS}
    return EngineLoad(**{name: getattr(now, name) for name in now.__struct_fields__} | sums)


# What goes with an engine.
PARTS = tuple(name for name in EngineLoad.__struct_fields__ if "_blocks_" in name)
SUMS = ("steps", "computed_tokens", "output_tokens", "preemptions", "swaps", "failed_steps")


def _gauge(name: str, told: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(NAME + name, told, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _sums(name: str, told: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(NAME + name, told, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _sum(name: str, told: str, value: int) -> Metric:
    return CounterMetricFamily(NAME + name, told, value=value)
