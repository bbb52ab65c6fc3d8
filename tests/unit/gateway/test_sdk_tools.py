"""Calls as both official SDKs gather them, streamed and whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Usage
from gateway import anthropic as anthropic_dialect
from gateway import openai as openai_dialect
from gateway.anthropic import AnthropicStream
from gateway.conversation import CallDelta, CallStart, ChoiceEnd, Delta, Finish
from gateway.openai import OpenAIChatStream, OpenAICompletionStream
from gateway.tools.cursor import Argued, Called, Said
from gateway.tools.parser import CallForm, CallParser
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.dialect_events import (
    CREATED_MS,
    REQUEST_ID,
    Told,
    a_conversation,
    called,
    finished_events,
    gathered,
    said,
    whole,
    written,
)
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.sdk_clients import JSON, MODEL, anthropic_client, openai_client
from tests.support.sse_frames import GrammarError

USAGE = Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2)
ASK = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "f")]
CALL: list[Told] = [
    Delta(choice=0, text="Hm."),
    CallStart(choice=0, call=0, name="look"),
    CallDelta(choice=0, call=0, arguments='{"at": '),
    CallDelta(choice=0, call=0, arguments="1}"),
    ChoiceEnd(choice=0, finish="tool_calls"),
]


def chat_stream(**changes: object) -> OpenAIChatStream:
    return OpenAIChatStream(a_conversation(**changes), request_id=REQUEST_ID, created_ms=CREATED_MS)


def message_stream() -> AnthropicStream:
    return AnthropicStream(a_conversation(dialect="anthropic"), request_id=REQUEST_ID)


@given(
    events=finished_events(n=2, tools=True, logprobs=True, finishes=("stop",)), pings=st.booleans()
)
def test_the_openai_sdk_s_accumulator_gathers_calls(events: list[Told], *, pings: bool) -> None:
    raw = written(chat_stream(n=2), whole(events, USAGE), pings=pings)
    summary = check_openai_chat_stream(raw, include_usage=False, n=2)
    with openai_client(raw).chat.completions.stream(
        model=MODEL, messages=ASK, tools=TOOLS
    ) as stream:
        answer = stream.get_final_completion()
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        told = [(call.function.name, call.function.arguments) for call in calls]
        assert told == called(events, choice.index)
        assert [call.id for call in calls] == [c["id"] for c in summary.calls[choice.index]]
        assert (choice.message.content or "") == said(events, choice.index)


@given(events=finished_events(tools=True), pings=st.booleans())
def test_the_anthropic_sdk_s_accumulator_gathers_calls(events: list[Told], *, pings: bool) -> None:
    raw = written(message_stream(), whole(events, USAGE), pings=pings)
    check_anthropic_stream(raw)
    with anthropic_client(raw).messages.stream(model=MODEL, max_tokens=5, messages=ASK) as stream:
        message = stream.get_final_message()
    told = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert told == [(name, json.loads(text)) for name, text in called(events, 0)]
    texts = [block.text for block in message.content if block.type == "text"]
    assert "".join(texts) == said(events, 0)


@given(events=finished_events(n=2, tools=True, logprobs=True))
def test_the_openai_sdk_reads_whole_calls_as_streamed_ones(events: list[Told]) -> None:
    conversation = a_conversation(n=2)
    answer = gathered(conversation, events, USAGE)
    body = openai_dialect.chat_json(
        answer, conversation, request_id=REQUEST_ID, created_ms=CREATED_MS
    )
    chat = openai_client(body, JSON).chat.completions.create(model=MODEL, messages=ASK)
    streamed = check_openai_chat_stream(
        written(chat_stream(n=2), whole(events, USAGE)), include_usage=False, n=2
    )
    for choice in chat.choices:
        calls = [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in choice.message.tool_calls or []
        ]
        assert calls == streamed.calls[choice.index]
        assert (choice.message.content or "") == said(events, choice.index)


@given(events=finished_events(tools=True))
def test_the_anthropic_sdk_reads_whole_calls_in_their_order(events: list[Told]) -> None:
    conversation = a_conversation(dialect="anthropic")
    answer = gathered(conversation, events, USAGE)
    body = anthropic_dialect.message_json(answer, conversation, request_id=REQUEST_ID)
    whole_message = anthropic_client(body, JSON).messages.create(
        model=MODEL, max_tokens=5, messages=ASK
    )
    raw = written(message_stream(), whole(events, USAGE))
    with anthropic_client(raw).messages.stream(model=MODEL, max_tokens=5, messages=ASK) as stream:
        streamed = stream.get_final_message()
    plain = [
        [block.to_dict() | {"citations": None} for block in message.content]
        for message in (whole_message, streamed)
    ]
    assert plain[0] == plain[1]


def events_of(parser: CallParser, pieces: list[str], cut_off: bool) -> list[Told]:  # noqa: FBT001 - drawn
    """As a delivery makes them."""
    events: list[Told] = []
    for text in [*pieces, ""]:
        for piece in parser.feed(text, final=text == ""):
            match piece:
                case Said(text=said_):
                    events.append(Delta(choice=0, text=said_))
                case Called(index=call, name=name):
                    events.append(CallStart(choice=0, call=call, name=name))
                case Argued(index=call, text=more):
                    events.append(CallDelta(choice=0, call=call, arguments=more))
    finish: Finish = "length" if cut_off else "tool_calls" if parser.called else "stop"
    return [*events, ChoiceEnd(choice=0, finish=finish)]


@given(
    form=st.sampled_from(["hermes", "llama", "mistral", "object", "list"]),
    pieces=st.lists(
        st.sampled_from(
            [
                *(
                    "<tool_call>",
                    "</tool_call>",
                    '{"name": "f"',
                    ', "arguments": {',
                    '"a": [1',
                    "]}",
                ),
                *(
                    "}",
                    " ",
                    "\n",
                    "text",
                    "[TOOL_CALLS]",
                    "f{",
                    "[",
                    "]",
                    ";",
                    "<|python_tag|>",
                    "é",
                ),
            ]
        ),
        max_size=16,
    ),
    parallel=st.booleans(),
    cut_off=st.booleans(),
)
def test_whatever_a_model_writes_both_streams_keep_their_grammar(
    form: CallForm,
    pieces: list[str],
    parallel: bool,  # noqa: FBT001 - drawn
    cut_off: bool,  # noqa: FBT001 - drawn
) -> None:
    events = events_of(CallParser(form, ("f",), parallel=parallel), pieces, cut_off)
    chat = check_openai_chat_stream(
        written(chat_stream(), whole(events, USAGE)), include_usage=False
    )
    message = check_anthropic_stream(written(message_stream(), whole(events, USAGE)))
    assert [call["arguments"] for call in chat.calls[0]] == [c["input"] for c in message.calls]
    assert chat.texts == [message.text]
    assert parallel or len(message.calls) <= 1
    answer = gathered(a_conversation(dialect="anthropic"), events, USAGE)
    body = anthropic_dialect.message_json(
        answer, a_conversation(dialect="anthropic"), request_id=REQUEST_ID
    )
    assert len(json.loads(body)["content"]) == message.blocks


def test_a_call_ends_an_answer_in_the_dialect_s_words() -> None:
    openai_answer = check_openai_chat_stream(
        written(chat_stream(), whole(CALL, USAGE)), include_usage=False
    )
    name = REQUEST_ID.removeprefix("req_")
    assert openai_answer.finishes == ["tool_calls"]
    assert openai_answer.calls == [
        [{"id": f"call_{name}_0_0", "name": "look", "arguments": '{"at": 1}'}]
    ]
    message = check_anthropic_stream(written(message_stream(), whole(CALL, USAGE)))
    assert message.stop_reason == "tool_use"
    assert message.calls == [{"id": f"toolu_{name}_0_0", "name": "look", "input": '{"at": 1}'}]


def test_an_answer_of_calls_alone_has_no_content() -> None:
    answer = gathered(a_conversation(), CALL[1:], USAGE)
    body = openai_dialect.chat_json(
        answer, a_conversation(), request_id=REQUEST_ID, created_ms=CREATED_MS
    )
    (choice,) = json.loads(body)["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_arguments_that_were_cut_off_are_told_as_such() -> None:
    events = [*CALL[:3], ChoiceEnd(choice=0, finish="length")]
    conversation = a_conversation(dialect="anthropic")
    body = anthropic_dialect.message_json(
        gathered(conversation, events, USAGE), conversation, request_id=REQUEST_ID
    )
    answer = json.loads(body)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][1]["input"] == {"INVALID_JSON": '{"at": '}


def test_completions_have_no_calls() -> None:
    conversation = a_conversation(kind="text", turns=(), prompt="Once")
    for event in CALL[1:3]:
        stream = OpenAICompletionStream(conversation, request_id=REQUEST_ID, created_ms=CREATED_MS)
        with pytest.raises(AssertionError):
            stream.write(event)


# The judges of calls judge.


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"arguments":"1}"', b'"arguments":""', "says nothing"),
        (b'"arguments":""', b'"arguments":"x"', "begins with arguments"),
        (b'"name":"look"', b'"name":""', "without a name"),
        (b'"type":"function"', b'"type":"tool"', "type is"),
        (b'"id":"call_', b'"id":"toolu_', "id is"),
        (
            b'{"index":0,"function":{"arguments":"1}"',
            b'{"index":2,"function":{"arguments":"1}"',
            "call 2",
        ),
    ],
)
def test_the_judge_of_chats_refuses_illegal_calls(old: bytes, new: bytes, reason: str) -> None:
    raw = written(chat_stream(), whole(CALL, USAGE))
    assert old in raw
    with pytest.raises(GrammarError, match=reason):
        check_openai_chat_stream(raw.replace(old, new), include_usage=False)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"input":{}', b'"input":{"a":1}', "begins with input"),
        (b'"type":"input_json_delta"', b'"type":"text_delta"', "in a call"),
        (b'"name":"look"', b'"name":""', "without a name"),
        (b'"id":"toolu_', b'"id":"call_', "id is"),
        (b'"content_block_delta","index":1', b'"content_block_delta","index":0', "index is"),
    ],
)
def test_the_judge_of_messages_refuses_illegal_calls(old: bytes, new: bytes, reason: str) -> None:
    raw = written(message_stream(), whole(CALL, USAGE))
    assert old in raw
    with pytest.raises(GrammarError, match=reason):
        check_anthropic_stream(raw.replace(old, new))
