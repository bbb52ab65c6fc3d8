"""Journal entries: which can be true, and how many go at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.journal import chunks, is_sound, witness
from core.fleet import JournalEntry
from core.protocol import Usage


def an_entry(seq=1, **changes):
    fields = {"request_id": "req_1", "attempt": 1, "usage": Usage(), "final": False}
    return JournalEntry(seq=seq, **(fields | changes))


@given(count=st.integers(0, 50), size=st.integers(1, 10))
def test_chunks_keep_every_entry_in_order_and_stay_small(count, size):
    entries = [an_entry(seq) for seq in range(1, count + 1)]
    parts = list(chunks(entries, size))
    assert [entry for part in parts for entry in part] == entries
    assert all(0 < len(part) <= size for part in parts)


def test_an_entry_becomes_a_journals_word():
    usage = Usage(prompt_tokens=7, cached_tokens=2, output_tokens=3)
    entry = an_entry(usage=usage, final=True, cause="aborted", at_ms=5)
    word = witness("rep-0", entry)
    assert (word.source, word.replica_id, word.usage) == ("journal", "rep-0", usage)
    assert (word.final, word.cause, word.at_ms) == (True, "aborted", 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 0},
        {"attempt": 0},
        {"attempt": 2**31},
        {"usage": Usage(prompt_tokens=1, cached_tokens=2)},
        {"usage": Usage(prompt_tokens=-1, cached_tokens=-1)},
        {"usage": Usage(output_tokens=-1)},
        {"usage": Usage(output_tokens=2**41)},
        {"at_ms": 2**60},
    ],
)
def test_impossible_numbers_are_not_sound(changes):
    assert is_sound(an_entry())
    assert not is_sound(an_entry(**changes))
