"""Chat requests: what is understood, and what is refused by name."""

import json

import pytest

from core.errors import Code, RefusedError
from gateway.conversation import Conversation, Turn
from gateway.fields import MESSAGES_MAX, VALUES_MAX
from gateway.openai import parse_chat

USER = [{"role": "user", "content": "Hello"}]


def parse(**changes: object) -> Conversation:
    body: dict[str, object] = {"model": "m", "messages": USER} | changes
    return parse_chat(json.dumps(body).encode())


def refused(body: bytes) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        parse_chat(body)
    assert caught.value.refusal.message
    return caught.value


def test_the_smallest_request_gets_the_interface_s_defaults() -> None:
    assert parse() == Conversation(
        dialect="openai", kind="chat", model="m", turns=(Turn(role="user", content="Hello"),)
    )


def test_every_parameter_reaches_the_conversation() -> None:
    conversation = parse(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        seed=12,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=3,
        n=2,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        service_tier="flex",
        user="u",
        prompt_cache_key="k",
    )
    assert conversation == Conversation(
        dialect="openai",
        kind="chat",
        model="m",
        turns=(Turn(role="user", content="Hello"),),
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        seed=12,
        stop=("a", "b"),
        logprobs=3,
        n=2,
        ignore_eos=True,
        stream=True,
        include_usage=True,
        service_class="batch",
        tier_asked=True,
        user="u",
        cache_key="k",
    )


def test_parts_are_joined_and_developer_speaks_as_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    conversation = parse(
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    )
    assert conversation.turns == (
        Turn(role="system", content="Be brief."),
        Turn(role="user", content="one\ntwo"),
    )


def test_roles_may_come_in_any_order() -> None:
    roles = ["assistant", "user", "user", "system", "assistant"]
    conversation = parse(messages=[{"role": role, "content": "x"} for role in roles])
    assert [turn.role for turn in conversation.turns] == roles


def test_an_answer_of_ours_may_be_sent_back_as_it_came() -> None:
    answer: dict[str, object] = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert parse(messages=[*USER, answer]).turns[1].content == "Hi"


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, 0), (-1, 2**63 - 1), (-(2**63), 0), (2**63 - 1, 2**63 - 1), (None, None)],
)
def test_a_signed_seed_maps_to_an_unsigned_one(seed: int | None, expected: int | None) -> None:
    assert parse(seed=seed).seed == expected


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ("auto", "standard"),
        ("default", "standard"),
        (None, "standard"),
        ("priority", "interactive"),
    ],
)
def test_a_service_tier_names_a_class(tier: str | None, expected: str) -> None:
    assert parse(service_tier=tier).service_class == expected


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ([], ()), ("x", ("x",)), (["x", "y"], ("x", "y"))]
)
def test_stop_is_null_a_string_or_strings(stop: object, expected: tuple[str, ...]) -> None:
    assert parse(stop=stop).stop == expected


def test_equal_token_limits_are_one_limit() -> None:
    assert parse(max_tokens=5, max_completion_tokens=5).max_tokens == 5


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": False}, {"logprobs": None}])
def test_logprobs_are_off_unless_asked_for(logprobs: dict[str, object]) -> None:
    assert parse(**logprobs).logprobs is None


def test_logprobs_without_a_count_are_the_chosen_token_s_alone() -> None:
    assert parse(logprobs=True).logprobs == 0


