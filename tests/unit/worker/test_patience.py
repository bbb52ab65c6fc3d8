"""How long a step may take: what the setting says, or far longer than any of its size."""

from hypothesis import given
from hypothesis import strategies as st

from worker.patience import FACTOR, Patience

STEPS = st.lists(st.tuples(st.integers(0, 1 << 50), st.floats(0, 1e4)), max_size=20)


def test_before_any_step_the_setting_decides():
    assert Patience(60).bound_s(512) == 60


def test_a_slow_prefill_makes_room_for_the_next_and_for_one_twice_as_long():
    patience = Patience(5)
    patience.observe(512, 30)
    assert patience.bound_s(600) == 300
    assert patience.bound_s(1024) == 600
    assert patience.bound_s(8) == 5


@given(least_s=st.floats(0.1, 100), steps=STEPS, tokens=st.integers(0, 1 << 50))
def test_a_bound_is_at_least_the_setting_and_far_over_each_of_its_size(least_s, steps, tokens):
    patience = Patience(least_s)
    for step in steps:
        patience.observe(*step)
    bound_s = patience.bound_s(tokens)
    assert bound_s >= least_s
    for seen, seconds in steps:
        if seen.bit_length() <= tokens.bit_length():
            assert bound_s >= FACTOR * seconds
    if all(seen.bit_length() > tokens.bit_length() for seen, _ in steps):
        assert bound_s == least_s or tokens.bit_length() >= 39
