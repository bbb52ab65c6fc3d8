"""Causes: which refusals are tried elsewhere, and which of several is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, Refusal
from core.money import EndCause
from gateway.fallback import CAUSE_OF, cause_of, told


def a_refusal(code: Code, retry_after_ms: int | None = None) -> Refusal:
    return Refusal(code=code, message=code.value, retry_after_ms=retry_after_ms)


@pytest.mark.parametrize("code", list(Code))
def test_4xx_are_never_retried_but_for_two(code: Code) -> None:
    # litellm #19216: a bad request was sent again and again, to every deployment there was.
    refusal = a_refusal(code)
    cause = cause_of(refusal)
    if refusal.status < 500 and code not in {Code.CONTEXT_LENGTH, Code.CONTENT_POLICY}:
        assert cause is None
    else:
        assert cause == CAUSE_OF[code]


def test_a_target_lost_after_it_began_has_erred() -> None:
    refusal = a_refusal(Code.UNAVAILABLE)
    assert cause_of(refusal) == "capacity"
    assert cause_of(refusal, EndCause.FAILED) == "error"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([Code.OVERLOADED, Code.CONTEXT_LENGTH], Code.OVERLOADED),
        ([Code.CONTEXT_LENGTH, Code.OVERLOADED], Code.OVERLOADED),
        # Kong: with all targets down the answer was 500.
        ([Code.INTERNAL, Code.UNAVAILABLE], Code.UNAVAILABLE),
        ([Code.INTERNAL, Code.INTERNAL], Code.INTERNAL),
        ([Code.UNAVAILABLE, Code.BAD_REQUEST], Code.UNAVAILABLE),
        ([Code.BAD_REQUEST], Code.BAD_REQUEST),
        ([Code.TIMEOUT, Code.INTERNAL, Code.CONTENT_POLICY], Code.TIMEOUT),
    ],
)
def test_of_several_the_most_hopeful_is_told(codes: list[Code], expected: Code) -> None:
    assert told([a_refusal(code) for code in codes]).code is expected


@given(
    st.lists(
        st.builds(a_refusal, st.sampled_from(list(Code)), st.none() | st.integers(0, 9_999)),
        min_size=1,
    )
)
def test_what_is_told_was_said_and_asks_for_the_shortest_wait(refusals: list[Refusal]) -> None:
    found = told(refusals)
    assert found.code in {refusal.code for refusal in refusals}
    waits = [r.retry_after_ms for r in refusals if r.retry_after_ms is not None]
    if found.status >= 500:
        assert found.retry_after_ms == min(waits, default=None)
