"""Usage in both dialects: each tells the same totals in its own way, and refuses the impossible."""

from typing import Any

import anthropic as anthropic_sdk
import openai as openai_sdk
import pytest
from hypothesis import given

from core.errors import RefusedError
from core.protocol import Usage
from gateway import anthropic, openai
from tests.support.dialect_events import usages

# 1,000 in the prompt: 880 read from a cache, 20 written to one, 30 to the other.
USAGE = Usage(
    prompt_tokens=1000,
    cached_tokens=880,
    cache_write_5m_tokens=20,
    cache_write_1h_tokens=30,
    output_tokens=50,
    reasoning_tokens=10,
)
OPENAI: dict[str, Any] = {
    "prompt_tokens": 1000,
    "completion_tokens": 50,
    "total_tokens": 1050,
    "prompt_tokens_details": {
        "cached_tokens": 880,
        "cache_write_tokens": 50,
        "cache_write_tokens_details": {"ttl_5m_tokens": 20, "ttl_1h_tokens": 30},
    },
    "completion_tokens_details": {"reasoning_tokens": 10},
}
ANTHROPIC: dict[str, Any] = {
    "input_tokens": 70,
    "cache_creation_input_tokens": 50,
    "cache_read_input_tokens": 880,
    "output_tokens": 50,
    "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 30},
    "output_tokens_details": {"thinking_tokens": 10},
}


def test_both_tell_one_usage_in_their_own_way() -> None:
    assert openai.from_usage(USAGE) == OPENAI
    assert anthropic.from_usage(USAGE) == ANTHROPIC
    assert openai.to_usage(OPENAI) == anthropic.to_usage(ANTHROPIC) == USAGE


def test_nine_hundred_of_a_thousand_cached_is_the_same_in_both() -> None:
    inside = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 900}}
    beside = {"input_tokens": 100, "cache_read_input_tokens": 900}
    ours = openai.to_usage(inside | {"completion_tokens": 7})
    assert ours == anthropic.to_usage(beside | {"output_tokens": 7})
    assert ours == Usage(prompt_tokens=1000, cached_tokens=900, output_tokens=7)


@given(usage=usages())
def test_whatever_is_told_is_understood_again(usage: Usage) -> None:
    for dialect in (openai, anthropic):
        told = dialect.from_usage(usage)
        assert dialect.to_usage(told) == usage
        assert told == dialect.from_usage(usage)  # reading it took nothing from it


@given(usage=usages())
def test_the_sdks_types_take_it(usage: Usage) -> None:
    # As a whole, before any SDK's leniency: strict, and with every field in its place.
    theirs = openai_sdk.types.CompletionUsage.model_validate(openai.from_usage(usage), strict=True)
    assert theirs.prompt_tokens_details is not None
    assert theirs.prompt_tokens_details.cached_tokens == usage.cached_tokens
    assert (theirs.prompt_tokens_details.cache_write_tokens or 0) == usage.cache_write_tokens
    told = anthropic.from_usage(usage)
    message = anthropic_sdk.types.Usage.model_validate(told, strict=True)
    creation, thought = message.cache_creation, message.output_tokens_details
    assert (creation.ephemeral_1h_input_tokens if creation else 0) == usage.cache_write_1h_tokens
    assert (thought.thinking_tokens if thought else 0) == usage.reasoning_tokens
    delta = anthropic_sdk.types.MessageDeltaUsage.model_validate(told, strict=True)
    assert delta.cache_creation_input_tokens == usage.cache_write_tokens


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": None}])
def test_what_a_body_leaves_out_there_was_none_of(details: dict[str, Any]) -> None:
    plain = Usage(prompt_tokens=3, output_tokens=2)
    assert openai.to_usage({"prompt_tokens": 3, "completion_tokens": 2, **details}) == plain
    assert anthropic.to_usage({"input_tokens": 3, "output_tokens": 2, "speed": "fast"}) == plain
    empty: dict[str, Any] = {"prompt_tokens_details": {}, "completion_tokens_details": {}}
    assert openai.to_usage({"prompt_tokens": 3, "completion_tokens": 2, **empty}) == plain
    assert (
        anthropic.to_usage({"input_tokens": 3, "output_tokens": 2, "cache_creation": {}}) == plain
    )


