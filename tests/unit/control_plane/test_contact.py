"""How long we have been listening."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.contact import Contact


def test_contact_begins_with_the_first_word_and_grows():
    contact = Contact(gap_max_ms=100)
    assert [contact.heard(now_ms) for now_ms in (5_000, 5_100, 5_150)] == [0, 100, 150]


def test_a_gap_of_our_own_starts_it_anew():
    contact = Contact(gap_max_ms=100)
    assert [contact.heard(now_ms) for now_ms in (0, 100, 201, 300)] == [0, 100, 0, 99]


@given(steps=st.lists(st.integers(0, 300), min_size=1))
def test_it_never_counts_time_in_which_we_were_away(steps):
    contact, now_ms, unbroken_ms = Contact(gap_max_ms=100), 0, 0
    contact.heard(now_ms)
    for step in steps:
        now_ms += step
        unbroken_ms = unbroken_ms + step if step <= 100 else 0
        assert contact.heard(now_ms) == unbroken_ms
