"""How much to hold for a request under a hard limit, and what it may produce for that: pure.

At first a bounded stretch of the answer, at least enough to be worth an answer; then twice as
much each time. The ledger may hold less than is asked for, down to the floor; how many tokens
may be produced follows from what it held, exactly. Invariant: what `affordable_tokens` allows
never costs more than what is held, whatever becomes of the request.
"""

from bisect import bisect_right

import msgspec

from core.money import Price, worst_case_micro
from gateway.routing import Size

FLOOR_TOKENS = 16  # for each choice: under that an answer is not worth its prompt
SLACK_TOKENS = 16  # for each choice: produced before an abort is heard
SLACK_PART = 32  # and never more than this part of what may be produced


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask of the ledger: both are the request's totals, in micro-units."""

    amount_micro: int
    floor_micro: int


def first_ask(price: Price, size: Size, first_output_tokens: int) -> Ask:
    """Before any worker hears of the request."""
    tokens = min(size.output_tokens, first_output_tokens)
    least = min(tokens, FLOOR_TOKENS * size.choices)
    return Ask(
        amount_micro=whole_micro(price, size, tokens), floor_micro=whole_micro(price, size, least)
    )


def whole_ask(price: Price, size: Size) -> Ask:
    """All of it or nothing, for who would rather be refused than have an answer cut."""
    whole = whole_micro(price, size, size.output_tokens)
    return Ask(amount_micro=whole, floor_micro=whole)


def next_ask(price: Price, size: Size, tokens: int) -> Ask:
    """When `tokens` are not enough: twice as many, or one more for each choice at least."""
    assert tokens < size.output_tokens, "the whole answer is held already"
    more = min(size.output_tokens, max(2 * tokens, tokens + size.choices))
    least = min(size.output_tokens, tokens + size.choices)
    return Ask(
        amount_micro=whole_micro(price, size, more), floor_micro=whole_micro(price, size, least)
    )


def affordable_tokens(price: Price, size: Size, held_micro: int) -> int:
    """The most output whose worst case, prompt and all, is within `held_micro`."""
    counts = range(size.output_tokens + 1)
    fit = bisect_right(counts, held_micro, key=lambda tokens: whole_micro(price, size, tokens))
    return max(0, fit - 1)


def slack_tokens(size: Size, tokens: int) -> int:
    """How long before `tokens` are produced to end the answer, so that little is thrown away."""
    return min(SLACK_TOKENS * size.choices, tokens // SLACK_PART)


def whole_micro(price: Price, size: Size, output_tokens: int) -> int:
    """The request's worst case with so much output."""
    return worst_case_micro(price, prompt_tokens=size.prompt_tokens, output_tokens=output_tokens)
