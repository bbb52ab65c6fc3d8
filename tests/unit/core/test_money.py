"""What is billed: exact integers, one rounding, one policy for each end cause."""

from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.money import (
    BILLS_TOKENS,
    EndCause,
    Price,
    billable,
    billed_micro,
    charge_micro,
    worst_case_micro,
)
from core.protocol import Usage

micro = st.integers(0, 10**9)
tokens = st.integers(0, 10**7)


@st.composite
def prices(draw):
    return Price(
        id="p",
        input_micro=draw(micro),
        cached_input_micro=draw(micro),
        output_micro=draw(micro),
        request_micro=draw(st.integers(0, 1000)),
    )


@st.composite
def usages(draw):
    prompt = draw(tokens)
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=draw(st.integers(0, prompt)),
        output_tokens=draw(tokens),
    )


@pytest.mark.parametrize(
    ("prompt", "cached", "output", "expected"),
    [
        (1_000_000, 0, 0, 2_000_000),  # $2 a million
        (1_000_000, 1_000_000, 0, 200_000),
        (0, 0, 1_000_000, 6_000_000),
        (1_000, 900, 100, 200 + 180 + 600),
        (1, 0, 0, 2),
        (0, 0, 0, 0),
    ],
)
def test_a_charge_is_what_one_computes_by_hand(prompt, cached, output, expected):
    price = Price(id="p", input_micro=2_000_000, cached_input_micro=200_000, output_micro=6_000_000)
    usage = Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)
    assert charge_micro(price, usage) == expected


@pytest.mark.parametrize(("per_million", "expected"), [(499_999, 0), (500_000, 1), (1_499_999, 1)])
def test_halves_round_up_and_only_once(per_million, expected):
    price = Price(id="p", input_micro=per_million, cached_input_micro=0, output_micro=per_million)
    assert charge_micro(price, Usage(prompt_tokens=1)) == expected
    # Two halves make one whole: the sum is rounded, not its parts.
    both = charge_micro(price, Usage(prompt_tokens=1, output_tokens=1))
    assert both == (2 * per_million + 500_000) // 1_000_000


@given(prices(), usages())
def test_a_charge_agrees_with_decimal_arithmetic(price, usage):
    exact = (
        Decimal(usage.prompt_tokens - usage.cached_tokens) * price.input_micro
        + Decimal(usage.cached_tokens) * price.cached_input_micro
        + Decimal(usage.output_tokens) * price.output_micro
    ) / 1_000_000
    rounded = int(exact.quantize(Decimal(1), ROUND_HALF_UP))
    assert charge_micro(price, usage) == price.request_micro + rounded


@given(prices(), usages(), st.sampled_from(EndCause))
def test_the_end_cause_decides_whether_tokens_are_billed(price, usage, cause):
    bill = billed_micro(cause, price, usage)
    if BILLS_TOKENS[cause] and usage != Usage():
        assert bill == charge_micro(price, usage)
    else:
        assert bill == 0


@given(usages(), tokens, tokens, st.sampled_from(EndCause))
def test_output_is_billed_as_accepted_and_within_what_was_asked(metered, accepted, most, cause):
    accepted = min(accepted, metered.output_tokens)
    usage = billable(cause, metered, accepted_tokens=accepted, max_tokens=most)
    expected = metered.output_tokens if cause is EndCause.LOST else accepted
    assert usage.output_tokens == min(expected, most)
    assert (usage.prompt_tokens, usage.cached_tokens) == (
        metered.prompt_tokens,
        metered.cached_tokens,
    )


def test_every_end_cause_has_a_policy():
    assert set(BILLS_TOKENS) == set(EndCause)


@given(prices(), tokens, tokens, st.data())
def test_no_request_costs_more_than_its_worst_case(price, prompt, output, data):
    cached = data.draw(st.integers(0, prompt))
    produced = data.draw(st.integers(0, output))
    if price.cached_input_micro > price.input_micro:
        return  # a cache that costs more than it saves is nobody's price list
    usage = Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=produced)
    worst = worst_case_micro(price, prompt_tokens=prompt, output_tokens=output)
    assert charge_micro(price, usage) <= worst


def test_cached_tokens_are_part_of_the_prompt():
    price = Price(id="p", input_micro=1, cached_input_micro=1, output_micro=1)
    with pytest.raises(AssertionError, match="part of the prompt"):
        charge_micro(price, Usage(prompt_tokens=1, cached_tokens=2))
