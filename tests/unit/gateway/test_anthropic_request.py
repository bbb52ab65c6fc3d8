"""Messages requests: what is understood, and what is refused by name."""

import json

import pytest

from core.errors import Code, RefusedError
from gateway.anthropic import parse_count_tokens, parse_messages
from gateway.conversation import Conversation, Turn

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi"}
HELLO = Turn(role="user", content="Hello")


def parse(**changes: object) -> Conversation:
    body: dict[str, object] = {"model": "m", "max_tokens": 5, "messages": [USER]} | changes
    return parse_messages(json.dumps(body).encode())


def user(*blocks: object) -> list[object]:
    return [{"role": "user", "content": list(blocks)}]


def test_the_smallest_request_gets_the_interface_s_defaults() -> None:
    assert parse() == Conversation(
        dialect="anthropic", kind="chat", model="m", turns=(HELLO,), max_tokens=5
    )


def test_every_parameter_reaches_the_conversation() -> None:
    conversation = parse(
        system="Be brief.",
        stop_sequences=["a"],
        temperature=0,
        top_p=0.5,
        top_k=40,
        stream=True,
        metadata={"user_id": "u"},
        service_tier="standard_only",
    )
    assert conversation == Conversation(
        dialect="anthropic",
        kind="chat",
        model="m",
        turns=(Turn(role="system", content="Be brief."), HELLO),
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        stop=("a",),
        stream=True,
        user="u",
    )


def test_blocks_are_joined_and_cache_control_has_no_effect() -> None:
    mark = {"type": "ephemeral"}
    blocks = [
        {"type": "text", "text": "one", "cache_control": mark},
        {"type": "text", "text": "two", "citations": None},
    ]
    conversation = parse(system=blocks, messages=user(*blocks), cache_control=mark)
    assert conversation.turns == (
        Turn(role="system", content="one\ntwo"),
        Turn(role="user", content="one\ntwo"),
    )


def test_consecutive_turns_of_one_role_are_one_turn() -> None:
    again = {"role": "user", "content": [{"type": "text", "text": "again"}]}
    assert parse(messages=[USER, again, ASSISTANT, ASSISTANT, USER]).turns == (
        Turn(role="user", content="Hello\nagain"),
        Turn(role="assistant", content="Hi\nHi"),
        HELLO,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"system": None},
        {"system": ""},
        {"system": []},
        {"tools": []},
        {"tools": None},
        {"tool_choice": {"type": "auto"}},
        {"tool_choice": {"type": "none"}},
        {"thinking": None},
        {"metadata": None},
        {"metadata": {}},
        {"stop_sequences": []},
        {"service_tier": "auto"},
        {"container": None},
        {"mcp_servers": []},
        {"output_config": {}},
        {"speed": "standard"},
        {"inference_geo": None},
        {"stream": False},
        {"cache_control": None},
    ],
)
def test_a_value_that_changes_nothing_is_accepted(changes: dict[str, object]) -> None:
    assert parse(**changes) == parse()


UNSUPPORTED = [
    ({"container": "c"}, "container"),
    ({"context_management": {}}, "context_management"),
    ({"diagnostics": {}}, "diagnostics"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"speed": "fast"}, "speed"),
    ({"messages": [USER, ASSISTANT]}, "messages"),
    ({"messages": user({"type": "document", "source": {}})}, "messages.0.content.0.type"),
    ({"system": [{"type": "image", "source": {}}]}, "system.0.type"),
    (
        {"messages": user({"type": "text", "text": "x", "citations": [{}]})},
        "messages.0.content.0.citations",
    ),
]

BAD = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [1]}, "messages.0"),
    ({"messages": [ASSISTANT, USER]}, "messages.0.role"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [USER, {"role": "user"}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": " \n"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages.0.content"),
    ({"messages": user("x")}, "messages.0.content.0"),
    ({"messages": user({"type": "text"})}, "messages.0.content.0.text"),
    ({"messages": user({"type": "text", "text": ""})}, "messages.0.content.0.text"),
    ({"messages": user({"type": "text", "text": "\t"})}, "messages.0.content.0.text"),
    ({"messages": user({"type": "text", "text": "x", "y": 1})}, "messages.0.content.0.y"),
    (
        {"messages": user({"type": "text", "text": "x", "cache_control": 1})},
        "messages.0.content.0.cache_control",
    ),
    ({"messages": [USER | {"name": "Ann"}]}, "messages.0.name"),
    ({"system": " "}, "system"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "text", "text": ""}]}, "system.0.text"),
    ({"temperature": 1.1}, "temperature"),
    ({"temperature": "x"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"stop_sequences": ["a", " "]}, "stop_sequences.1"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stream": 1}, "stream"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"metadata": {"name": "Ann"}}, "metadata.name"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"n": 2}, "n"),
    ({"max_completion_tokens": 2}, "max_completion_tokens"),
]


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [(c, Code.UNSUPPORTED, p) for c, p in UNSUPPORTED] + [(c, Code.BAD_REQUEST, p) for c, p in BAD],
)
def test_a_bad_value_is_refused_by_name(changes: dict[str, object], code: Code, param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(**changes)
    refusal = caught.value.refusal
    assert (refusal.code, refusal.status, refusal.param) == (code, 400, param)
    assert refusal.message.startswith(f"{param}: ")


def test_an_unknown_field_is_told_in_the_interface_s_words() -> None:
    with pytest.raises(RefusedError, match=r"^max_token: Extra inputs are not permitted$"):
        parse(max_token=5)


def test_a_system_message_is_pointed_to_its_parameter() -> None:
    with pytest.raises(RefusedError, match="top-level 'system'"):
        parse(messages=[{"role": "system", "content": "x"}])


def test_prefill_is_refused_in_so_many_words() -> None:
    with pytest.raises(RefusedError, match="prefill"):
        parse(messages=[USER, ASSISTANT])


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": "\xff"}', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    for parser in (parse_messages, parse_count_tokens):
        with pytest.raises(RefusedError) as caught:
            parser(body)
        assert caught.value.refusal.code is Code.BAD_REQUEST


def test_counting_reads_the_same_prompt() -> None:
    prompt = {"model": "m", "messages": [USER], "system": "Be brief.", "tools": []}
    counted = parse_count_tokens(json.dumps(prompt).encode())
    assert counted.turns == parse(**prompt).turns
    assert counted.max_tokens is None


def test_counting_takes_no_parameter_of_generation() -> None:
    body = json.dumps({"model": "m", "messages": [USER], "max_tokens": 5}).encode()
    with pytest.raises(RefusedError, match="max_tokens: Extra inputs are not permitted"):
        parse_count_tokens(body)
