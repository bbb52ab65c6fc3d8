"""Every parameter of the official SDKs: understood, accepted where it changes nothing, or refused.

The tables name each parameter of each SDK's own request types. A new version of an SDK with a new
parameter fails here, until somebody has decided what becomes of it.
"""

# ruff: noqa: FBT003 - a table of values, some of which are booleans

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import anthropic.types.beta.message_create_params as beta_messages
import anthropic.types.message_count_tokens_params as count_messages
import anthropic.types.message_create_params as messages
import openai.types.chat.completion_create_params as chat
import openai.types.completion_create_params as completions
import openai.types.responses.input_token_count_params as count_responses
import openai.types.responses.response_create_params as responses
import pytest

from core.errors import Code, RefusedError
from gateway.anthropic import parse_count_tokens, parse_messages
from gateway.conversation import Conversation
from gateway.openai import parse_chat, parse_completion
from gateway.responses import parse_input_tokens, parse_response


class Understood(NamedTuple):
    """Values that change what is asked, each in its own way."""

    value: Any
    beside: dict[str, Any] | None = None


class Neutral(NamedTuple):
    """A value that changes nothing, and one that is refused; or only the one."""

    value: Any
    refused: Any = None


class Refused(NamedTuple):
    """A value that is refused by its name."""

    value: Any


Verdict = Understood | Neutral | Refused

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
THEIRS = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
HELLO = {"role": "user", "content": "Hello"}

GENERATION: dict[str, Verdict] = {
    "frequency_penalty": Understood(0.5),
    "logit_bias": Understood({"5": 1}),
    "max_tokens": Understood(9),
    "model": Understood("other"),
    "n": Understood(2),
    "presence_penalty": Understood(0.5),
    "seed": Understood(7),
    "stop": Understood("x"),
    "stream": Understood(True),
    "stream_options": Understood({"include_usage": True}, {"stream": True}),
    "temperature": Understood(0.5),
    "top_p": Understood(0.5),
    "user": Understood("u"),
}

CHAT: dict[str, Verdict] = GENERATION | {
    "audio": Refused({"voice": "alloy", "format": "wav"}),
    "function_call": Neutral("auto", {"name": "f"}),
    "functions": Neutral([], [{"name": "f"}]),
    "logprobs": Understood(True),
    "max_completion_tokens": Understood(9),
    "messages": Understood([HELLO, HELLO]),
    "metadata": Understood({"k": "v"}),
    "modalities": Neutral(["text"], ["text", "audio"]),
    "moderation": Refused({"model": "m"}),
    "parallel_tool_calls": Understood(False, {"tools": [FUNCTION]}),
    "prediction": Refused({"type": "content", "content": "x"}),
    "prompt_cache_key": Understood("k"),
    "prompt_cache_options": Neutral({}, {"mode": "explicit"}),
    "prompt_cache_retention": Neutral("in_memory", "24h"),
    "reasoning_effort": Understood("high"),
    "response_format": Understood(SCHEMA),
    "safety_identifier": Neutral("s"),
    "service_tier": Understood("flex"),
    "store": Neutral(False, True),
    "tool_choice": Understood("required", {"tools": [FUNCTION]}),
    "tools": Understood([FUNCTION]),
    "top_logprobs": Understood(2, {"logprobs": True}),
    "verbosity": Neutral("medium", "low"),
    "web_search_options": Refused({}),
}

COMPLETIONS: dict[str, Verdict] = GENERATION | {
    "best_of": Neutral(1, 2),
    "echo": Understood(True),
    "logprobs": Understood(2),
    "prompt": Understood("Twice"),
    "suffix": Neutral("", "x"),
}