def test_a_write_to_an_unnamed_cache_is_for_five_minutes() -> None:
    written = Usage(prompt_tokens=9, cache_write_5m_tokens=4)
    body = {"prompt_tokens": 9, "completion_tokens": 0}
    assert openai.to_usage(body | {"prompt_tokens_details": {"cache_write_tokens": 4}}) == written
    body = {"input_tokens": 5, "output_tokens": 0, "cache_creation_input_tokens": 4}
    assert anthropic.to_usage(body) == written


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("prompt_tokens", {"prompt_tokens": -1}),
    ("prompt_tokens", {"prompt_tokens": None}),
    ("prompt_tokens", {"prompt_tokens": True}),
    ("prompt_tokens", {"prompt_tokens": 1000.0}),
    ("prompt_tokens", {"prompt_tokens": "1000"}),
    ("prompt_tokens", {"prompt_tokens": 2**53}),
    ("completion_tokens", {"completion_tokens": None}),
    ("completion_tokens", {"completion_tokens": False}),
    ("total_tokens", {"total_tokens": 1000}),
    ("prompt_tokens_details", {"prompt_tokens_details": {"cached_tokens": 1001}}),
    (
        "prompt_tokens_details",
        {"prompt_tokens_details": {"cached_tokens": 600, "cache_write_tokens": 500}},
    ),
    ("prompt_tokens_details", {"prompt_tokens_details": [1]}),
    ("prompt_tokens_details.cached_tokens", {"prompt_tokens_details": {"cached_tokens": -1}}),
    ("prompt_tokens_details.cached_tokens", {"prompt_tokens_details": {"cached_tokens": 0.5}}),
    (
        "prompt_tokens_details.cache_write_tokens",
        {
            "prompt_tokens_details": {
                "cache_write_tokens": 3,
                "cache_write_tokens_details": {"ttl_5m_tokens": 1, "ttl_1h_tokens": 1},
            }
        },
    ),
    ("completion_tokens_details", {"completion_tokens_details": {"reasoning_tokens": 51}}),
]


@pytest.mark.parametrize(("param", "changes"), IMPOSSIBLE)
def test_openai_s_impossible_usage_is_refused_by_its_field(
    param: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError) as caught:
        openai.to_usage(OPENAI | changes)
    assert caught.value.refusal.param == f"usage.{param}"


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("input_tokens", {"input_tokens": -1}),
        ("input_tokens", {"input_tokens": None}),
        ("input_tokens", {"input_tokens": True}),
        ("input_tokens", {"input_tokens": 70.0}),
        ("output_tokens", {"output_tokens": None}),
        ("output_tokens", {"output_tokens": -2}),
        ("cache_read_input_tokens", {"cache_read_input_tokens": -1}),
        ("cache_read_input_tokens", {"cache_read_input_tokens": False}),
        ("cache_creation_input_tokens", {"cache_creation_input_tokens": 49}),
        ("cache_creation", {"cache_creation": 50}),
        (
            "cache_creation.ephemeral_1h_input_tokens",
            {"cache_creation": {"ephemeral_1h_input_tokens": -1}},
        ),
        ("output_tokens_details", {"output_tokens_details": {"thinking_tokens": 51}}),
    ],
)
def test_anthropic_s_impossible_usage_is_refused_by_its_field(
    param: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError) as caught:
        anthropic.to_usage(ANTHROPIC | changes)
    assert caught.value.refusal.param == f"usage.{param}"


@pytest.mark.parametrize("body", [None, [], "nine", 9])
def test_usage_is_an_object(body: object) -> None:
    for dialect in (openai, anthropic):
        with pytest.raises(RefusedError, match="must be an object"):
            dialect.to_usage(body)
