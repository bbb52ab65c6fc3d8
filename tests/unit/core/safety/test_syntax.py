"""Patterns as they are read: what each part means, and where a refusal points."""

import pytest

from core.safety.patterns import PatternBook
from core.safety.syntax import PatternError, parse
from tests.unit.core.safety.test_patterns import a_book, covered


@pytest.mark.parametrize(("pattern", "yes", "no"), [
    (r"\.", ".", "a"),
    (r"\n\t\r\f\v", "\n\t\r\f\v", "n"),
    (r"\x41\u00e9", "Aé", "ae"),
    (r"[\]a-]", "-", "b"),
    (r"[a-c\d]", "7", "d"),
    (r"[^\s]", "x", " "),
    (r"[\x41-\x43]", "B", "D"),
    (r"\D", "x", "7"),
    (r"\W", "-", "_"),
    (r"\S", "-", "\t"),
    (r"\d", "٣", "x"),
    ("[a-z]", "\uff51", "Q"),
    ("a|b", "b", "c"),
    ("()a", "a", "b"),
    ("a{2}", "aa", "a"),
])  # fmt: skip
def test_a_part_means_what_it_means_everywhere(pattern, yes, no):
    assert len(covered(a_book(pattern), [yes])) == len(yes)
    assert covered(a_book(pattern), [no]) == set()


@pytest.mark.parametrize(("pattern", "yes"), [("straSSe", "STRAsse"), ("[a-z]{2}", "QR")])
def test_case_may_be_ignored(pattern, yes):
    book = PatternBook()
    book.add(0, [parse(pattern, ignore_case=True)])
    assert len(covered(book, [yes])) == len(yes)
    assert covered(a_book(pattern), [yes]) == set()


def test_a_refusal_says_where_and_why():
    with pytest.raises(PatternError, match="at character 1: '\\+' repeats without end"):
        parse("a+")
    with pytest.raises(PatternError, match="refers back"):
        parse(r"(a)\1")
    with pytest.raises(PatternError, match="look around"):
        parse("(?=a)")
