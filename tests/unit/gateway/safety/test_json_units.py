"""JSON in the smallest parts that mean one character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.json_units import NUMBER, STRING, STRUCTURE, Units


def cut(pieces):
    units = Units()
    found = [unit for piece in pieces for unit in units.feed(piece, final=False)]
    return found + units.feed("", final=True)


@given(text=st.text(max_size=20), ascii_=st.booleans(), at=st.integers(0, 60))
def test_a_string_is_read_as_what_it_stands_for_in_any_pieces(text, ascii_, at):
    raw = json.dumps(text, ensure_ascii=ascii_)
    for pieces in ([raw], list(raw), [raw[:at], raw[at:]]):
        units = cut(pieces)
        assert "".join(unit.raw for unit in units) == raw
        assert "".join(unit.char for unit in units if unit.kind == STRING) == text
        assert all(len(unit.char) == 1 for unit in units)


@given(raw=st.text(alphabet='"\\ud8d4c0e1n,', max_size=20), at=st.integers(0, 20))
def test_what_is_no_json_is_neither_lost_nor_read_two_ways(raw, at):
    whole = cut([raw])
    assert "".join(unit.raw for unit in whole) == raw
    assert cut([raw[:at], raw[at:]]) == whole
    assert cut(list(raw)) == whole
    assert all(len(unit.char) == 1 for unit in whole)


def test_numbers_and_words_are_told_apart():
    kinds = [unit.kind for unit in cut(["[-1.5e3,true]"])]
    assert kinds == [STRUCTURE] + [NUMBER] * 6 + [STRUCTURE] * 6


@pytest.mark.parametrize(("raw", "char"), [
    (r"\n", "\n"), (r"\/", "/"), (r"\u0041", "A"), (r"\ud83d\ude00", "\U0001f600"),
    (r"\ud83d", "\ud83d"), (r"\q", "q"), (r"\u", "u"),
])  # fmt: skip
def test_an_escape_is_one_character(raw, char):
    units = cut(['"' + raw + '"'])
    assert [unit.char for unit in units] == ['"', char, '"']