RESPONSES: dict[str, Verdict] = {
    "access_programs": Refused({"cyber": "standard"}),
    "background": Neutral(False, True),
    "background_options": Refused({}),
    "context_management": Neutral([], [{"type": "compaction"}]),
    "conversation": Refused("conv_1"),
    "image": Refused({"context_compression": "enabled"}),
    "include": Understood(["message.output_text.logprobs"]),
    "input": Understood([HELLO]),
    "instructions": Understood("Be brief."),
    "max_output_tokens": Understood(9),
    "max_tool_calls": Neutral(3),
    "metadata": Understood({"k": "v"}),
    "model": Understood("other"),
    "moderation": Refused({"model": "m"}),
    "parallel_tool_calls": Understood(False, {"tools": [FLAT]}),
    "previous_response_id": Understood("resp_1"),
    "prompt": Refused({"id": "p"}),
    "prompt_cache_key": Understood("k"),
    "prompt_cache_options": Neutral({}, {"mode": "explicit"}),
    "prompt_cache_retention": Neutral("in_memory", "24h"),
    "reasoning": Understood({"effort": "high"}),
    "safety_identifier": Understood("s"),
    "service_tier": Understood("flex"),
    "store": Understood(False),
    "stream": Understood(True),
    "stream_options": Neutral(None, {"include_obfuscation": True}),
    "temperature": Understood(0.5),
    "text": Understood({"format": {"type": "json_object"}}),
    "tool_choice": Understood("required", {"tools": [FLAT]}),
    "tools": Understood([FLAT]),
    "top_logprobs": Understood(2, {"include": ["message.output_text.logprobs"]}),
    "top_p": Understood(0.5),
    "truncation": Understood("auto"),
    "user": Understood("u"),
}

COUNT_RESPONSES: dict[str, Verdict] = {
    "conversation": Refused("conv_1"),
    "input": Understood([HELLO]),
    "instructions": Understood("Be brief."),
    "model": Understood("other"),
    "parallel_tool_calls": Understood(False, {"tools": [FLAT]}),
    "personality": Refused("friendly"),
    "previous_response_id": Understood("resp_1"),
    "reasoning": Understood({"effort": "high"}),
    "text": Neutral({"format": {"type": "json_object"}}),
    "tool_choice": Understood("required", {"tools": [FLAT]}),
    "tools": Understood([FLAT]),
    "truncation": Understood("auto"),
}

PROMPT: dict[str, Verdict] = {
    "cache_control": Understood({"type": "ephemeral"}),
    "messages": Understood([HELLO, {"role": "assistant", "content": "Hi"}, HELLO]),
    "model": Understood("other"),
    "speed": Neutral("standard", "fast"),
    "system": Understood("Be brief."),
    "thinking": Understood({"type": "adaptive"}),
    "tool_choice": Understood({"type": "any"}, {"tools": [THEIRS]}),
    "tools": Understood([THEIRS]),
    "user_profile_id": Refused("p"),
    "workspace_id": Refused("w"),
}
OF_BETA: dict[str, Verdict] = {
    "billing_policy": Refused("x"),
    "compaction": Refused({}),
    "context_management": Refused({"edits": []}),
    "fallback_credit_token": Refused("x"),
    "fallbacks": Neutral([], [{"model": "m"}]),
    "mcp_servers": Neutral([], [{"type": "url", "url": "https://x", "name": "x"}]),
    "output_format": Understood({"type": "json_schema", "schema": {"type": "object"}}),
    "thread": Refused({}),
}
MESSAGES: dict[str, Verdict] = PROMPT | {
    "container": Refused("c"),
    "diagnostics": Refused({}),
    "inference_geo": Refused("eu"),
    "max_tokens": Understood(9),
    "metadata": Understood({"user_id": "u"}),
    "output_config": Understood({"format": {"type": "json_schema", "schema": {"type": "object"}}}),
    "service_tier": Neutral("standard_only"),
    "stop_sequences": Understood(["x"]),
    "stream": Understood(True),
    "temperature": Understood(0.5),
    "top_k": Understood(3),
    "top_p": Understood(0.5),
}
COUNT_MESSAGES: dict[str, Verdict] = PROMPT | {
    "output_config": Neutral({"format": {"type": "json_schema", "schema": {"type": "object"}}}),
}


