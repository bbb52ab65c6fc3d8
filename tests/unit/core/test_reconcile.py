"""Which differences are told, told again, and over."""

import pytest

from core import reconcile
from core.reconcile import (
    LASTING,
    WINDOW_MS_MAX,
    WINDOW_MS_MIN,
    Found,
    Kind,
    Known,
    judge,
    next_window_ms,
)


def found(kind=Kind.UNCOUNTED, subject="req_1", measure=0):
    return Found(kind=kind, subject=subject, detail="two sides", measure=measure)


def known(kind=Kind.UNCOUNTED, subject="req_1", measure=0, *, is_open=True):
    return Known(id=7, kind=kind, subject=subject, measure=measure, is_open=is_open)


def test_what_was_not_known_is_new():
    verdict = judge([found(), found(subject="req_2")], [])
    assert verdict.new == (found(), found(subject="req_2"))
    assert (verdict.grown, verdict.gone) == ((), ())


def test_what_is_open_is_not_told_again():
    assert judge([found()], [known()]) == reconcile.Verdict()


def test_the_same_subject_in_another_kind_is_another_difference():
    verdict = judge([found(Kind.MISBILLED)], [known()])
    assert verdict.new == (found(Kind.MISBILLED),)
    assert verdict.gone == (known(),)


def test_found_twice_in_one_look_is_one():
    assert len(judge([found(), found()], []).new) == 1


def test_what_has_grown_is_told_again_and_what_has_shrunk_is_not():
    before = known(Kind.REFUSED_WORDS, "gw_1", measure=3)
    more, fewer = (found(Kind.REFUSED_WORDS, "gw_1", measure=n) for n in (4, 2))
    assert judge([more], [before]).grown == ((before, more),)
    assert judge([fewer], [before]) == reconcile.Verdict()


def test_what_a_person_closed_stays_closed_until_it_grows():
    closed = known(Kind.REFUSED_WORDS, "gw_1", measure=3, is_open=False)
    same, more = (found(Kind.REFUSED_WORDS, "gw_1", measure=n) for n in (3, 4))
    assert judge([same], [closed]) == reconcile.Verdict()
    assert judge([more], [closed]).new == (more,)
    assert judge([], [closed]) == reconcile.Verdict()


@pytest.mark.parametrize("kind", Kind)
def test_what_is_found_no_more_is_gone_unless_only_a_person_can_know(kind):
    gone = judge([], [known(kind)]).gone
    assert gone == (() if kind in LASTING else (known(kind),))


def test_every_kind_is_looked_at_again_or_is_for_a_person():
    groups = [reconcile.REQUEST_KINDS, reconcile.ACCOUNT_KINDS, reconcile.STATE_KINDS]
    assert sum(map(len, groups)) == len(frozenset().union(*groups))
    assert frozenset().union(*groups) == frozenset(Kind) - {Kind.CHAIN}
    assert reconcile.OVERDUE_KINDS < reconcile.LOOKED_FOR < reconcile.REQUEST_KINDS


@pytest.mark.parametrize(
    ("window_ms", "rows", "after_ms"),
    [
        (8_000, 100, 4_000),
        (8_000, 99, 8_000),
        (8_000, 50, 8_000),
        (8_000, 49, 16_000),
        (WINDOW_MS_MIN, 100, WINDOW_MS_MIN),
        (WINDOW_MS_MAX, 0, WINDOW_MS_MAX),
        (0, 0, WINDOW_MS_MIN),
        (5, 70, WINDOW_MS_MIN),
        (5, 100, WINDOW_MS_MIN),
    ],
)
def test_a_window_follows_how_much_happened_in_it(window_ms, rows, after_ms):
    assert next_window_ms(window_ms, rows=rows, rows_max=100) == after_ms
