"""A sliding count: never under what the present window holds, never over what two of them do."""

from hypothesis import given
from hypothesis import strategies as st

from core.window import Window

SPAN_MS = 1_000


def test_the_window_before_slides_out():
    window = Window(span_ms=SPAN_MS)
    window.add(8, 10_000)
    assert [window.total(now) for now in (10_000, 10_999, 11_000, 11_500, 11_750, 12_000)] == [
        8,
        8,
        8,
        4,
        2,
        0,
    ]


def test_a_clock_that_goes_back_changes_nothing():
    window = Window(span_ms=SPAN_MS)
    window.add(3, 10_500)
    window.add(2, 9_000)
    assert window.total(8_000) == 5


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 5))))
def test_the_count_lies_between_one_window_and_two(steps):
    window = Window(span_ms=SPAN_MS)
    now_ms, added = 50_000, []
    for wait_ms, number in steps:
        now_ms += wait_ms
        window.add(number, now_ms)
        added.append((now_ms, number))
        total = window.total(now_ms)
        present = sum(n for at, n in added if at >= window.start_ms)
        lately = sum(n for at, n in added if at > now_ms - 2 * SPAN_MS)
        assert present <= total <= lately