NEUTRAL = {
    "audio": None,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "function_call": "auto",
    "functions": [],
    "metadata": {},
    "modalities": ["text"],
    "moderation": None,
    "parallel_tool_calls": True,
    "prediction": None,
    "prompt_cache_options": {},
    "prompt_cache_retention": "in_memory",
    "reasoning_effort": None,
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "store": False,
    "stream_options": None,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": None,
    "verbosity": "medium",
    "web_search_options": None,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_value_that_changes_nothing_is_accepted(name: str) -> None:
    assert parse(**{name: NEUTRAL[name]}) == parse()


@pytest.mark.parametrize("name", [name for name in NEUTRAL if name != "metadata"])
def test_null_is_as_good_as_absent(name: str) -> None:
    assert parse(**{name: None}) == parse()


UNSUPPORTED = {
    "audio": {"voice": "alloy"},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {},
    "prediction": {"type": "content"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "store": True,
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_parameter_is_refused_by_name(name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(**{name: UNSUPPORTED[name]})
    refusal = caught.value.refusal
    assert (refusal.code, refusal.param) == (Code.UNSUPPORTED, name)
    assert refusal.message.startswith(f"{name}: not supported here")


BAD = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": ["Hello"]}, "messages[0]"),
    ({"messages": [*USER, {"content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
        "messages[0].content[0].y",
    ),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 4096}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400 // 10**100}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": 1}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"speed": 1}}, "stream_options.speed"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": 2}},
        "stream_options.continuous_usage_stats",
    ),
    ({"service_tier": "gold"}, "service_tier"),
    ({"service_tier": "g" * 100}, "service_tier"),
    ({"user": 5}, "user"),
    ({"user": "u" * 513}, "user"),
    ({"metadata": "x"}, "metadata"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"max_token": 5}, "max_token"),
    ({"x" * 100: 5}, "x" * 64 + "…"),
]


@pytest.mark.parametrize(("changes", "param"), BAD)
def test_a_bad_value_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(**changes)
    refusal = caught.value.refusal
    assert (refusal.code, refusal.status, refusal.param) == (Code.BAD_REQUEST, 400, param)
    assert param in refusal.message
    assert len(refusal.message) < 300


def test_a_limit_named_twice_is_told_with_both_values() -> None:
    with pytest.raises(RefusedError, match=r"max_tokens \(1\) and max_completion_tokens \(4096\)"):
        parse(max_tokens=1, max_completion_tokens=4096)


def test_an_unknown_argument_is_told_in_the_interface_s_words() -> None:
    with pytest.raises(RefusedError, match=r"^Unrecognized request argument supplied: max_token$"):
        parse(max_token=5)


def test_obfuscation_that_we_cannot_give_is_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        parse(stream=True, stream_options={"include_obfuscation": True})
    assert caught.value.refusal.code is Code.UNSUPPORTED
    assert caught.value.refusal.param == "stream_options.include_obfuscation"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x", "name": "f"}, "messages[0].role"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages[0].name"),
        (
            {"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_is_not_text_is_refused_as_unsupported(message: object, param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(messages=[message])
    assert (caught.value.refusal.code, caught.value.refusal.param) == (Code.UNSUPPORTED, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "m", }',
        b"[]",
        b"null",
        b'"text"',
        b"{} {}",
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        rb'{"model": "\ud800"}',
        rb'{"model": "\udc00x"}',
        b"\xef\xbb\xbf{}",
        b'{"model": NaN}',
        b'{"model": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    refusal = refused(body).refusal
    assert (refusal.code, refusal.param) == (Code.BAD_REQUEST, None)
    assert refusal.message.startswith("The request body")


def test_too_many_messages_are_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        parse(messages=USER * (MESSAGES_MAX + 1))
    assert caught.value.refusal.param == "messages"


def test_a_body_that_would_swell_in_memory_is_refused_unread() -> None:
    refusal = refused(b"[" + b"[]," * VALUES_MAX + b"[]]").refusal
    assert (refusal.code, refusal.status) == (Code.TOO_LARGE, 413)


def test_a_long_text_is_not_taken_for_many_values() -> None:
    text = "word " * (VALUES_MAX // 4)
    assert parse(messages=[{"role": "user", "content": text}]).turns[0].content == text


def test_usage_in_every_chunk_is_asked_for_beside_usage_at_the_end() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert parse(stream=True, stream_options=both).running_usage
    alone = parse(stream=True, stream_options={"continuous_usage_stats": True})
    assert not alone.running_usage
    assert not alone.include_usage
