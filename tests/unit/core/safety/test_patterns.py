"""Patterns in pieces: every split says what the whole says, and both what `re` says."""

import re
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.safety.automaton import Automaton
from core.safety.folding import SKIPPED_MAX
from core.safety.nfa import NFA
from core.safety.patterns import PatternBook, PatternScanner
from core.safety.syntax import PatternError, parse

SMALL = (
    "ab", "a{2,4}b?c", r"\bab\b", "(?:ab|ca){1,3}", "[a-c]{3}", "a.c", "^ab", "bc$", r"a\Bb",
    "(a|ab)(c|bcd)", "(?:a|a){2}", "a?b?c", r"\d{2}|\w{4}", "[^ab]{2}", "(?:^a|b$)c?",
)  # fmt: skip


def a_book(*patterns):
    book = PatternBook()
    for number, pattern in enumerate(patterns):
        book.add(number, [parse(pattern)])
    return book


def covered(book, pieces):
    """The characters that belong to matches, by rule; told once each, and in time."""
    scanner = PatternScanner(book)
    found = []
    for number, piece in enumerate(pieces):
        before = scanner.decided
        told = scanner.feed(piece, final=number == len(pieces) - 1)
        found += [(at, run.rule) for run in told for at in range(run.start, run.end)]
        assert all(before <= run.start and run.end <= scanner.decided for run in told)
    assert len(found) == len(set(found))
    assert scanner.decided == sum(map(len, pieces))
    return set(found)


def said_by_re(pattern, text):
    """Every match there is, by trying every beginning and every end."""
    found = set()
    python = pattern.replace("$", r"\Z")
    for end in range(1, len(text) + 1):
        matcher = re.compile(rf"(?:{python})(?=[\s\S]{{{len(text) - end}}}\Z)")
        for start in range(end):
            if matcher.match(text, start):
                found |= set(range(start, end))
    return found


