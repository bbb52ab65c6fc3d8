"""Conversations as upstream bodies: held to the SDKs' published types, and refused by name."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from anthropic.types import message_create_params
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import completion_create_params
from pydantic import ConfigDict, TypeAdapter

from core.errors import Code, RefusedError
from core.providers import ProviderView
from gateway.conversation import Conversation
from gateway.openai.completion_request import parse_completion
from gateway.providers.estimate import prompt_tokens, text_tokens
from gateway.providers.translate import request_body, request_headers
from tests.support.provider_world import KEY, a_provider, asked

STRICT = ConfigDict(extra="forbid")
OPENAI: Any = TypeAdapter(completion_create_params.CompletionCreateParams, config=STRICT)
ANTHROPIC: Any = TypeAdapter(message_create_params.MessageCreateParams, config=STRICT)

TOOL = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}
OTHER = {"name": "get_time", "parameters": {"type": "object", "properties": {"tz": {}}}}
TOOLS = [{"type": "function", "function": each} for each in (TOOL, OTHER)]
CLAUDE_TOOLS = [
    {"name": "get_weather", "input_schema": {"type": "object"}},
    {"name": "get_time", "description": "Time.", "input_schema": {"type": "object"}},
]
LONG = "a:" + "b" * 99
SAY = [{"role": "user", "content": "Hi"}]
CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather and time?"},
    {
        "role": "assistant",
        "content": "Looking.",
        "tool_calls": [
            {"id": f"x.{n}", "type": "function", "function": {"name": name, "arguments": args}}
            for n, name, args in ((1, "get_weather", '{"c":"Rome"}'), (2, "get_time", ""))
        ],
    },
    {"role": "tool", "tool_call_id": "x.2", "content": "noon"},
    {"role": "tool", "tool_call_id": "x.1", "content": ""},
    {"role": "user", "content": "Thanks."},
]


def body_of(conversation: Conversation, provider: ProviderView, **more: Any) -> dict[str, Any]:
    """What would be sent, after the SDK's own types have taken it."""
    raw = request_body(conversation, provider, model="up", max_tokens=more.get("max_tokens", 9))
    body: dict[str, Any] = msgspec.json.decode(raw)
    known = OPENAI if provider.dialect == "openai" else ANTHROPIC
    _exhaust(known.validate_python(body))
    return body


def _exhaust(value: object) -> None:
    """The types have lazy iterables, which are checked as they are read."""
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            _exhaust(each)


def assert_unasked(body: dict[str, Any], provider: ProviderView, param: str, **how: str) -> None:
    with pytest.raises(RefusedError) as refused:
        body_of(asked(body, **how), provider)
    assert refused.value.refusal.code in {Code.UNSUPPORTED, Code.BAD_REQUEST}
    assert refused.value.refusal.param == param
    assert param in refused.value.refusal.message


def test_a_plain_chat_asks_for_a_stream_with_usage_and_an_exact_bound() -> None:
    # LiteLLM#34223: `max_tokens` and `max_completion_tokens` were not the same bound.
    body = body_of(asked({"messages": SAY, "max_tokens": 5}), a_provider(), max_tokens=5)
    assert body == {
        "model": "up",
        "messages": SAY,
        "max_completion_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    old = a_provider(output_limit="max_tokens", stream=False)
    assert body_of(asked({"messages": SAY}), old) == {
        "model": "up",
        "messages": SAY,
        "max_tokens": 9,
    }


def test_a_chat_to_anthropic_has_its_system_prompt_apart_and_results_first() -> None:
    body = body_of(asked({"messages": CALLED, "tools": TOOLS}), a_provider("anthropic"))
    assert body["system"] == [{"type": "text", "text": "Be brief."}]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    calls = body["messages"][1]["content"]
    assert calls == [
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "toolu_0", "name": "get_weather", "input": {"c": "Rome"}},
        {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}},
    ]
    assert body["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"},
        {"type": "tool_result", "tool_use_id": "toolu_0"},
        {"type": "text", "text": "Thanks."},
    ]
    assert body["tools"][0]["input_schema"] == {"type": "object"}
    assert body["stream"] is True


def test_a_message_to_openai_has_calls_and_results_of_its_own() -> None:
    # Ids of a caller may hold what the other dialect's do not, or be too long for it.
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "a:" + "b" * 99, "name": "t", "input": {"c": 1}}
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": LONG, "content": "rain"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    request = {
        "max_tokens": 5,
        "system": "Be brief.",
        "messages": messages,
        "stop_sequences": ["X"],
        "temperature": 0.5,
        "top_p": 0.9,
    }
    body = body_of(asked(request, "anthropic"), a_provider())
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "t", "arguments": '{"c":1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    assert (body["stop"], body["temperature"], body["top_p"]) == (["X"], 0.5, 0.9)


FUNCTION = {"type": "function", "function": {"name": "get_time"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [FUNCTION]},
}


