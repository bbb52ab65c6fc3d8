"""Text leaves whole, early, and never past a stop string."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.detokenize import Detokenizer


class Pieces:
    """Token i is the i-th piece."""

    eos_ids = frozenset[int]()

    def __init__(self, pieces):
        self.pieces = pieces
        self.vocab_size = len(pieces)

    def token_bytes(self, id, /):  # noqa: A002 - the product's name
        return self.pieces[id]


def stream(pieces, stops=()):
    """What each piece releases, then what the end does; stops feeding at a stop string."""
    detokenizer = Detokenizer(Pieces(pieces), stops)
    released = []
    for token in range(len(pieces)):
        released.append(detokenizer.append(token))
        if detokenizer.stopped is not None:
            break
    return [*released, detokenizer.finish()], detokenizer


def until_stop(text, stops):
    """The specification: character by character, the first stop string to be completed."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(data, places):
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def test_a_character_leaves_with_its_last_byte():
    family = "👩‍👩‍👧".encode()
    released, _ = stream([bytes([byte]) for byte in family])
    assert "".join(released) == "👩‍👩‍👧"
    assert released[:4] == ["", "", "", "👩"]
    assert "�" not in "".join(released)


def test_hangul_one_byte_at_a_time_loses_no_syllable():
    # dynamo 12630: syllables lost, or U+FFFD, in a stream.
    text = "안녕하세요 세계"
    released, _ = stream([bytes([byte]) for byte in text.encode()])
    assert "".join(released) == text


def test_an_unfinished_character_at_the_end_is_one_replacement():
    released, _ = stream(["é".encode() + "한".encode()[:2]])
    assert released == ["é", "�"]


def test_a_broken_character_is_replaced_when_that_is_certain():
    released, _ = stream([b"\xed\x95", b"A"])
    assert released[:2] == ["", "�A"]


def test_no_beginning_of_a_stop_string_leaves_before_it_is_broken():
    # vllm 3574: the stream leaked the start of the stop string.
    pieces = [bytes([letter]) for letter in b"ABCDEFGHIJKL"]
    released, detokenizer = stream(pieces, ("DEFGHIJ",))
    assert released == ["A", "B", "C", "", "", "", "", "", "", "", ""]
    assert detokenizer.stopped == "DEFGHIJ"


def test_held_text_leaves_as_soon_as_no_stop_string_can_begin_in_it():
    released, _ = stream([b"A", b"D", b"E", b"X", b"D"], ("DEFGHIJ",))
    assert released == ["A", "", "", "DEX", "", "D"]


def test_only_what_can_still_begin_a_stop_string_is_held():
    released, _ = stream([b"ababc"], ("abab!", "bcd"))
    assert released == ["aba", "bc"]


def test_a_stop_string_inside_one_token_ends_the_text_there():
    released, detokenizer = stream([b"one\n\ntwo", b"three"], ("\n\n",))
    assert "".join(released) == "one"
    assert detokenizer.stopped == "\n\n"


def test_of_stop_strings_completed_together_the_longest_is_cut():
    released, detokenizer = stream([b"xyend"], ("end", "yend", "d"))
    assert ("".join(released), detokenizer.stopped) == ("x", "yend")


def test_the_stop_string_completed_first_wins_however_tokens_fall():
    for pieces in ([b"xabcd"], [b"x", b"abcd"], [b"xab", b"cd"]):
        released, detokenizer = stream(pieces, ("abcd", "b"))
        assert ("".join(released), detokenizer.stopped) == ("xa", "b")


def test_a_stop_string_that_the_last_flush_completes_is_honoured():
    released, detokenizer = stream([b"a\xf0\x9f"], ("�",))
    assert ("".join(released), detokenizer.stopped) == ("a", "�")


def test_a_token_after_the_stop_string_is_a_bug():
    detokenizer = Detokenizer(Pieces([b"stop"]), ("stop",))
    detokenizer.append(0)
    with pytest.raises(AssertionError, match="nothing follows"):
        detokenizer.append(0)


def test_random_tokens_never_raise():
    # vllm 17448: an "invalid prefix" ended the output of everyone.
    pieces = [bytes([i, (i * 7) % 256, 255 - i]) for i in range(256)]
    released, _ = stream(pieces)
    assert "".join(released) == b"".join(pieces).decode(errors="replace")


@given(st.text() | st.binary(), st.lists(st.integers(0, 1 << 16)))
@example("👨‍👩‍👧‍👦 한국어", list(range(40)))
@example(b"\xf0\x9f\xf0\x9f\x91\xe2\x82A\xff\xed\xa0\x80", list(range(40)))
def test_pieces_add_up_to_the_decode_of_the_whole(text, places):
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    released, _ = stream(cut(data, places))
    assert "".join(released) == data.decode(errors="replace")


LETTERS = st.text("ab€", max_size=30)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=5), max_size=3)


@given(LETTERS, STOPS, st.lists(st.integers(0, 1 << 16)))
@example("aaab", ["aab"], [])
@example("abaababaab", ["abaabaa", "babaa"], [3, 6])
def test_pieces_add_up_to_the_text_before_the_first_completed_stop_string(text, stops, places):
    released, detokenizer = stream(cut(text.encode(), places), stops)
    assert ("".join(released), detokenizer.stopped) == until_stop(text, stops)


@given(LETTERS, STOPS)
def test_after_each_character_all_that_is_safe_has_left_and_nothing_more(text, stops):
    detokenizer = Detokenizer(Pieces([char.encode() for char in text]), stops)
    released = ""
    for index in range(len(text)):
        released += detokenizer.append(index)
        so_far = text[: index + 1]
        if detokenizer.stopped is not None:
            break
        held = max(
            (k for stop in stops for k in range(len(stop)) if so_far.endswith(stop[:k])), default=0
        )
        assert released == so_far[: len(so_far) - held]


def allowed_from(pieces, stops, first):
    """The specification of stop strings that count from piece `first` on."""
    text = ""
    for token, piece in enumerate(pieces):
        for char in piece:
            text += char
            completed = [stop for stop in stops if text.endswith(stop)]
            if completed and token >= first:
                longest = max(completed, key=len)
                return text[: -len(longest)], longest
    return text, None


# vllm 15967, 21987: min_tokens was ignored by stop strings.
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    first=st.integers(0, 13),
)
@example(pieces=["ab", "a", "b"], stops=["ab"], first=1)  # before it counts, and after
@example(pieces=["a", "b"], stops=["ab"], first=1)  # begun before
def test_a_stop_string_completed_too_early_is_text_like_any_other(pieces, stops, first):
    detokenizer = Detokenizer(Pieces([piece.encode() for piece in pieces]), stops)
    text = ""
    for token in range(len(pieces)):
        text += detokenizer.append(token, may_stop=token >= first)
        if detokenizer.stopped is not None:
            break
    text += detokenizer.finish()
    assert (text, detokenizer.stopped) == allowed_from(pieces, stops, first)
