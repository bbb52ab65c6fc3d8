"""What is foreseen of a pool that sends requests away, and what those are told."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code
from core.tickets import Dropped
from gateway.overload import (
    LASTING,
    RETRY_MS_MAX,
    RETRY_MS_MIN,
    OverloadRules,
    Sighting,
    foresee,
    retry_after_ms,
    shortened,
    told,
)

RULES = OverloadRules()
NOW_MS = 1_700_000_000_000


def a_sighting(reason: str, wait_ms: int = 4_000, left_ms: int = 3_000) -> Sighting:
    dropped = Dropped(reason=reason, expected_wait_ms=wait_ms)
    return Sighting(dropped=dropped, left_ms=left_ms, at_ms=NOW_MS)


def seen(last: Sighting | None, *, left_ms: int = 2_000, later_ms: int = 10) -> Dropped | None:
    return foresee(last, left_ms=left_ms, now_ms=NOW_MS + later_ms, rules=RULES)


@pytest.mark.parametrize("reason", sorted(LASTING))
def test_what_the_pool_just_said_it_would_say_again(reason):
    assert seen(a_sighting(reason)) == Dropped(reason=reason, expected_wait_ms=3_990)


def test_who_has_more_time_left_than_the_one_refused_is_let_through():
    assert seen(a_sighting("too_late", left_ms=2_000), left_ms=2_001) is None
    assert seen(a_sighting("over_share", left_ms=2_000), left_ms=2_001) is not None


@pytest.mark.parametrize("reason", ["expired", "fits_never", "no_replica"])
def test_what_is_of_one_request_or_may_change_at_once_is_not_foreseen(reason):
    assert seen(a_sighting(reason)) is None
    assert seen(None) is None


# dynamo P12138, P14210: an overload mark set on the request path is never cleared, and an idle
# worker refuses all.
@given(reason=st.sampled_from(sorted(LASTING)), wait_ms=st.integers(0, 10**7))
def test_a_mark_of_overload_clears_itself(reason, wait_ms):
    sighting = a_sighting(reason, wait_ms=wait_ms)
    assert seen(sighting, later_ms=RULES.hold_ms_max) is None
    assert seen(sighting, later_ms=RULES.hold_ms_min - 1) is not None
    assert seen(sighting, later_ms=-1) is None, "a clock that went back"


def test_answers_are_cut_only_under_pressure_and_by_policy():
    pressed = RULES.shorten_wait_ms
    assert shortened(900, 100, pressed - 1, RULES) == 900
    assert shortened(900, 0, pressed, RULES) == 900
    assert shortened(900, 100, pressed, RULES) == 100
    assert shortened(50, 100, pressed, RULES) == 50
    assert shortened(None, 100, pressed, RULES) == 100


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        ("expired", Code.TIMEOUT, 504),
        ("fits_never", Code.CONTEXT_LENGTH, 400),
        ("no_replica", Code.UNAVAILABLE, 503),
        ("batch_refused", Code.OVERLOADED, 503),
        ("over_share", Code.OVERLOADED, 503),
        ("too_late", Code.OVERLOADED, 503),
        ("queue_full", Code.OVERLOADED, 503),
    ],
)
def test_a_shortage_of_ours_is_never_a_429(reason, code, status):
    refusal = told(Dropped(reason=reason), "req", service_class="standard")
    assert (refusal.code, refusal.status) == (code, status)
    assert (refusal.retry_after_ms is not None) == (status == 503)


def test_the_expected_wait_is_told_and_batch_is_offered():
    dropped = Dropped(reason="too_late", expected_wait_ms=12_400)
    refusal = told(dropped, "req", service_class="interactive")
    assert "would not be done by its deadline. It would wait about 13 s." in refusal.message
    assert "Batch requests may wait longer" in refusal.message
    assert "Batch" not in told(dropped, "req", service_class="batch").message
    assert 6_200 <= refusal.retry_after_ms <= 18_600


@given(wait_ms=st.integers(0, 10**7), names=st.lists(st.text(max_size=9), unique=True))
def test_those_refused_together_come_back_apart_and_each_always_at_its_time(wait_ms, names):
    base = min(RETRY_MS_MAX, max(RETRY_MS_MIN, wait_ms))
    for name in names:
        at_ms = retry_after_ms(wait_ms, name)
        assert base // 2 <= at_ms <= base * 3 // 2
        assert at_ms == retry_after_ms(wait_ms, name)


def test_a_crowd_comes_back_spread_over_the_wait():
    times = sorted(retry_after_ms(10_000, f"req_{i}") for i in range(1_000))
    assert len(set(times)) > 900
    assert max(b - a for a, b in pairwise(times)) < 200
