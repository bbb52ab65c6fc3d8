"""The worker's Prometheus metrics, under `headworks_worker_`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    """One registry for each process: nothing global, so tests may make many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "headworks_worker_"
        self.attempts = Counter(
            name + "attempts", "Attempts by how they ended", ["end"], registry=self.registry
        )
        self.refused = Counter(
            name + "refused", "Attempts refused before prefill", ["reason"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            name + "prompt_tokens", "Prompt tokens, cached ones included", registry=self.registry
        )
        self.cached_tokens = Counter(
            name + "cached_tokens", "Prompt tokens from the prefix cache", registry=self.registry
        )
        self.output_tokens = Counter(
            name + "output_tokens", "Output tokens produced", registry=self.registry
        )
        self.kv_blocks = Gauge(name + "kv_blocks", "KV blocks", ["state"], registry=self.registry)
        self.sequences = Gauge(
            name + "sequences", "Sequences in the engine", ["state"], registry=self.registry
        )
        self.steps = Gauge(name + "steps", "Engine steps since the start", registry=self.registry)
        self.journal_unacked = Gauge(
            name + "journal_unacked",
            "Attempts whose newest totals are not in Postgres",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
