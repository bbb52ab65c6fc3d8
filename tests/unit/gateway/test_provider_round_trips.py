"""Whatever the table of translations keeps is the same after a telling in the other dialect."""

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.anthropic import parse_messages
from gateway.conversation import Conversation
from gateway.openai import parse_chat
from gateway.thinking import Thinking
from tests.support.provider_world import a_provider, asked
from tests.unit.gateway.test_images import plain, shown
from tests.unit.gateway.test_provider_requests import SCHEMA, TOOLS, body_of

texts = st.text(st.characters(categories=("Ll", "Nd")), min_size=1)
parts = texts.map(lambda said: {"type": "text", "text": said}) | shown
users = st.lists(parts, min_size=1, max_size=4).map(lambda each: {"role": "user", "content": each})
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    """A system prompt, questions with pictures, answers that say something or call and hear."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    messages.append(draw(users))
    number = 0
    for _ in range(draw(st.integers(0, 3))):
        calls = []
        for _ in range(draw(st.integers(0, 2))):
            function = {"name": "get_weather", "arguments": json.dumps({"at": draw(texts)})}
            calls.append({"id": f"toolu_{number}", "type": "function", "function": function})
            number += 1
        answer: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
        messages.append(answer | ({"tool_calls": calls} if calls else {}))
        for call in calls:
            told = {"tool_call_id": call["id"], "content": draw(texts)}
            messages.append({"role": "tool", **told})
        messages.append(draw(users))
    chat: dict[str, Any] = {"messages": messages, "max_tokens": 99, "tools": TOOLS}
    more = {
        "tool_choice": draw(st.sampled_from(["auto", "none", "required"])),
        "parallel_tool_calls": draw(st.booleans()),
        "stop": draw(st.lists(texts, max_size=4, unique=True)),
        "reasoning_effort": draw(st.sampled_from([None, "none", "low", "xhigh", "max"])),
        "stream": draw(st.booleans()),
    }
    if draw(st.booleans()) and more["tool_choice"] == "none":
        more["response_format"] = NAMED
    return chat | more


def kept(conversation: Conversation) -> Conversation:
    """Without what names fields in the caller's words, or is of a dialect alone."""
    turns = tuple(
        msgspec.structs.replace(turn, images=plain(turn.images)) for turn in conversation.turns
    )
    toolbox, thinking = conversation.toolbox, conversation.thinking
    assert toolbox is not None
    tools = tuple(_typed(tool) for tool in toolbox.tools)
    return msgspec.structs.replace(
        conversation,
        turns=turns,
        toolbox=msgspec.structs.replace(
            toolbox,
            tools=tools,
            callable=tuple(_typed(tool) for tool in toolbox.callable),
            parallel=toolbox.parallel and toolbox.mode != "none",  # of none there are no two
        ),
        thinking=None if thinking is None else _unnamed(thinking),
        dialect="openai",
        model="",
        grammar_param="",
    )


def _typed(tool: Any) -> Any:
    return msgspec.structs.replace(tool, parameters={"type": "object", **tool.parameters})


def _unnamed(thinking: Thinking) -> Thinking:
    return msgspec.structs.replace(thinking, asked=())


@settings(max_examples=40)
@given(chats())
def test_a_chat_told_to_anthropic_is_read_as_the_same(chat: dict[str, Any]) -> None:
    conversation = asked(chat)
    provider = a_provider("anthropic", stream=conversation.stream)
    body = body_of(conversation, provider, max_tokens=99)
    again = parse_messages(json.dumps(body).encode())
    assert kept(again) == kept(conversation)
    # And back: `auto` and `max_tokens` are said where they were not.
    provider = a_provider("openai", stream=conversation.stream)
    told = parse_chat(json.dumps(body_of(again, provider, max_tokens=99)).encode())
    same = {name: getattr(conversation, name) for name in ("include_usage",)}
    assert _ids(kept(msgspec.structs.replace(told, **same))) == _ids(kept(conversation))


def _ids(conversation: Conversation) -> Any:
    """Ids are counted anew for each telling."""
    text = msgspec.json.encode(conversation).decode()
    return json.loads(text.replace('"toolu_', '"call_'))