@pytest.mark.parametrize(
    ("choice", "openai", "anthropic", "offered"),
    [
        (None, None, {"type": "auto"}, 2),
        ("none", "none", {"type": "none"}, 2),
        ("required", "required", {"type": "any"}, 2),
        (
            FUNCTION,
            FUNCTION,
            {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True},
            1,
        ),
        (ALLOWED, None, {"type": "auto"}, 1),
    ],
)
def test_a_tool_choice_means_the_same_to_either(choice, openai, anthropic, offered) -> None:
    conversation = asked(
        {"messages": SAY, "tools": TOOLS} | ({"tool_choice": choice} if choice else {})
    )
    body = body_of(conversation, a_provider())
    assert body.get("tool_choice") == openai
    assert len(body["tools"]) == offered
    assert "response_format" not in body  # a forced call is no format
    body = body_of(conversation, a_provider("anthropic"))
    assert body["tool_choice"] == anthropic
    assert len(body["tools"]) == offered


def test_calls_one_at_a_time_and_strict_tools_are_said_to_either() -> None:
    strict = {"type": "function", "function": TOOL | {"strict": True}}
    bare = {"type": "function", "function": {"name": "bare"}}
    conversation = asked({"messages": SAY, "tools": [strict, bare], "parallel_tool_calls": False})
    body = body_of(conversation, a_provider())
    assert body["parallel_tool_calls"] is False
    assert body["tools"][0]["function"]["strict"] is True
    body = body_of(conversation, a_provider("anthropic", stream=False))
    assert "stream" not in body
    assert body["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
    assert body["tools"][0]["strict"] is True


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def test_a_schema_is_asked_of_either() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    conversation = asked({"messages": SAY, "response_format": named})
    body = body_of(conversation, a_provider())
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    body = body_of(conversation, a_provider("anthropic"))
    assert body["output_config"]["format"] == {"type": "json_schema", "schema": SCHEMA}
    plain = {"messages": SAY, "response_format": {"type": "json_object"}}
    assert body_of(asked(plain), a_provider())["response_format"] == {"type": "json_object"}
    assert_unasked(plain, a_provider("anthropic"), "response_format.type")


def test_a_schema_sent_as_a_text_cannot_write_into_the_body() -> None:
    # vLLM's `guided_json` may be a text: pasted as it is, it could end the object it is in.
    evil = '{"type":"object"},"strict":true}},"model":"dearer","x":{"y":{"z":{}'
    assert_unasked({"messages": SAY, "guided_json": evil}, a_provider(), "guided_json")
    assert_unasked({"messages": SAY, "guided_json": "[1]"}, a_provider(), "guided_json")


def test_what_vllm_adds_is_asked_only_of_those_who_take_it() -> None:
    more = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2,
        "allowed_token_ids": [1, 2], "bad_words": ["x"], "stop_token_ids": [3],
    }  # fmt: skip
    conversation = asked({"messages": SAY, "max_tokens": 9, **more})
    raw = request_body(conversation, a_provider(extensions=True), model="up", max_tokens=9)
    assert msgspec.json.decode(raw).items() >= more.items()
    for name, value in more.items():
        request = {"messages": SAY, "max_tokens": 9, name: value}
        assert_unasked(request, a_provider(), name)
        assert_unasked(request, a_provider("anthropic"), name)
    vllm = a_provider(extensions=True)
    for asked_for, told in (
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "start: X"}, {"grammar": "start: X"}),
    ):
        request = {"messages": SAY, **asked_for}
        raw = request_body(asked(request), vllm, model="up", max_tokens=9)
        assert msgspec.json.decode(raw)["structured_outputs"] == told
        assert_unasked(request, a_provider(), *asked_for)


def test_drawing_is_passed_on_to_openai() -> None:
    more = {
        "temperature": 1.5, "top_p": 0.5, "seed": 0, "n": 2, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "logprobs": True, "top_logprobs": 0, "stop": ["a", "b"],
    }  # fmt: skip
    body = body_of(asked({"messages": SAY, "logit_bias": {"5": 2}, **more}), a_provider())
    assert body.items() >= more.items()
    assert body["logit_bias"] == {"5": 2}


def test_anthropic_is_told_how_to_draw_only_where_it_is_known_to_take_it() -> None:
    # The SDK of 2026 has no temperature any more; vLLM's and older models' interface has.
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    taking = a_provider("anthropic", extensions=True)
    raw = request_body(asked({"messages": SAY, **more}), taking, model="up", max_tokens=9)
    assert msgspec.json.decode(raw).items() >= more.items()
    for name, value in more.items():
        assert_unasked({"messages": SAY, name: value}, a_provider("anthropic"), name)
    assert_unasked({"messages": SAY, "temperature": 1.1}, taking, "temperature")
    assert_unasked({"messages": SAY, "min_p": 0.1}, taking, "min_p")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": 0}, "seed"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"logit_bias": {"5": 2}}, "logit_bias"),
        ({"temperature": 1.1}, "temperature"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"messages": [{"role": "assistant", "content": "Hi"}, *SAY]}, "messages[0]"),
        ({"messages": [*SAY, {"role": "assistant", "content": "Hi"}]}, "messages[1]"),
        ({"messages": [{"role": "system", "content": "Hi"}]}, "messages[0]"),
        ({"messages": [*SAY, {"role": "system", "content": "Hi"}, *SAY]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "messages[0].content"),
    ],
)
def test_what_anthropic_has_no_place_for_is_refused_by_name(more, param) -> None:
    assert_unasked({"messages": SAY, **more}, a_provider("anthropic"), param)


