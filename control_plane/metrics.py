"""What the control plane counts. One registry for each app, so that two never share a gauge."""

from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from core.reconcile import Kind

CONTENT_TYPE = CONTENT_TYPE_LATEST
Metric = TypeVar("Metric", Counter, Gauge)

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """Names begin with `headworks_control_plane_`, or with `headworks_reconciler_`."""

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
        self.job_success = self._gauge(
            "job_last_success_timestamp_seconds", "When a background job last succeeded", "job"
        )
        self.leads = self._gauge(
            "leads", "Whether this control plane decides about rollouts and capacity: one does"
        )
        self.replicas_lost = self._counter("replicas_lost", "Replicas marked lost")
        self.launcher_actions = self._counter(
            "launcher_actions", "What was done for the number of replicas", "action"
        )
        self.replicas_short = self._gauge(
            "replicas_short",
            "Replicas that are wanted and do not serve; told by the leader",
            "deployment",
        )
        self.sign_ins = self._counter("sign_ins", "Operators signing in, and refused", "outcome")
        self.soft_caps_passed = self._counter(
            "soft_caps_passed", "Soft caps passed, once for each window", "scope", "period"
        )
        self.swept = self._counter("swept_requests", "Requests ended for silent gateways", "cause")
        self.rolled_requests = self._counter("rolled_requests", "Requests counted in usage's sums")
        self.rollup_behind = self._gauge(
            "rollup_entries_behind", "Entries that usage's sums do not hold yet"
        )
        self.scaling_rounds = self._counter(
            "scaling_rounds", "Deployments that the autoscaler looked at", "outcome"
        )
        self.scaling_desired = self._gauge(
            "scaling_desired", "Replicas that the autoscaler wants of a deployment", "deployment"
        )
        self.scaling_alarms = self._gauge(
            "scaling_alarms",
            "What the autoscaler could not see of a deployment, or not get",
            "deployment",
        )
        self.differences = self._reconciler(Counter, "differences", "Differences told", "kind")
        self.corrections = self._reconciler(
            Counter, "corrections", "Differences corrected by a recount"
        )
        self.open_differences = self._reconciler(
            Gauge, "open_differences", "Differences not over yet", "kind"
        )
        self.reconciler_lag = self._reconciler(
            Gauge, "lag_seconds", "Since the words were recorded that are compared now", "feed"
        )
        for kind in Kind:  # so that the first of a kind is an increase
            self.differences.labels(kind)

    def _reconciler(self, metric: type[Metric], name: str, text: str, *labels: str) -> Metric:
        return metric(f"headworks_reconciler_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        full = f"headworks_control_plane_{name}"
        return Counter(full, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"headworks_control_plane_{name}", text, labels, registry=self.registry)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
