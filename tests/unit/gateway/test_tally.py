"""Counters and histograms read as the client library's own do."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from gateway.tally import Counts, Distribution

BOUNDS = (0.005, 0.01, 1)
SEEN = (0.0, 0.005, 0.0051, 0.01, 0.5, 1.0, 1.5)


def lines(registry: CollectorRegistry) -> list[str]:
    told = generate_latest(registry).decode().splitlines()
    return [line for line in told if "_created" not in line]


def test_a_distribution_is_told_as_a_histogram():
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("waits", "How long.", registry=theirs, buckets=BOUNDS)
    distribution = Distribution(ours, "waits", "How long.", BOUNDS)
    for seconds in SEEN:
        histogram.observe(seconds)
        distribution.observe(seconds)
    assert lines(ours) == lines(theirs)
    assert 'waits_bucket{le="0.005"} 2.0' in lines(ours)


def test_each_series_of_a_counter_is_counted_by_itself():
    registry = CollectorRegistry()
    counts = Counts(registry, "asked", "How often.", ["path", "status"])
    kept = counts.labels("a", "200")
    kept.inc()
    counts.labels("a", "200").inc(2)
    counts.labels("a", "500").inc()
    assert lines(registry)[-2:] == [
        'asked_total{path="a",status="200"} 3.0',
        'asked_total{path="a",status="500"} 1.0',
    ]
