"""Marks go in and come out; white space and word boundaries are as Hugging Face's."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.chat import TextRefusedError
from text.control import ControlToken, ControlTokens, Match, Rendered, choose_mark, unmark

M = "\U000f0000"


def tokens(*texts: str, **flags: bool) -> ControlTokens:
    return ControlTokens(ControlToken(id=at, text=text, **flags) for at, text in enumerate(texts))


def found(control: ControlTokens, text: str, marks=()) -> list[Match]:
    return list(control.find(Rendered(text, marks)))


@pytest.mark.parametrize(
    ("content", "marked"),
    [
        ("", ""),
        ("plain", "plain"),
        ("a <e> b", f"a <{M}e> b"),
        ("<e><e>", f"<{M}e><{M}e>"),
        ("tail <", f"tail <{M}"),
        ("tail <e \n", f"tail <e{M} \n"),
        ("> head", f"{M}> head"),
        (" e> head", f" {M}e> head"),
        ("e", f"{M}e"),
        (" e ", f" {M}e "),
        ("<E>", f"<{M}E>"),
    ],
)
def test_content_is_marked_where_a_control_token_could_come_of_it(content, marked):
    assert tokens("<e>").mark(content, M) == marked


def test_tokens_inside_one_another_are_all_marked():
    assert tokens("<ab>", "ab").mark("<ab>", M) == f"<{M}a{M}b>"


def test_without_control_tokens_nothing_is_marked():
    assert tokens().mark("<e>", M) == "<e>"
    assert found(tokens(), "<e>") == []


def test_the_leftmost_longest_match_wins():
    assert found(tokens("<e>", "<e><e>"), "a<e><e>b") == [Match(1, 7, 1)]


def test_a_mark_inside_makes_text_and_a_mark_beside_does_not():
    control = tokens("<e>")
    assert found(control, "<e><e>", [1]) == [Match(3, 6, 0)]
    assert found(control, "<e><e>", [5]) == [Match(0, 3, 0)]
    assert found(control, "<e><e>", [0, 3, 6]) == [Match(0, 3, 0), Match(3, 6, 0)]


def test_after_a_marked_match_an_overlapping_one_still_counts():
    assert found(tokens("<<e>", "<e>"), "<<e>", [1]) == [Match(1, 4, 1)]


def test_white_space_is_swallowed_only_up_to_the_last_control_token():
    control = tokens("<e>", lstrip=True, rstrip=True)
    assert found(control, "a  <e> \n<e>b") == [Match(1, 8, 0), Match(8, 11, 0)]


def test_a_single_word_token_needs_its_boundaries():
    control = tokens("stop", single_word=True)
    assert found(control, "nonstop stop stops stop") == [Match(8, 12, 0), Match(19, 23, 0)]


def test_a_control_token_of_one_character_cannot_be_marked():
    control = tokens("§")
    assert control.mark("plain", M) == "plain"
    with pytest.raises(TextRefusedError, match="one character"):
        control.mark("a § b", M)


def test_the_first_mark_that_no_text_holds_is_chosen():
    assert choose_mark(["a", "b"]) == M
    assert choose_mark(["a", f"b{M}"]) == "\U000f0001"


@given(pieces=st.lists(st.text(alphabet="ab<"), min_size=1))
def test_unmarking_gives_the_text_and_where_the_marks_were(pieces):
    rendered = unmark(M.join(pieces), M)
    assert rendered.text == "".join(pieces)
    bounds = [0, *rendered.marks, len(rendered.text)]
    assert [rendered.text[a:b] for a, b in pairwise(bounds)] == pieces