class Request(NamedTuple):
    """One request of one SDK: its own types, our table, our parser, the smallest body."""

    types: tuple[Any, ...]
    table: dict[str, Verdict]
    parse: Callable[[bytes], Conversation]
    least: dict[str, Any]


REQUESTS = {
    "chat": Request(
        (chat.CompletionCreateParamsBase, chat.CompletionCreateParamsStreaming),
        CHAT,
        parse_chat,
        {"model": "m", "messages": [HELLO]},
    ),
    "completions": Request(
        (completions.CompletionCreateParamsBase, completions.CompletionCreateParamsStreaming),
        COMPLETIONS,
        parse_completion,
        {"model": "m", "prompt": "Once"},
    ),
    "responses": Request(
        (responses.ResponseCreateParamsBase, responses.ResponseCreateParamsStreaming),
        RESPONSES,
        parse_response,
        {"model": "m", "input": "Hi"},
    ),
    "response tokens": Request(
        (count_responses.InputTokenCountParams,),
        COUNT_RESPONSES,
        parse_input_tokens,
        {"model": "m", "input": "Hi"},
    ),
    "messages": Request(
        (messages.MessageCreateParamsBase, messages.MessageCreateParamsStreaming),
        MESSAGES,
        parse_messages,
        {"model": "m", "max_tokens": 5, "messages": [HELLO]},
    ),
    "beta messages": Request(
        (beta_messages.MessageCreateParamsBase, beta_messages.MessageCreateParamsStreaming),
        MESSAGES | OF_BETA,
        parse_messages,
        {"model": "m", "max_tokens": 5, "messages": [HELLO]},
    ),
    "message tokens": Request(
        (count_messages.MessageCountTokensParams,),
        COUNT_MESSAGES,
        parse_count_tokens,
        {"model": "m", "messages": [HELLO]},
    ),
}
# What this version of an SDK's types leaves out, and older ones have; or sends as a header.
DRAWING = {"temperature", "top_k", "top_p"}
LEFT_OUT = {"messages": DRAWING, "beta messages": {*DRAWING, "output_format", "betas"}}
CASES = [(name, param) for name, request in REQUESTS.items() for param in request.table]


def parsed(request: Request, **more: Any) -> Conversation:
    return request.parse(json.dumps(request.least | more).encode())


def refusal_of(request: Request, **more: Any) -> Any:
    with pytest.raises(RefusedError) as refused:
        parsed(request, **more)
    return refused.value.refusal


@pytest.mark.parametrize("name", REQUESTS)
def test_every_parameter_of_the_sdk_has_a_verdict(name: str) -> None:
    request = REQUESTS[name]
    of_sdk = {param for each in request.types for param in each.__annotations__}
    assert set(request.table) - LEFT_OUT.get(name, set()) == of_sdk - LEFT_OUT.get(name, set())


@pytest.mark.parametrize(("name", "param"), CASES)
def test_a_parameter_is_treated_as_its_verdict_says(name: str, param: str) -> None:
    request = REQUESTS[name]
    match request.table[param]:
        case Understood(value, beside):
            others = beside or {}
            assert parsed(request, **others, **{param: value}) != parsed(request, **others)
        case Neutral(value, refused):
            assert parsed(request, **{param: value}) == parsed(request)
            if refused is not None:
                beside = {"stream": True} if param == "stream_options" else {}
                named = refusal_of(request, **beside, **{param: refused}).param
                assert named.split(".")[0] == param
        case Refused(value):
            refusal = refusal_of(request, **{param: value})
            assert refusal.param == param
            assert refusal.code is Code.UNSUPPORTED
            assert param in refusal.message


@pytest.mark.parametrize("name", REQUESTS)
def test_what_nobody_knows_is_refused_by_its_name(name: str) -> None:
    refusal = refusal_of(REQUESTS[name], no_such_parameter=1)
    assert refusal.param == "no_such_parameter"
