"""Kept answers under a seal: what opens them, where, and what is left as it was."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.secrets import CannotOpenError, KeyRing
from gateway.sealing import AnswerSeal

OLD, NEW = b"o" * 32, b"n" * 32
PLACE = ("idempotency", "ten_1", "POST /v1/x", "k")
ANSWER = b"\x94 what was told"

answers = st.binary(min_size=1, max_size=80).filter(lambda data: data[0] != 0)


def sealing(**keys: bytes) -> AnswerSeal:
    return AnswerSeal(KeyRing(keys), os.urandom)


@given(answer=answers, place=st.lists(st.text(max_size=9), max_size=4))
def test_what_is_sealed_opens_where_it_was_kept(answer: bytes, place: list[str]) -> None:
    seal = sealing(k=NEW)
    stored = seal.seal(answer, *place)
    assert seal.open(stored, *place) == answer
    assert len(answer) < 4 or answer not in stored


@pytest.mark.parametrize(
    "elsewhere",
    [
        ("answer", *PLACE[1:]),
        ("idempotency", "ten_2", *PLACE[2:]),
        (*PLACE[:2], "POST /v1/", "xk"),
        PLACE[:-1],
    ],
)
def test_what_is_sealed_opens_nowhere_else(elsewhere: tuple[str, ...]) -> None:
    seal = sealing(k=NEW)
    with pytest.raises(CannotOpenError):
        seal.open(seal.seal(ANSWER, *PLACE), *elsewhere)


def test_without_a_key_an_answer_is_as_it_is_and_stays_readable_with_one() -> None:
    assert sealing().seal(ANSWER, *PLACE) == ANSWER
    assert sealing(k=NEW).open(ANSWER, *PLACE) == ANSWER


def test_the_first_key_seals_any_opens_and_one_that_is_gone_does_not() -> None:
    before = sealing(old=OLD).seal(ANSWER, *PLACE)
    both = sealing(new=NEW, old=OLD)
    assert both.open(before, *PLACE) == ANSWER
    assert sealing(new=NEW).open(both.seal(ANSWER, *PLACE), *PLACE) == ANSWER
    for ring in (sealing(new=NEW), sealing(), sealing(old=NEW)):
        with pytest.raises(CannotOpenError):
            ring.open(before, *PLACE)


def test_what_is_cut_or_changed_does_not_open() -> None:
    seal = sealing(k=NEW)
    stored = seal.seal(ANSWER, *PLACE)
    for cut in range(1, len(stored)):
        with pytest.raises(CannotOpenError):
            seal.open(stored[:cut], *PLACE)
    for at in range(1, len(stored)):
        changed = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        with pytest.raises(CannotOpenError):
            seal.open(changed, *PLACE)