@settings(max_examples=150, deadline=None)
@given(
    pattern=st.sampled_from(SMALL),
    text=st.text(alphabet="abcd 1", max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_any_split_is_the_whole_and_the_whole_is_what_re_finds(pattern, text, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    found = covered(a_book(pattern), pieces)
    assert {at for at, _ in found} == said_by_re(pattern, text)


@settings(max_examples=100, deadline=None)
@given(patterns=st.lists(st.sampled_from(SMALL), min_size=2, max_size=4, unique=True),
       text=st.text(alphabet="abcd 1", max_size=12))  # fmt: skip
def test_patterns_together_find_what_each_finds_alone(patterns, text):
    together = covered(a_book(*patterns), list(text) or [""])
    for rule, pattern in enumerate(patterns):
        assert {at for at, r in together if r == rule} == {
            at for at, _ in covered(a_book(pattern), [text])
        }


def a_shape(draw, depth=0):
    kind = draw(st.integers(0, 6 if depth < 3 else 2))
    if kind <= 1:
        return draw(st.sampled_from("abc"))
    if kind == 2:
        return draw(st.sampled_from([".", "[ab]", "[^a]", r"\d", r"\w"]))
    inner = a_shape(draw, depth + 1)
    if kind == 3:
        return f"(?:{inner}){draw(st.sampled_from(['?', '{2}', '{1,3}', '{0,2}']))}"
    other = a_shape(draw, depth + 1)
    return f"(?:{inner}|{other})" if kind == 4 else inner + other


@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=st.text(alphabet="abc1 ", max_size=8))
def test_patterns_that_nobody_thought_of_are_right_too(data, text):
    pattern = a_shape(data.draw)
    try:
        book = a_book(pattern)
    except PatternError:
        return
    assert {at for at, _ in covered(book, list(text) or [""])} == said_by_re(pattern, text)


def test_only_what_could_still_match_is_held():
    scanner = PatternScanner(a_book("abcd", r"xy\b"))
    for piece, decided in (("zzz", 3), ("ab", 3), ("c", 3), ("z", 7), ("xy", 7), (".", 10)):
        scanner.feed(piece, final=False)
        assert scanner.decided == decided


def test_an_endless_open_match_holds_no_more_than_its_greatest_length():
    scanner = PatternScanner(a_book(r"\d{8}x"))
    for _ in range(100):
        scanner.feed("1", final=False)
    assert scanner.decided == 92


def test_invisible_characters_belong_to_the_match_around_them_but_not_without_end():
    book = a_book("abc")
    assert len(covered(book, ["a", "\u200b" * 3, "bc"])) == 6
    assert covered(book, ["a", "\u200b" * (SKIPPED_MAX + 1), "bc"]) == set()
    assert len(covered(book, ["a" + "\u200b" * SKIPPED_MAX, "bc"])) == 3 + SKIPPED_MAX


def test_a_text_may_go_on_after_its_end():
    scanner = PatternScanner(a_book("abcd"))
    assert scanner.feed("ab", final=True) == []
    assert scanner.decided == 2
    (run,) = scanner.feed("cd", final=False)
    assert (run.start, run.end) == (2, 4)


def test_a_match_that_fails_its_check_is_none_and_its_neighbour_still_is():
    book = PatternBook()
    book.add(0, [parse(r"\d{3}")], lambda text: text == "234")
    assert covered(book, ["12345"]) == {(1, 0), (2, 0), (3, 0)}
    assert covered(book, list("12345")) == {(1, 0), (2, 0), (3, 0)}
    book = PatternBook()
    book.add(0, [parse(r"\b\d\u0020?\d\b")], lambda text: text == "1 2")
    assert covered(book, ["1\u200b 2"]) == set()
    assert covered(book, list("1 2 3")) == {(0, 0), (1, 0), (2, 0)}


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet="12 \u200b", max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    pattern=st.sampled_from([r"\d{3}", r"\b\d(?: ?\d){1,3}\b", r"\d{2,4}"]),
)
def test_with_a_check_any_split_is_the_whole_as_well(text, cuts, pattern):
    def check(match):
        return sum(map(int, match.replace(" ", "").replace("\u200b", ""))) % 3 == 0

    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    book = PatternBook()
    book.add(0, [parse(pattern)], check)
    whole = covered(book, [text])
    assert covered(book, [text[a:b] for a, b in pairwise(places)]) == whole
    assert covered(book, list(text) or [""]) == whole
    expected = set()
    for end in range(1, len(text) + 1):
        if "\u200b" in text:
            return  # `re` sees them
        for start in range(end):
            rest = rf"(?=[\s\S]{{{len(text) - end}}}\Z)"
            match = re.compile(f"(?:{pattern}){rest}").match(text, start)
            if match and check(match[0]):
                expected |= {(at, 0) for at in range(start, end)}
    assert whole == expected


def test_memory_is_bounded_and_what_is_forgotten_is_made_again():
    nfa = NFA()
    nfa.add([parse(r"[ab]{0,12}a[ab]{0,12}c")])
    automaton = Automaton(nfa, states_max=20)
    state = automaton.begin
    text = "abaabbabab" * 50
    for number in automaton.classes(text):
        state = automaton.step(state, number)
        bits = automaton.open_at(state)
        automaton.back(state, number, bits, anew=False)
        assert len(automaton._forward) <= 20
    assert automaton.made > 20
    calm = Automaton(nfa, states_max=40)
    state = calm.step(calm.begin, calm.classes("a")[0])
    for bits in range(60):
        calm.back(state, calm.classes("a")[0], bits, anew=False)
    assert calm._backs <= 40


def test_unheard_of_characters_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("core.safety.automaton.CLASSES_MAX", 10)
    book = a_book("ab")
    assert covered(book, ["".join(map(chr, range(300, 400))) + "ab"]) == {(100, 0), (101, 0)}
    assert len(book.automaton._classes) <= 10


HOSTILE = (
    "(a+)+$", "(a*)*b", "a*", "a+", ".*", ".+x", "(a|aa)+$", "(a|a?)+", "([a-zA-Z]+)*", "a{2,}",
    "(.*)(.*)(.*)x", "a{1000}", "(a{500}){500}", "((a{100}){100}){100}", "(?:a?){600}", r"(a)\1",
    r"(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", "(?>a)b", "(?P<n>a)(?P=n)", "(?i)a", r"\p{L}",
    r"\X", r"a*?", "a{2,3}+", "a{2}{3}", "a**", "(a", "a)", "[a", "[]", "[z-a]", "*a", "{2}",
    "a{3,2}", "a{0}", "a{0,0}", "x{99999999}", "\\", r"\x4", r"\uzzzz", "", "a?", "(a|)", "^", "$",
    r"\b", "(" * 40 + "a" + ")" * 40, "a{", "[\\", r"[^\d\D", "(?:a{1,30}){1,40}",
)  # fmt: skip


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_pattern_that_could_blow_up_is_refused_with_the_reason(pattern):
    with pytest.raises(PatternError) as refused:
        a_book(pattern)
    assert len(str(refused.value)) > 10


# Each takes exponential or quadratic time where matching goes back, or a huge table where
# every state is made at once.
SLOW = (
    ("(?:a{0,9}){0,9}b", "a" * 20_000),
    ("(?:a|aa|aaa){1,50}b", "a" * 20_000),
    ("[ab]{0,100}a[ab]{100}c", "ab" * 10_000),
    (r"(?:\w{1,20}\.){1,10}x", "ab." * 7_000),
    ("(?:x?){20}x{20}y", "x" * 20_000),
)


@pytest.mark.parametrize(("pattern", "text"), SLOW)
def test_what_is_hostile_and_bounded_takes_time_in_proportion_to_the_text(pattern, text):
    book = a_book(pattern)

    def steps(count):
        began = book.automaton.made
        covered(book, [text[:count]])
        return book.automaton.made - began

    began_s = time.monotonic()
    assert steps(2_000) <= 2_001
    assert steps(4_000) <= 4_001
    assert time.monotonic() - began_s < 60  # going back would take longer than the universe has