def test_what_neither_has_is_refused_in_the_callers_words() -> None:
    for provider in (a_provider(), a_provider("anthropic")):
        assert_unasked({"messages": SAY, "prompt_logprobs": 1}, provider, "prompt_logprobs")
        legacy = parse_completion(b'{"model":"m","prompt":"x"}')
        with pytest.raises(RefusedError, match="prompt"):
            body_of(legacy, provider)
    stops = {"max_tokens": 5, "messages": SAY, "stop_sequences": list("abcde")}
    assert_unasked(stops, a_provider(), "stop_sequences", dialect="anthropic")
    raw = request_body(
        asked(stops, "anthropic"), a_provider(extensions=True), model="up", max_tokens=9
    )
    assert len(msgspec.json.decode(raw)["stop"]) == 5


def marked(text: str, ttl: str = "5m") -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}


def test_cache_marks_stay_where_they_were() -> None:
    request = {
        "max_tokens": 5,
        "tools": [CLAUDE_TOOLS[0] | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "system": [marked("long"), {"type": "text", "text": "short"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, marked("two")]},
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "t1",
                        "name": "get_weather",
                        "input": {},
                        "cache_control": {"type": "ephemeral"},
                    }
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ],
    }
    body = body_of(asked(request, "anthropic"), a_provider("anthropic"))
    five, hour = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    assert body["tools"][0]["cache_control"] == hour
    assert body["system"] == [
        {"type": "text", "text": "long", "cache_control": five},
        {"type": "text", "text": "short"},
    ]
    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "one\ntwo", "cache_control": five}
    ]
    assert body["messages"][1]["content"][0]["cache_control"] == five
    assert "cache_control" not in body_of(asked(request, "anthropic"), a_provider()).__repr__()


def test_two_marks_in_one_turn_cut_it_where_it_was_joined() -> None:
    content = [marked("one"), {"type": "text", "text": "two"}, marked("three", "5m")]
    request = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": content}],
        "cache_control": {"type": "ephemeral"},  # where there is a mark already
    }
    body = body_of(asked(request, "anthropic"), a_provider("anthropic"))
    five = {"type": "ephemeral"}
    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "one", "cache_control": five},
        {"type": "text", "text": "two\nthree", "cache_control": five},
    ]


def test_a_mark_on_a_result_and_on_the_whole_request() -> None:
    request = {
        "max_tokens": 5,
        "cache_control": {"type": "ephemeral"},
        "tools": CLAUDE_TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [
            *SAY,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "get_time", "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ],
    }
    body = body_of(asked(request, "anthropic"), a_provider("anthropic"))
    assert body["messages"][-1]["content"] == [
        {"type": "tool_result", "tool_use_id": "toolu_0", "cache_control": {"type": "ephemeral"}}
    ]
    assert body["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}


def test_a_key_goes_into_its_dialects_header_and_nowhere_else() -> None:
    assert request_headers("openai", KEY)["authorization"] == f"Bearer {KEY}"
    headers = request_headers("anthropic", KEY)
    assert (headers["x-api-key"], headers["anthropic-version"]) == (KEY, "2023-06-01")
    for dialect in ("openai", "anthropic"):
        assert KEY not in str(request_headers(dialect, None))


def test_nobodys_user_is_told_to_a_provider() -> None:
    request = {"messages": SAY, "user": "jane@acme.test", "prompt_cache_key": "jane"}
    assert "jane" not in json.dumps(body_of(asked(request), a_provider()))


@given(st.text(), st.text())
def test_an_estimate_is_of_the_bytes_and_adds_up(one: str, other: str) -> None:
    both = text_tokens(one + other)
    assert both <= text_tokens(one) + text_tokens(other) <= both + 1
    assert (text_tokens(one) > 0) == bool(one)
    assert text_tokens(one) <= len(one.encode(errors="surrogatepass"))


def test_a_prompt_without_words_is_not_taken_for_prose() -> None:
    def of(text: str) -> int:
        return prompt_tokens(asked({"messages": [{"role": "user", "content": text}]}))

    assert of("q" * 4_000) > 2 * of("words and " * 400)
    assert of("q" * 4_000) < 4_000


def test_an_estimate_is_of_all_that_goes_into_the_prompt() -> None:
    plain = prompt_tokens(asked({"messages": CALLED[:2]}))
    assert plain < prompt_tokens(asked({"messages": CALLED}))
    assert plain < prompt_tokens(asked({"messages": CALLED[:2], "tools": TOOLS}))
    asks = {"messages": CALLED[:2], "guided_regex": "abc" * 9}
    assert plain < prompt_tokens(asked(asks))
