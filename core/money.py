"""Money: integers in micro-units of the currency, one rounding rule, one billing policy.

    billed = charge(price, billable(cause, metered)), and nothing for some causes

Prices are micro-units per million tokens. A charge is summed exactly and divided once, half
up: `(Σ tokens * price + 500_000) // 1_000_000`. No float touches money anywhere.
"""

from enum import StrEnum

import msgspec

from core.protocol import Usage

TOKENS_PER_PRICE = 1_000_000
LEFT_OUT = -1  # a rate that nobody gave; no rate is negative


class EndCause(StrEnum):
    """How an accepted request ended. Each has exactly one."""

    COMPLETE = "complete"  # the model stopped: end of text or a stop string
    LENGTH = "length"  # max_tokens, the context, or a refused top-up
    FILTERED = "filtered"  # a safety filter ended it
    CLIENT_CANCELLED = "client_cancelled"  # the client left or cancelled
    FAILED = "failed"  # our fault: no replica finished it
    EXPIRED = "expired"  # its deadline passed
    LOST = "lost"  # the gateway died; settled from the worker's journal
    NOT_STARTED = "not_started"  # ended before any worker took it


# Whether a request that ended so pays for its tokens; `billable` says for how many.
BILLS_TOKENS: dict[EndCause, bool] = {
    EndCause.COMPLETE: True,
    EndCause.LENGTH: True,
    EndCause.FILTERED: True,
    EndCause.CLIENT_CANCELLED: True,
    EndCause.FAILED: False,
    EndCause.EXPIRED: True,
    EndCause.LOST: True,
    EndCause.NOT_STARTED: False,
}


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable price version. Micro-units per million tokens, but for `request_micro`.

    A rate left out is filled in as the price is made, so every price has all of them: cache
    writes cost what input costs, and reasoning what output costs.
    """

    id: str
    currency: str = "USD"
    input_micro: int
    cached_input_micro: int
    output_micro: int
    request_micro: int = 0
    cache_write_5m_micro: int = LEFT_OUT
    cache_write_1h_micro: int = LEFT_OUT
    reasoning_micro: int = LEFT_OUT

    def __post_init__(self) -> None:
        """Every rate is a number from here on, and two prices of equal rates are equal."""
        for rate, otherwise in (
            ("cache_write_5m_micro", self.input_micro),
            ("cache_write_1h_micro", self.input_micro),
            ("reasoning_micro", self.output_micro),
        ):
            if getattr(self, rate) == LEFT_OUT:
                msgspec.structs.force_setattr(self, rate, otherwise)


def charge_micro(price: Price, usage: Usage) -> int:
    """What this usage costs at this price, policy aside."""
    shown = usage.output_tokens - usage.reasoning_tokens
    assert usage.fresh_tokens >= 0, "cached and written tokens are part of the prompt"
    assert shown >= 0, "reasoning is part of the output"
    exact = (
        usage.fresh_tokens * price.input_micro
        + usage.cached_tokens * price.cached_input_micro
        + usage.cache_write_5m_tokens * price.cache_write_5m_micro
        + usage.cache_write_1h_tokens * price.cache_write_1h_micro
        + shown * price.output_micro
        + usage.reasoning_tokens * price.reasoning_micro
    )
    return price.request_micro + _rounded(exact)


def billable(cause: EndCause, metered: Usage, *, accepted_tokens: int, max_tokens: int) -> Usage:
    """What of the metered tokens may be billed. The prompt is, once, as metered.

    Of the output, what the gateway accepted of each attempt: what an attempt produced beyond
    that went into no answer, and is ours to bear. The gateway of a LOST request did not live
    to say, and its client had a stream: as metered. Never more than `max_tokens`, which all
    choices together were to have. Reasoning comes first, so it is what a cut leaves.
    """
    accepted = metered.output_tokens if cause is EndCause.LOST else accepted_tokens
    output = min(accepted, max_tokens)
    return msgspec.structs.replace(
        metered, output_tokens=output, reasoning_tokens=min(metered.reasoning_tokens, output)
    )


def billed_micro(cause: EndCause, price: Price, usage: Usage) -> int:
    """The bill for what is `billable`. Nothing read and nothing accepted costs nothing."""
    if not BILLS_TOKENS[cause] or usage == Usage():
        return 0
    return charge_micro(price, usage)


def worst_case_micro(price: Price, *, prompt_tokens: int, output_tokens: int) -> int:
    """The most a request can cost: every token at the dearest rate that it could come to."""
    prompt_micro = max(
        price.input_micro,
        price.cached_input_micro,
        price.cache_write_5m_micro,
        price.cache_write_1h_micro,
    )
    output_micro = max(price.output_micro, price.reasoning_micro)
    exact = prompt_tokens * prompt_micro + output_tokens * output_micro
    return price.request_micro + _rounded(exact)


def _rounded(exact: int) -> int:
    """Micro-units, half up, of tokens times micro-units per million tokens."""
    return (exact + TOKENS_PER_PRICE // 2) // TOKENS_PER_PRICE
