"""Prices and sizes: the order of refusals, and what never exceeds the context."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, Refusal
from core.ids import TenantId
from core.money import Price
from core.pricing import UNPRICED, ListedPrice, PriceTable
from core.registry import ServedModel
from core.tenancy import Tenant
from core.tickets import Limits, ReplicaView
from gateway.routing import (
    Size,
    block_tokens,
    charged,
    kv_blocks,
    output_limit,
    size,
)

PRICE = Price(id="p", input_micro=1, cached_input_micro=1, output_micro=1)
NONE = PriceTable(())


def a_model(name: str = "m", context_tokens: int = 100, max_output_tokens: int = 0) -> ServedModel:
    return ServedModel(
        model=name,
        version="v",
        deployment="d",
        pool="d@local",
        family="llama",
        context_tokens=context_tokens,
        max_output_tokens=max_output_tokens,
        created_ms=0,
        route_version=1,
    )


def a_replica(name: str, tokens: int) -> ReplicaView:
    return ReplicaView(
        replica=name,
        boot_id="boot_1",
        url="http://127.0.0.1:1",
        version="v",
        ready=True,
        kv_blocks=10,
        sequences=4,
        block_tokens=tokens,
    )


def sized(model: ServedModel, prompt: int, asked: int | None, limit: int = 0) -> Size | Refusal:
    return size(model, prompt_tokens=prompt, max_tokens=asked, choices=1, output_tokens_max=limit)


def a_tenant(*, billed: bool = True) -> Tenant:
    return Tenant(
        id=TenantId("ten_1"),
        name="t",
        salt=bytes(16),
        limits=Limits(),
        weight=1,
        hard_cap_micro=None,
        price_book="acme",
        tier="gold",
        billed=billed,
        disabled=False,
        version=1,
    )


def test_a_billed_tenant_is_refused_what_has_no_price() -> None:
    scope = {"book": "acme", "tier": "gold", "service_class": "batch"}
    prices = PriceTable([ListedPrice(model="m", effective_ms=5, price=PRICE, **scope)])
    assert charged(prices, a_tenant(), ("m",), service_class="batch", at_ms=5) == (PRICE, "m")
    for service_class, at_ms in (("batch", 4), ("standard", 5)):
        asked = {"service_class": service_class, "at_ms": at_ms}
        refused = charged(prices, a_tenant(), ("m",), **asked)
        assert isinstance(refused, Refusal)
        assert (refused.code, refused.status, refused.param) == (
            Code.MODEL_NOT_PRICED,
            403,
            "model",
        )
        free = charged(prices, a_tenant(billed=False), ("m",), **asked)
        assert free == (UNPRICED, "m")


def test_an_alias_is_billed_at_its_own_price_or_at_that_of_the_name_it_leads_to() -> None:
    other = msgspec.structs.replace(PRICE, id="other")
    listed = [ListedPrice(model="m", effective_ms=5, price=PRICE)]
    asked = {"service_class": "standard", "at_ms": 5}
    names = ("fast", "m")
    assert charged(PriceTable(listed), a_tenant(), names, **asked) == (PRICE, "m")
    listed.append(ListedPrice(model="fast", effective_ms=5, price=other))
    assert charged(PriceTable(listed), a_tenant(), names, **asked) == (other, "fast")
    refused = charged(NONE, a_tenant(), names, **asked)
    assert isinstance(refused, Refusal)
    assert "`fast`" in refused.message
    assert charged(NONE, a_tenant(billed=False), names, **asked) == (UNPRICED, "m")


@pytest.mark.parametrize(
    ("max_output", "setting", "expected"),
    [(0, 0, 99), (50, 0, 50), (0, 40, 40), (50, 40, 40), (50, 60, 50), (500, 500, 99)],
)
def test_the_lowest_limit_counts(max_output: int, setting: int, expected: int) -> None:
    assert output_limit(a_model(max_output_tokens=max_output), setting) == expected


@pytest.mark.parametrize(
    ("prompt", "asked", "code", "param"),
    [
        (100, None, Code.CONTEXT_LENGTH, "messages"),
        (100, 1000, Code.CONTEXT_LENGTH, "messages"),
        (10, 51, Code.BAD_REQUEST, "max_tokens"),
        (60, 41, Code.CONTEXT_LENGTH, "messages"),
    ],
)
def test_refusals_in_order(prompt: int, asked: int | None, code: Code, param: str) -> None:
    refused = sized(a_model(max_output_tokens=50), prompt, asked)
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.param) == (code, param)


def test_without_max_tokens_an_answer_takes_what_is_left_up_to_the_limit() -> None:
    model = a_model(max_output_tokens=50)
    assert sized(model, 10, None) == Size(prompt_tokens=10, max_tokens=50, choices=1)
    assert sized(model, 99, None) == Size(prompt_tokens=99, max_tokens=1, choices=1)
    assert sized(model, 10, None, limit=7) == Size(prompt_tokens=10, max_tokens=7, choices=1)


@given(
    context=st.integers(2, 10_000),
    prompt=st.integers(1, 12_000),
    asked=st.none() | st.integers(1, 12_000),
    max_output=st.integers(0, 10_000),
    setting=st.integers(0, 10_000),
    choices=st.integers(1, 8),
    block=st.integers(1, 64),
)
def test_what_is_sized_fits(
    *,
    context: int,
    prompt: int,
    asked: int | None,
    max_output: int,
    setting: int,
    choices: int,
    block: int,
) -> None:
    model = a_model(context_tokens=context, max_output_tokens=max_output)
    got = size(
        model,
        prompt_tokens=prompt,
        max_tokens=asked,
        choices=choices,
        output_tokens_max=setting,
    )
    if isinstance(got, Refusal):
        return
    assert 1 <= got.max_tokens <= output_limit(model, setting)
    assert prompt + got.max_tokens <= context
    assert asked in (None, got.max_tokens)
    assert got.output_tokens == choices * got.max_tokens
    # Enough for every choice alone and for all without sharing at most.
    blocks = kv_blocks(got, block)
    one = -(-(prompt + got.max_tokens) // block)
    assert one <= blocks <= choices * one
    assert blocks * block >= prompt + got.output_tokens


def test_block_size_is_the_smallest_of_the_pool() -> None:
    assert block_tokens(()) == 16
    assert block_tokens((a_replica("a", 32), a_replica("b", 8))) == 8
