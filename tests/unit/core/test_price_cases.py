"""What requests cost, to the micro-unit: from a dialect's usage to the charge, against literals."""

from collections import Counter
from decimal import ROUND_HALF_UP, Decimal
from typing import get_args

import pytest

from core.money import EndCause, billable, billed_micro, charge_micro
from core.pricing import PriceTable
from core.protocol import ServiceClass
from gateway import anthropic, openai
from tests.support.price_cases import CASES, PRICES

DIALECTS = {"openai": openai, "anthropic": anthropic}
TABLE = PriceTable(PRICES)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{n}: {CASES[n].name}")
def test_a_request_costs_what_was_worked_out_by_hand(number, dialect):
    case = CASES[number]
    usage = DIALECTS[dialect].to_usage(getattr(case, dialect))
    price = TABLE.resolve(
        case.terms, case.model, service_class=case.service_class, at_ms=case.at_ms
    )
    assert price is not None
    assert price.id == case.price
    assert charge_micro(price, usage) == case.cost
    # The whole way to a bill: all of the output was accepted, and all of it had been asked for.
    output = usage.output_tokens
    due = billable(EndCause.COMPLETE, usage, accepted_tokens=output, max_tokens=output)
    nothing = usage.prompt_tokens == output == 0
    assert billed_micro(EndCause.COMPLETE, price, due) == (0 if nothing else case.cost)


def test_the_table_rounds_half_up_and_once():
    for case in CASES:
        assert case.cost == int(Decimal(case.exact).quantize(Decimal(1), ROUND_HALF_UP))
    halves = [case for case in CASES if Decimal(case.exact) % 1 == Decimal("0.5")]
    assert len(halves) >= 10


def test_the_table_is_wide_enough():
    assert len(CASES) * len(DIALECTS) >= 200
    assert {case.service_class for case in CASES} == set(get_args(ServiceClass))
    assert {case.price for case in CASES} == {listed.price.id for listed in PRICES}
    assert {case.tier for case in CASES} >= {"standard", "gold"}
    usages = [openai.to_usage(case.openai) for case in CASES]
    for part in ("cached_tokens", "cache_write_5m_tokens", "cache_write_1h_tokens"):
        assert sum(getattr(usage, part) > 0 for usage in usages) >= 20, part
    nine_hundred = [case for case in CASES if case.note == "900 of 1,000 cached"]
    assert Counter(case.price for case in nine_hundred).keys() >= {"large", "acme", "acme-batch"}
