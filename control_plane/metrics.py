"""What the control plane counts. One registry for each app, so that two never share a gauge."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """Names begin with `headworks_control_plane_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered", "path", "method", "status")
        self.seconds = Histogram(
            "headworks_control_plane_request_seconds",
            "Time to answer a request",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.beats = self._counter("beats", "Heartbeats by what became of them", "outcome")
        self.registrations = self._counter("registrations", "Registrations of workers", "outcome")
        self.journal_entries = self._counter("journal_entries", "Journal entries", "outcome")
        self.pushes = self._counter("version_pushes", "New versions told to Valkey", "outcome")
        self.job_runs = self._counter("job_runs", "Runs of background jobs", "job", "outcome")
        self.job_success = Gauge(
            "headworks_control_plane_job_last_success_timestamp_seconds",
            "When a background job last succeeded",
            ["job"],
            registry=self.registry,
        )
        self.replicas_lost = self._counter("replicas_lost", "Replicas marked lost")
        self.swept = self._counter("swept_requests", "Requests ended for silent gateways", "cause")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        full = f"headworks_control_plane_{name}"
        return Counter(full, text, labels, registry=self.registry)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
