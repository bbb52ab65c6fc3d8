"""Terms in pieces: every split says what the whole says, and both what looking everywhere does."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from core.safety.folding import SKIPPED_MAX, fold, is_word
from core.safety.terms import TermBook, TermScanner

WORDS = st.text(alphabet="abß é-", min_size=1, max_size=4).filter(lambda word: word.strip())


def covered(book, pieces):
    scanner = TermScanner(book, 3)
    found = set()
    for number, piece in enumerate(pieces):
        before = scanner.decided
        told = scanner.feed(piece, final=number == len(pieces) - 1)
        assert all(run.rule == 3 and before <= run.start for run in told)
        assert all(run.start < run.end <= scanner.decided for run in told)
        found |= {at for run in told for at in range(run.start, run.end)}
    assert scanner.decided == sum(map(len, pieces))
    return found


def by_looking_everywhere(terms, text, *, whole_word):
    symbols = [(char, at) for at, each in enumerate(text) for char in fold(each)]
    folded = "".join(char for char, _ in symbols)
    found = set()
    for term in ("".join(map(fold, term)) for term in terms):
        for start in range(len(folded) - len(term) + 1):
            end = start + len(term)
            before = folded[start - 1 : start] if start else ""
            after = folded[end : end + 1]
            alone = not any(map(is_word, before + after))
            if folded[start:end] == term and (alone or not whole_word):
                found |= set(range(symbols[start][1], symbols[end - 1][1] + 1))
    return found


@settings(max_examples=150, deadline=None)
@given(
    terms=st.lists(WORDS, min_size=1, max_size=4),
    text=st.text(alphabet="abßs é-", max_size=14),
    cuts=st.lists(st.integers(0, 14), max_size=4),
    whole_word=st.booleans(),
)
def test_any_split_is_the_whole_and_the_whole_is_all_there_is(terms, text, cuts, whole_word):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    found = covered(TermBook(terms, whole_word=whole_word), pieces)
    assert found == by_looking_everywhere(terms, text, whole_word=whole_word)


def test_only_what_could_still_become_a_term_is_held():
    scanner = TermScanner(TermBook(["secret", "creep"], whole_word=False), 0)
    for piece, decided in (("so ", 3), ("se", 3), ("cre", 3), ("e", 5), ("n", 10), ("secret", 16)):
        scanner.feed(piece, final=False)
        assert scanner.decided == decided, piece


def test_a_whole_word_waits_for_what_follows_it():
    scanner = TermScanner(TermBook(["cat"], whole_word=True), 0)
    assert scanner.feed("a cat", final=False) == []
    assert scanner.decided == 2
    assert scanner.feed("s", final=False) == []
    assert scanner.decided == 6
    scanner.feed(" cat", final=False)
    (run,) = scanner.feed("!", final=False)
    assert (run.start, run.end) == (7, 10)


def test_invisible_characters_hide_nothing_but_hold_nothing_for_ever():
    book = TermBook(["secret"], whole_word=False)
    assert len(covered(book, ["se", "\u200b" * 3, "cret", "\u200b"])) == 10
    assert covered(book, ["se", "\u200b" * (SKIPPED_MAX + 1), "cret"]) == set()
    alone = TermBook(["cat"], whole_word=True)
    assert len(covered(alone, ["cat", "\u200b" * (SKIPPED_MAX + 1), "s"])) >= 3


def test_a_text_may_go_on_after_its_end():
    for whole_word in (False, True):
        scanner = TermScanner(TermBook(["abcd"], whole_word=whole_word), 0)
        assert scanner.feed("ab", final=True) == []
        assert scanner.decided == 2
        scanner.feed("c", final=False)
        assert scanner.decided == 2
        (run,) = scanner.feed("d.", final=False)
        assert (run.start, run.end, scanner.decided) == (2, 4, 5)


def test_a_long_text_is_not_kept():
    for whole_word in (False, True):
        scanner = TermScanner(TermBook(["ab" * 5], whole_word=whole_word), 0)
        for _ in range(1_000):
            scanner.feed("ababa", final=False)
        assert len(scanner._origins) < 100


def test_a_run_that_is_half_decided_is_told_in_two_parts():
    scanner = TermScanner(TermBook(["ab", "bcde"], whole_word=False), 0)
    (first,) = scanner.feed("ab", final=False)
    assert (first.start, first.end) == (0, 1)
    (second,) = scanner.feed("x", final=False)
    assert (second.start, second.end) == (1, 2)


def test_a_ligature_at_the_end_of_a_whole_word_goes_with_it():
    assert covered(TermBook(["wait."], whole_word=True), ["wait\u2026"]) == set(range(5))
