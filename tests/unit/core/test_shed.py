"""Whom a full pool sends away, in which order, and what it expects of waits."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.shed import Prospect, ServiceTime, ShedRules, shed

RULES = ShedRules()
QUEUE_MAX = 1_000
LONG_MS = 1_000_000
CALM = Prospect(
    service_class="standard",
    waiting=100,
    own=10,
    tenants=5,
    congestion_ms=0,
    wait_ms=500,
    stay_ms=500,
    left_ms=60_000,
    samples=100,
)


def judged(**changes: object) -> str | None:
    return shed(msgspec.structs.replace(CALM, **changes), RULES, QUEUE_MAX)


def test_nobody_is_sent_away_from_a_short_queue():
    assert judged() is None
    assert judged(service_class="batch") is None
    assert judged(left_ms=0, wait_ms=LONG_MS) is None, "who has no deadline may wait"


def test_batch_is_refused_first():
    wait = RULES.batch_wait_ms
    assert judged(service_class="batch", congestion_ms=wait - 1) is None
    assert judged(service_class="batch", congestion_ms=wait) == "batch_refused"
    assert judged(own=90, congestion_ms=wait) is None


# GAIE #1861: low-priority batch starves for ever under strict priority.
def test_some_batch_may_always_wait_so_that_its_share_is_used():
    wait = RULES.batch_wait_ms
    kept = RULES.batch_kept
    assert judged(service_class="batch", congestion_ms=10 * wait, waiting=kept, own=1) is None
    assert judged(service_class="batch", congestion_ms=10 * wait, waiting=kept + 1, own=1)


def test_then_tenants_above_their_share():
    wait = RULES.share_wait_ms
    assert judged(own=21, congestion_ms=wait) == "over_share"
    assert judged(own=20, congestion_ms=wait) is None, "a fifth of the queue is its share"
    assert judged(own=21, congestion_ms=wait - 1) is None
    assert judged(own=100, tenants=1, congestion_ms=wait) is None, "nobody else waits"


def test_then_what_would_not_be_done_in_time():
    assert judged(wait_ms=39_501) == "too_late", "half as much again is over 60 s"
    assert judged(wait_ms=39_500) is None
    assert judged(own=21, congestion_ms=RULES.share_wait_ms, wait_ms=LONG_MS) == "over_share"


def test_half_of_the_queue_is_for_those_with_less_in_it():
    assert judged(waiting=501, own=200, tenants=3) == "over_share"
    assert judged(waiting=501, own=200, tenants=3, samples=0) == "over_share"
    assert judged(waiting=501, own=100, tenants=3) is None
    assert judged(waiting=500, own=200, tenants=3) is None


def test_nothing_is_said_of_waits_before_some_were_measured():
    few = RULES.samples_min - 1
    assert judged(wait_ms=LONG_MS, samples=few) is None
    assert judged(wait_ms=LONG_MS, samples=few + 1) == "too_late"


def test_a_full_pool_frees_a_place_as_often_as_its_tickets_stay_long():
    service = ServiceTime()
    assert service.wait_ms(5, 4) == 0
    service.measure(2_000)
    assert service.wait_ms(1, 4) == 500
    assert service.wait_ms(8, 4) == 4_000
    assert service.wait_ms(8, 0) == 0, "nothing runs, so nothing will end"


@given(st.lists(st.integers(0, 600_000), min_size=1))
def test_a_measured_time_is_within_what_was_measured(stays):
    service = ServiceTime()
    for stay in stays:
        service.measure(stay)
    assert min(stays) - 1 <= service.stay_us / 1_000 <= max(stays)


def test_a_measured_time_follows_what_changes():
    service = ServiceTime()
    for stay in [1_000] * 100 + [3_000] * 100:
        service.measure(stay)
    assert service.stay_us / 1_000 == pytest.approx(3_000, rel=0.01)
