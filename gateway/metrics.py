"""What a gateway counts, as Prometheus series under `headworks_gateway_`.

Caller's faults and ours are told apart by the `status` and `cause` labels, never mixed.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from gateway.tally import Counts, Distribution

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


class Metrics:
    """One registry for each gateway, so that tests may run several in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._count_safety()
        self._count_tries()
        self._count_refusals()
        self.requests = Counts(
            self.registry,
            "headworks_gateway_requests",
            "Requests that reached the relay, by how they ended.",
            ["endpoint", "cause"],
        )
        self.responses = Counts(
            self.registry,
            "headworks_gateway_responses",
            "HTTP responses, by status.",
            ["endpoint", "status"],
        )
        self.replays = Counter(
            "headworks_gateway_replays",
            "Answers told again under an idempotency key.",
            ["endpoint"],
            registry=self.registry,
        )
        self.answer_cache = Counter(
            "headworks_gateway_answer_cache",
            "Requests that asked for an answer from memory: hit or miss.",
            ["outcome"],
            registry=self.registry,
        )
        self.tokens = Counts(
            self.registry,
            "headworks_gateway_tokens",
            "Tokens: prompt, cached, output, delivered.",
            ["kind"],
        )
        self.first_token_s = _seconds(
            self.registry, "first_token_seconds", "Request received to first token.", SECONDS
        )
        self.inter_token_s = _seconds(
            self.registry, "inter_token_seconds", "Gap between tokens.", TOKEN_SECONDS
        )
        self.queue_s = _seconds(
            self.registry, "queue_seconds", "Asking for a replica to placement.", SECONDS
        )
        self.request_s = _seconds(
            self.registry, "request_seconds", "Request received to its end.", SECONDS
        )
        self.provider_faults = Counter(
            "headworks_gateway_provider_faults",
            "Requests that an outside provider failed or refused, by what it was.",
            ["provider", "kind"],
            registry=self.registry,
        )
        self.provider_key_dead = Gauge(
            "headworks_gateway_provider_key_dead",
            "1 while a provider does not take our key.",
            ["provider"],
            registry=self.registry,
        )
        self.open_requests = self._gauge("open_requests", "Requests under way.")
        self.settling = self._gauge("settling", "Requests ended and not yet settled.")
        self.spool_bytes = self._gauge("spool_bytes", "Words to the ledger waiting on disk.")
        self.ledger_away = self._gauge("ledger_away", "1 while Postgres takes no words.")
        self.ledger_refused = self._gauge("ledger_refused", "Words the ledger would not take.")
        self.dispatch_degraded = self._gauge(
            "dispatch_degraded", "1 while this gateway admits and places alone."
        )
        self.view_age_s = self._gauge("view_age_seconds", "Age of the routing view.")
        self.worker_connections = self._gauge("worker_connections", "Open connections to workers.")

    def _count_tries(self) -> None:
        self.setbacks = Counter(
            "headworks_gateway_setbacks",
            "Attempts that did not finish: nack, unsent, moved, error, death.",
            ["kind"],
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "headworks_gateway_fallbacks",
            "Targets given up for another, by what they failed for.",
            ["cause"],
            registry=self.registry,
        )
        self.retries_refused = Counter(
            "headworks_gateway_retries_refused",
            "Deaths told to the client because the fleet's retry budget was used up.",
            registry=self.registry,
        )
        self.replicas_shunned = self._gauge(
            "replicas_shunned", "Replicas that this gateway passes over because they fail."
        )

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

    def _count_refusals(self) -> None:
        self.refusals = Counts(
            self.registry,
            "headworks_gateway_refusals",
            "Requests that were not let in, by whose word it was and for what.",
            ["scope", "reason"],
        )
        self.queue_length = Gauge(
            "headworks_gateway_queue_length",
            "Requests of this gateway that wait for a replica.",
            ["pool", "class"],
            registry=self.registry,
        )
        self.expected_wait_s = Gauge(
            "headworks_gateway_expected_wait_seconds",
            "How long a newcomer would wait in a pool's queue, batch aside, as of its last word.",
            ["pool"],
            registry=self.registry,
        )

    def _count_safety(self) -> None:
        self.safety_hits = Counter(
            "headworks_gateway_safety_hits",
            "Places where a safety policy's rule matched.",
            ["stage", "detector", "action"],
            registry=self.registry,
        )
        self.safety_faults = Counter(
            "headworks_gateway_safety_faults",
            "Times that a detector could not do its work, and what followed: open, closed.",
            ["detector", "on_fault"],
            registry=self.registry,
        )
        self.safety_records_dropped = Counter(
            "headworks_gateway_safety_records_dropped",
            "Hits of which no record could be kept.",
            registry=self.registry,
        )

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"headworks_gateway_{name}", documentation, registry=self.registry)


def _seconds(
    registry: CollectorRegistry, name: str, documentation: str, bounds: tuple[float, ...]
) -> Distribution:
    return Distribution(registry, f"headworks_gateway_{name}", documentation, bounds)
