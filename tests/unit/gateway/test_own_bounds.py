"""A caller's own bounds: what is refused or lowered before anything is held or charged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.allowance import Bounds
from core.errors import Code, Refusal, RefusedError
from core.money import Price, worst_case_micro
from core.registry import ProviderModel, ServedModel
from core.tickets import Headroom, LimitRefused
from gateway.openai import parse_chat
from gateway.patience import Patience, bounded
from gateway.relay.budget import whole_ask
from gateway.relay.provider_target import sized as provider_sized
from gateway.relay.ticket import limit_refusal
from gateway.routing import Size, size

MODEL = ServedModel(
    model="m",
    version="v",
    deployment="d",
    pool="d@local",
    family="llama",
    context_tokens=1_000,
    max_output_tokens=500,
    created_ms=0,
    route_version=1,
)
BOUNDS = Bounds(prompt_tokens_max=100, output_tokens_max=40)


def sized(prompt=10, asked=None, bounds=BOUNDS, policy="clamp"):
    return size(
        MODEL,
        prompt_tokens=prompt,
        max_tokens=asked,
        choices=1,
        output_tokens_max=0,
        bounds=bounds,
        policy=policy,
    )


def test_a_prompt_over_the_callers_bound_is_refused_by_either_policy():
    assert isinstance(sized(prompt=100), Size)
    for policy in ("clamp", "refuse"):
        refused = sized(prompt=101, policy=policy)
        assert isinstance(refused, Refusal)
        assert (refused.code, refused.param) == (Code.CONTEXT_LENGTH, "messages")
        assert "at most" in refused.message or "most you may send is 100" in refused.message


def test_an_answer_over_the_callers_bound_is_lowered_or_refused_as_the_policy_says():
    assert sized(asked=40).max_tokens == sized(asked=41).max_tokens == 40
    assert sized(asked=64_000).max_tokens == 40
    refused = sized(asked=41, policy="refuse")
    assert (refused.code, refused.param) == (Code.BAD_REQUEST, "max_tokens")
    assert sized(asked=40, policy="refuse").max_tokens == 40


@pytest.mark.parametrize("policy", ["clamp", "refuse"])
def test_who_names_no_length_gets_what_the_bound_allows(policy):
    assert sized(policy=policy).max_tokens == 40
    assert sized(policy=policy, bounds=Bounds(output_tokens_max=9_999)).max_tokens == 500
    assert sized(policy=policy, bounds=Bounds()).max_tokens == 500


def test_a_bound_never_lifts_the_models_own():
    refused = sized(asked=501, bounds=Bounds(output_tokens_max=800))
    assert refused.code is Code.BAD_REQUEST


def test_a_deadline_is_cut_to_the_callers_bound():
    given_ = Patience(whole_ms=1_000, first_token_ms=900, idle_ms=800)
    assert bounded(given_, 0) == given_
    assert bounded(given_, 400).whole_ms == 400
    assert bounded(given_, 4_000) == given_


@given(rate=st.integers(0, 10**7), tokens=st.integers(1, 10**5), choices=st.integers(1, 4))
def test_who_would_rather_be_refused_asks_for_the_whole_answer(rate, tokens, choices):
    price = Price(id="p", input_micro=rate, cached_input_micro=rate, output_micro=rate)
    wanted = Size(prompt_tokens=7, max_tokens=tokens, choices=choices)
    ask = whole_ask(price, wanted)
    whole = worst_case_micro(price, prompt_tokens=7, output_tokens=tokens * choices)
    assert ask.amount_micro == ask.floor_micro == whole


@pytest.mark.parametrize(
    ("scope", "reason", "told"),
    [
        ("tenant", "requests", "Your account is over its limit of requests per minute."),
        (
            "key:key_1",
            "concurrency",
            "This API key is over its limit of requests at the same time.",
        ),
        (
            "model:m",
            "output_tokens",
            "Your account is over its limit of output tokens per minute for the model `m`.",
        ),
    ],
)
def test_a_refusal_names_the_scope_and_the_limit(scope, reason, told):
    refused = LimitRefused(reason=reason, scope=scope, retry_after_ms=7, headroom=Headroom())
    assert limit_refusal(refused) == Refusal(code=Code.RATE_LIMITED, message=told, retry_after_ms=7)


def test_a_provider_is_asked_for_no_more_than_the_caller_may_have():
    model = ProviderModel(
        model="m",
        provider="p",
        upstream="r",
        dialect="openai",
        context_tokens=1_000,
        max_output_tokens=0,
        created_ms=0,
        route_version=1,
    )
    asked = parse_chat(b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":90}')
    assert provider_sized(model, asked, 0).max_tokens == 90
    assert provider_sized(model, asked, 0, bounds=BOUNDS).max_tokens == 40
    with pytest.raises(RefusedError):
        provider_sized(model, asked, 0, bounds=BOUNDS, policy="refuse")
