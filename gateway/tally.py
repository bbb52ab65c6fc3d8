"""Counters and histograms that cost next to nothing to add to, as Prometheus collects them.

The client library's own take a lock for each number and look labels up under another: more than
a token costs otherwise. One event loop adds to these and reads them, so there is nothing to lock.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, more: int = 1) -> None:
        """Add to it."""
        self.value += more


class Counts(Collector):
    """A counter with labels, or with none."""

    def __init__(
        self, registry: CollectorRegistry, name: str, documentation: str, labels: Sequence[str]
    ) -> None:
        self._name, self._documentation, self._labels = name, documentation, tuple(labels)
        self._series: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The series of these values, one for each label. May be kept."""
        found = self._series.get(values)
        if found is None:
            assert len(values) == len(self._labels)
            found = self._series[values] = Count()
        return found

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, count in self._series.items():
            family.add_metric(values, count.value)
        yield family


class Distribution(Collector):
    """A histogram of seconds, without labels. `bounds` rise."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        bounds: Sequence[float],
    ) -> None:
        self._name, self._documentation, self._bounds = name, documentation, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        """Count one; a bucket holds what is at most its bound."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        buckets, below = [], 0
        names = (*(repr(float(bound)) for bound in self._bounds), "+Inf")
        for name, count in zip(names, self._counts, strict=True):
            below += count
            buckets.append((name, float(below)))
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric((), buckets, self._sum_s)
        yield family
