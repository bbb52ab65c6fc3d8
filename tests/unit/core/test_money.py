"""What is billed: exact integers, one rounding, one policy for each end cause."""

from decimal import ROUND_HALF_UP, Decimal

import msgspec
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
RATES = [name for name in Price.__struct_fields__ if name.endswith("_micro")]


@st.composite
def prices(draw):
    rates = {rate: draw(micro) for rate in RATES if rate != "request_micro"}
    return Price(id="p", request_micro=draw(st.integers(0, 1000)), **rates)


@st.composite
def usages(draw):
    # The prompt in four parts and the output in two.
    fresh, cached, write_5m, write_1h = (draw(tokens) for _ in range(4))
    shown, reasoning = draw(tokens), draw(tokens)
    return Usage(
        prompt_tokens=fresh + cached + write_5m + write_1h,
        cached_tokens=cached,
        cache_write_5m_tokens=write_5m,
        cache_write_1h_tokens=write_1h,
        output_tokens=shown + reasoning,
        reasoning_tokens=reasoning,
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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cached_tokens": 1_000_000}, 103),
        ({"cache_write_5m_tokens": 1_000_000}, 107),
        ({"cache_write_1h_tokens": 1_000_000}, 111),
        ({"cached_tokens": 400_000, "cache_write_1h_tokens": 500_000}, 107),  # 1.2 + 5.5 + 0.2
        ({"output_tokens": 1_000_000}, 102 + 5),
        ({"output_tokens": 1_000_000, "reasoning_tokens": 1_000_000}, 102 + 13),
        ({"output_tokens": 2_000_000, "reasoning_tokens": 1_000_000}, 102 + 5 + 13),
    ],
)
def test_every_class_of_token_has_its_own_rate(changes, expected):
    price = Price(
        id="p",
        input_micro=2,
        cached_input_micro=3,
        cache_write_5m_micro=7,
        cache_write_1h_micro=11,
        output_micro=5,
        reasoning_micro=13,
        request_micro=100,
    )
    assert charge_micro(price, Usage(prompt_tokens=1_000_000, **changes)) == expected


def test_a_rate_left_out_is_that_of_what_it_is_a_kind_of():
    price = Price(id="p", input_micro=2, cached_input_micro=1, output_micro=5)
    rates = {"cache_write_5m_micro": 2, "cache_write_1h_micro": 2, "reasoning_micro": 5}
    assert price == msgspec.structs.replace(price, **rates)
    free = Price(id="p", input_micro=2, cached_input_micro=1, output_micro=5, reasoning_micro=0)
    assert (free.reasoning_micro, free.cache_write_5m_micro) == (0, 2)
    assert msgspec.convert(msgspec.to_builtins(free), Price) == free


@given(prices(), usages())
def test_a_charge_agrees_with_decimal_arithmetic(price, usage):
    written = usage.cache_write_5m_tokens + usage.cache_write_1h_tokens
    exact = (
        Decimal(usage.prompt_tokens - usage.cached_tokens - written) * price.input_micro
        + Decimal(usage.cached_tokens) * price.cached_input_micro
        + Decimal(usage.cache_write_5m_tokens) * price.cache_write_5m_micro
        + Decimal(usage.cache_write_1h_tokens) * price.cache_write_1h_micro
        + Decimal(usage.output_tokens - usage.reasoning_tokens) * price.output_micro
        + Decimal(usage.reasoning_tokens) * price.reasoning_micro
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
    assert usage.reasoning_tokens == min(metered.reasoning_tokens, usage.output_tokens)
    assert usage.is_possible
    whole = {"output_tokens": metered.output_tokens, "reasoning_tokens": metered.reasoning_tokens}
    assert msgspec.structs.replace(usage, **whole) == metered  # the prompt is as metered


def test_every_end_cause_has_a_policy():
    assert set(BILLS_TOKENS) == set(EndCause)


@given(prices(), usages(), tokens, tokens)
def test_no_request_costs_more_than_its_worst_case(price, usage, more_prompt, more_output):
    worst = worst_case_micro(
        price,
        prompt_tokens=usage.prompt_tokens + more_prompt,
        output_tokens=usage.output_tokens + more_output,
    )
    assert charge_micro(price, usage) <= worst


@given(prices(), tokens, tokens)
def test_the_worst_case_can_happen(price, prompt, output):
    whole = [
        {},
        {"cached_tokens": prompt},
        {"cache_write_5m_tokens": prompt},
        {"cache_write_1h_tokens": prompt},
    ]
    costs = [
        charge_micro(
            price,
            Usage(prompt_tokens=prompt, output_tokens=output, reasoning_tokens=reasoning, **part),
        )
        for part in whole
        for reasoning in (0, output)
    ]
    assert max(costs) == worst_case_micro(price, prompt_tokens=prompt, output_tokens=output)


@pytest.mark.parametrize(
    "part", ["cached_tokens", "cache_write_5m_tokens", "cache_write_1h_tokens"]
)
def test_cached_and_written_tokens_are_part_of_the_prompt(part):
    price = Price(id="p", input_micro=1, cached_input_micro=1, output_micro=1)
    usage = Usage(prompt_tokens=1, **{part: 2})
    assert not usage.is_possible
    with pytest.raises(AssertionError, match=r"^cached and written tokens are part of the prompt$"):
        charge_micro(price, usage)


def test_reasoning_is_part_of_the_output():
    price = Price(id="p", input_micro=1, cached_input_micro=1, output_micro=1)
    usage = Usage(output_tokens=1, reasoning_tokens=2)
    assert not usage.is_possible
    with pytest.raises(AssertionError, match=r"^reasoning is part of the output$"):
        charge_micro(price, usage)


@pytest.mark.parametrize("field", Usage.__struct_fields__)
def test_nothing_is_used_less_than_not_at_all(field):
    whole = Usage(prompt_tokens=9, output_tokens=9)
    assert whole.is_possible
    assert not msgspec.structs.replace(whole, **{field: -1}).is_possible
