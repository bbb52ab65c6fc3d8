"""Whatever the body, a dialect's parser answers with a sound conversation or a refusal."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Refusal, RefusedError
from core.protocol import Sampling
from gateway.anthropic import parse_count_tokens, parse_messages
from gateway.conversation import Conversation
from gateway.openai import parse_chat, parse_completion

Parser = Callable[[bytes], Conversation]

PARSERS: tuple[Parser, ...] = (parse_chat, parse_completion, parse_messages, parse_count_tokens)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=10),
    st.sampled_from(["user", "assistant", "system", "text", "image", "auto", "", 0, 1, 1.0, -1]),
)
names = st.sampled_from(
    [
        "model",
        "messages",
        "role",
        "content",
        "type",
        "text",
        "prompt",
        "system",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stop_sequences",
        "n",
        "logprobs",
        "top_logprobs",
        "stream",
        "stream_options",
        "include_usage",
        "metadata",
        "tools",
        "service_tier",
        "ignore_eos",
        "best_of",
        "user",
        "x",
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)
GOOD: dict[Parser, dict[str, Any]] = {
    parse_chat: {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
    parse_completion: {"model": "m", "prompt": "Once"},
    parse_messages: {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "Hello"}],
    },
    parse_count_tokens: {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
}


def assert_sound(conversation: Conversation) -> None:
    """What the relay may rely on without looking."""
    assert conversation.model
    if conversation.kind == "chat":
        assert conversation.turns
        assert conversation.prompt == ""
    else:
        assert conversation.prompt
        assert conversation.turns == ()
    assert all(turn.content for turn in conversation.turns)
    assert {turn.role for turn in conversation.turns} <= {"system", "user", "assistant"}
    assert conversation.max_tokens is None or conversation.max_tokens > 0
    assert conversation.temperature is None or 0 <= conversation.temperature <= 2
    assert conversation.top_p is None or 0 < conversation.top_p <= 1
    assert conversation.top_k is None or conversation.top_k >= 0
    assert conversation.seed is None or 0 <= conversation.seed < 2**63
    assert all(conversation.stop)
    assert conversation.logprobs is None or 0 <= conversation.logprobs <= 20
    assert 1 <= conversation.n <= 8
    assert conversation.stream or not conversation.include_usage
    Sampling(
        seed=conversation.seed or 0,
        max_tokens=conversation.max_tokens or 1,
        stop=conversation.stop,
        logprobs=conversation.logprobs,
    )


def assert_told(refusal: Refusal) -> None:
    assert refusal.message
    assert 400 <= refusal.status < 500


def try_parse(parser: Parser, body: bytes) -> Conversation | None:
    try:
        conversation = parser(body)
    except RefusedError as error:
        assert_told(error.refusal)
        return None
    assert_sound(conversation)
    return conversation


@pytest.mark.parametrize("parser", PARSERS)
@given(body=st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(parser: Parser, body: bytes) -> None:
    try_parse(parser, body)


@pytest.mark.parametrize("parser", PARSERS)
@given(value=values)
def test_any_json_is_parsed_or_refused(parser: Parser, value: object) -> None:
    try_parse(parser, json.dumps(value).encode())


@pytest.mark.parametrize("parser", PARSERS)
@given(changes=st.dictionaries(names, values, max_size=2))
def test_a_good_body_made_worse_is_parsed_or_refused(
    parser: Parser, changes: dict[str, object]
) -> None:
    assert try_parse(parser, json.dumps(GOOD[parser]).encode()) is not None
    try_parse(parser, json.dumps(GOOD[parser] | changes).encode())


@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.data())
def test_a_good_body_cut_or_damaged_is_parsed_or_refused(
    parser: Parser, data: st.DataObject
) -> None:
    body = bytearray(json.dumps(GOOD[parser]).encode())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try_parse(parser, bytes(body[: data.draw(st.integers(0, len(body)))]))


@pytest.mark.parametrize("parser", PARSERS[:3])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_what_the_client_leaves_out_is_left_to_the_model(parser: Parser, name: str) -> None:
    def said(**changes: object) -> object:
        return getattr(parser(json.dumps(GOOD[parser] | changes).encode()), name)

    assert said() is None
    assert said(**{name: None}) is None
    assert said(**{name: 1}) == 1


@pytest.mark.parametrize("parser", PARSERS[:3])
def test_greedy_and_off_are_said_and_not_left_out(parser: Parser) -> None:
    conversation = parser(json.dumps(GOOD[parser] | {"temperature": 0, "top_k": 0}).encode())
    assert (conversation.temperature, conversation.top_k) == (0.0, 0)


@given(text=st.text(min_size=1).filter(str.strip))
def test_text_arrives_as_it_was_sent(text: str) -> None:
    for parser in (parse_chat, parse_messages):
        messages = [{"role": "user", "content": text}]
        body = json.dumps(GOOD[parser] | {"messages": messages}, ensure_ascii=False).encode()
        assert parser(body).turns[0].content == text
