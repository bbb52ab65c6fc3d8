"""Chat and completion streams, byte by byte and as any order of events."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code
from core.protocol import Usage
from gateway.conversation import Broke, ChoiceEnd, Delta, Done, Opened, TokenChance
from gateway.openai import OpenAIChatStream, OpenAICompletionStream, to_usage
from tests.support.dialect_events import (
    CREATED_MS,
    REQUEST_ID,
    a_conversation,
    a_refusal,
    broken,
    finished_events,
    said,
    usages,
    whole,
    written,
)
from tests.support.openai_grammar import check_openai_chat_stream, check_openai_completion_stream

CHAT_HEAD = (
    b'data: {"id":"chatcmpl-local_0123456789abcdef01234567","object":"chat.completion.chunk",'
    b'"created":1790000000,"model":"smollm2-135m-instruct","choices":['
)
TEXT_HEAD = (
    b'data: {"id":"cmpl-local_0123456789abcdef01234567","object":"text_completion",'
    b'"created":1790000000,"model":"smollm2-135m-instruct","choices":['
)
USAGE = Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2)
EVENTS = whole([Delta(choice=0, text="Hi"), ChoiceEnd(choice=0, finish="stop")], USAGE)


def chat(**changes: object) -> OpenAIChatStream:
    return OpenAIChatStream(a_conversation(**changes), request_id=REQUEST_ID, created_ms=CREATED_MS)


def text(**changes: object) -> OpenAICompletionStream:
    conversation = a_conversation(kind="text", turns=(), prompt="Once", **changes)
    return OpenAICompletionStream(conversation, request_id=REQUEST_ID, created_ms=CREATED_MS)


def test_a_chat_stream_byte_by_byte() -> None:
    assert written(chat(), EVENTS) == (
        CHAT_HEAD + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        b'"finish_reason":null}]}\n\n'
        + CHAT_HEAD
        + b'{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHAT_HEAD
        + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
        + b"data: [DONE]\n\n"
    )


def test_running_usage_is_what_was_produced_as_of_each_chunk() -> None:
    writer = chat(include_usage=True, running_usage=True)
    chunks = []
    for produced, event in zip((0, 1, 2, 2), EVENTS, strict=True):
        writer.produced = produced
        frames = writer.write(event).decode().split("\n\n")
        chunks += [json.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]
    told = [
        (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks
    ]
    assert told == [(9, 0), (9, 1), (9, 2), (9, 2)]


def test_a_completion_stream_byte_by_byte_with_usage() -> None:
    assert written(text(include_usage=True), EVENTS) == (
        TEXT_HEAD + b'{"index":0,"text":"Hi","logprobs":null,"finish_reason":null}],"usage":null}'
        b"\n\n"
        + TEXT_HEAD
        + b'{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],"usage":null}\n\n'
        + TEXT_HEAD
        + b'],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,'
        b'"prompt_tokens_details":{"cached_tokens":4},'
        b'"completion_tokens_details":{"reasoning_tokens":0}}}\n\n'
        b"data: [DONE]\n\n"
    )


def test_an_error_is_a_frame_that_names_the_request_when_the_fault_is_ours() -> None:
    raw = chat().broke(Broke(refusal=a_refusal(code=Code.INTERNAL, message="The worker died.")))
    assert raw == (
        b'data: {"error":{"message":"The worker died. (request ' + REQUEST_ID.encode() + b')",'
        b'"type":"server_error","param":null,"code":"internal_error"}}\n\n'
    )


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("stop", "stop"), ("length", "length"), ("filtered", "content_filter")],
)
def test_every_finish_has_its_reason(finish: str, reason: str) -> None:
    end = ChoiceEnd(choice=0, finish=finish)
    raw = written(chat(), whole([end], USAGE))
    assert check_openai_chat_stream(raw, include_usage=False).finishes == [reason]


def test_a_delta_that_says_nothing_is_no_frame() -> None:
    for stream in (chat(), text()):
        stream.open(Opened(prompt_tokens=1))
        assert stream.delta(Delta(choice=0, text="")) == b""


def test_keep_alive_is_a_comment() -> None:
    assert chat().keep_alive() == b": ping\n\n"


def test_events_out_of_order_are_a_broken_contract() -> None:
    with pytest.raises(AssertionError):
        chat().delta(Delta(choice=0, text="early"))
    with pytest.raises(AssertionError):
        chat().done(Done(usage=USAGE))
    stream = chat()
    stream.open(Opened(prompt_tokens=1))
    with pytest.raises(AssertionError):
        stream.open(Opened(prompt_tokens=1))
    with pytest.raises(AssertionError):
        stream.done(Done(usage=USAGE))
    stream.end(ChoiceEnd(choice=0, finish="stop"))
    with pytest.raises(AssertionError):
        stream.delta(Delta(choice=0, text="late"))


@given(data=st.data(), n=st.integers(1, 3), include_usage=st.booleans(), logprobs=st.booleans())
def test_any_answer_is_a_legal_chat_stream(
    data: st.DataObject, n: int, *, include_usage: bool, logprobs: bool
) -> None:
    events = data.draw(finished_events(n=n, logprobs=logprobs))
    usage = data.draw(usages())
    stream = chat(n=n, include_usage=include_usage, logprobs=2 if logprobs else None)
    raw = written(stream, whole(events, usage), pings=data.draw(st.booleans()))
    summary = check_openai_chat_stream(raw, include_usage=include_usage, n=n)
    assert summary.texts == [said(events, choice) for choice in range(n)]
    if include_usage:
        assert summary.usage is not None
        assert to_usage(summary.usage) == usage


@given(data=st.data(), n=st.integers(1, 3), include_usage=st.booleans(), logprobs=st.booleans())
def test_any_answer_is_a_legal_completion_stream(
    data: st.DataObject, n: int, *, include_usage: bool, logprobs: bool
) -> None:
    events = data.draw(finished_events(n=n, logprobs=logprobs))
    stream = text(n=n, include_usage=include_usage, logprobs=2 if logprobs else None)
    raw = written(stream, whole(events, data.draw(usages())), pings=data.draw(st.booleans()))
    summary = check_openai_completion_stream(raw, include_usage=include_usage, n=n)
    assert summary.texts == [said(events, choice) for choice in range(n)]


@given(data=st.data(), include_usage=st.booleans(), at=st.integers(0, 15))
def test_a_broken_answer_is_a_legal_stream_that_ends_with_the_error(
    data: st.DataObject, at: int, *, include_usage: bool
) -> None:
    events = broken(whole(data.draw(finished_events()), USAGE), at)
    raw = written(chat(include_usage=include_usage), events)
    summary = check_openai_chat_stream(raw, include_usage=include_usage)
    assert summary.error is not None
    assert summary.error["code"] == "server_is_overloaded"
    assert not summary.done
    raw = written(text(include_usage=include_usage), events)
    assert check_openai_completion_stream(raw, include_usage=include_usage).error is not None


@given(data=st.data(), at=st.integers(0, 2000))
def test_a_client_that_left_saw_the_beginning_of_a_legal_stream(
    data: st.DataObject, at: int
) -> None:
    raw = written(chat(), whole(data.draw(finished_events()), USAGE))[:at]
    check_openai_chat_stream(raw, include_usage=False, cut=True)


def data_of(frame: bytes) -> dict[str, object]:
    choice = json.loads(frame.removeprefix(b"data: "))["choices"][0]
    assert isinstance(choice, dict)
    return choice


def test_chat_logprobs_have_text_bytes_and_the_likeliest() -> None:
    stream = chat(logprobs=1)
    stream.open(Opened(prompt_tokens=1))
    chance = TokenChance(token="é".encode(), logprob=-0.5, top=((b"\xc3", -math.inf),))
    choice = data_of(stream.delta(Delta(choice=0, text="", chances=(chance,))))
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [0xC3, 0xA9],
                "top_logprobs": [
                    {"token": "bytes:\\xc3", "logprob": -9999.0, "bytes": [0xC3]},
                ],
            }
        ],
        "refusal": None,
    }


def test_completion_logprobs_count_characters_through_the_whole_choice() -> None:
    stream = text(logprobs=1, n=2)
    stream.open(Opened(prompt_tokens=1))
    smile = "😀".encode()

    def offsets(choice: int, *tokens: bytes) -> object:
        chances = tuple(TokenChance(token=token, logprob=-1.0) for token in tokens)
        logprobs = data_of(stream.delta(Delta(choice=choice, text="", chances=chances)))["logprobs"]
        assert isinstance(logprobs, dict)
        return logprobs["text_offset"]

    assert offsets(0, b"Hi ", smile[:2]) == [0, 3]
    assert offsets(0, smile[2:], b"!", b"") == [3, 4, 5]
    assert offsets(1, b"a", b"b") == [0, 1]


def test_completion_logprobs_list_the_chosen_token_with_the_likeliest() -> None:
    stream = text(logprobs=1)
    stream.open(Opened(prompt_tokens=1))
    chances = (
        TokenChance(token=b"a", logprob=-2.0, top=((b"b", -0.1),)),
        TokenChance(token=b"\x9f", logprob=-3.0),
    )
    assert data_of(stream.delta(Delta(choice=0, text="a", chances=chances)))["logprobs"] == {
        "tokens": ["a", "bytes:\\x9f"],
        "token_logprobs": [-2.0, -3.0],
        "top_logprobs": [{"b": -0.1, "a": -2.0}, None],
        "text_offset": [0, 1],
    }
