"""What peers' streams got wrong, tried on ours: each test is named after the symptom."""

import json
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest

from core.protocol import Usage
from gateway.anthropic import AnthropicStream
from gateway.conversation import (
    Broke,
    CallDelta,
    CallStart,
    ChoiceEnd,
    Conversation,
    Delta,
    Done,
    Opened,
    StreamEvent,
    StreamWriter,
)
from gateway.openai import OpenAIChatStream
from gateway.responses import ResponsesStream, continued, parse_response
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.dialect_events import (
    CREATED_MS,
    REQUEST_ID,
    a_conversation,
    a_refusal,
    written,
)
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.responses_grammar import check_responses_stream
from tests.support.sdk_clients import MODEL, anthropic_client, openai_client

ASK: Any = [{"role": "user", "content": "Hi"}]
USAGE = Usage(prompt_tokens=5, output_tokens=9)
CALLS: list[StreamEvent] = [
    Opened(prompt_tokens=5),
    Delta(choice=0, text="Let me see"),
    Delta(choice=0, text="."),
    CallStart(choice=0, call=0, name="look"),
    CallDelta(choice=0, call=0, arguments='{"at":'),
    CallDelta(choice=0, call=0, arguments='"Bern"}'),
    CallStart(choice=0, call=1, name="ask"),
    CallDelta(choice=0, call=1, arguments="{}"),
]
WHOLE = [*CALLS, ChoiceEnd(choice=0, finish="tool_calls"), Done(usage=USAGE)]
BROKEN = [*CALLS, Broke(refusal=a_refusal())]


def a_response() -> Conversation:
    return continued(parse_response(json.dumps({"model": MODEL, "input": "Hi"}).encode()), ())


def messages() -> StreamWriter:
    return AnthropicStream(a_conversation(dialect="anthropic"), request_id=REQUEST_ID)


def chat() -> StreamWriter:
    return OpenAIChatStream(a_conversation(), request_id=REQUEST_ID, created_ms=CREATED_MS)


def a_responses_stream() -> StreamWriter:
    return ResponsesStream(a_response(), request_id=REQUEST_ID, created_ms=CREATED_MS)


def frames(raw: bytes) -> list[dict[str, Any]]:
    lines = [line for line in raw.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# litellm #32357: two `message_start`, and the SDK gives up.
def test_a_message_starts_once_whatever_follows() -> None:
    for events in (WHOLE, BROKEN):
        raw = written(messages(), events, pings=True)
        kinds = [frame["type"] for frame in frames(raw)]
        assert kinds.count("message_start") == 1
        assert kinds[0] == "message_start"
        check_anthropic_stream(raw)


# litellm PR #33859: a delta of one kind in a block of another, which the SDK drops in silence.
def test_every_delta_is_of_its_block_s_kind() -> None:
    raw = written(messages(), WHOLE)
    kinds: dict[int, str] = {}
    for frame in frames(raw):
        if frame["type"] == "content_block_start":
            kinds[frame["index"]] = frame["content_block"]["type"]
        elif frame["type"] == "content_block_delta":
            allowed = {"text": "text_delta", "tool_use": "input_json_delta"}
            assert frame["delta"]["type"] == allowed[kinds[frame["index"]]]
    with anthropic_client(raw).messages.stream(model=MODEL, messages=ASK, max_tokens=9) as stream:
        text, first, second = stream.get_final_message().content
    assert text.type == "text"
    assert text.text == "Let me see."
    assert first.type == "tool_use"
    assert first.input == {"at": "Bern"}
    assert second.type == "tool_use"
    assert second.input == {}


# litellm #33224: several calls in blocks of one index.
def test_each_call_has_a_block_and_an_index_of_its_own() -> None:
    starts = [f for f in frames(written(messages(), WHOLE)) if f["type"] == "content_block_start"]
    assert [frame["index"] for frame in starts] == [0, 1, 2]
    ids = [frame["content_block"]["id"] for frame in starts[1:]]
    assert len(set(ids)) == len(ids)


# cursor-sdk2api #25, free-claude-code #43: an error that leaves clients waiting for an end.
def test_an_error_after_two_calls_is_the_stream_s_last_event_and_raises() -> None:
    raw = written(messages(), BROKEN)
    told = check_anthropic_stream(raw)
    assert told.error is not None
    assert b"[DONE]" not in raw
    assert frames(raw)[-1]["type"] == "error"
    with (
        pytest.raises(anthropic.APIStatusError),
        anthropic_client(raw).messages.stream(model=MODEL, messages=ASK, max_tokens=9) as stream,
    ):
        stream.until_done()


# The same of the other dialect: the SDK takes a stream that merely ends for a whole one.
def test_a_broken_chat_raises_and_never_says_that_it_is_done() -> None:
    raw = written(chat(), BROKEN)
    assert check_openai_chat_stream(raw, include_usage=False).error is not None
    assert b"[DONE]" not in raw
    with pytest.raises(openai.APIError):
        list(openai_client(raw).chat.completions.create(model=MODEL, messages=ASK, stream=True))


# ogx PR #5224: the error of a Responses stream was shaped as an HTTP error.
def test_a_broken_response_has_a_flat_error_and_a_failed_end() -> None:
    raw = written(a_responses_stream(), BROKEN)
    told = check_responses_stream(raw)
    assert [item["type"] for item in told.response["output"]] == [
        "message",
        "function_call",
        "function_call",
    ]
    events = list(openai_client(raw).responses.create(model=MODEL, input="Hi", stream=True))
    error, failed = events[-2:]
    assert error.type == "error"
    assert "No replica is free." in error.message
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"


def test_sequence_numbers_rise_by_one_through_every_event() -> None:
    for events in (WHOLE, BROKEN):
        numbers = [f["sequence_number"] for f in frames(written(a_responses_stream(), events))]
        assert numbers[0] == 0
        assert all(after == before + 1 for before, after in pairwise(numbers))
