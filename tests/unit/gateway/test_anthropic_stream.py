"""Messages streams, byte by byte and as any order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Usage
from gateway.anthropic import AnthropicStream, to_usage
from gateway.conversation import Broke, ChoiceEnd, Delta, Done, Opened, StreamEvent, TokenChance
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.dialect_events import (
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

Events = list[Delta | ChoiceEnd]
USAGE = Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2)


def a_stream() -> AnthropicStream:
    return AnthropicStream(a_conversation(dialect="anthropic"), request_id=REQUEST_ID)


def events(*texts: str, finish: str = "stop", stop: str | None = None) -> list[StreamEvent]:
    deltas = [Delta(choice=0, text=text) for text in texts]
    end = ChoiceEnd(choice=0, finish=finish, stop=stop)
    return whole([*deltas, end], USAGE)


START = (
    b"event: message_start\n"
    b'data: {"type":"message_start","message":{"id":"msg_local_0123456789abcdef01234567",'
    b'"type":"message","role":"assistant","model":"smollm2-135m-instruct","content":[],'
    b'"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":5,'
    b'"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":0,'
    b'"service_tier":"standard"}}}\n\n'
)


def end(reason: bytes, sequence: bytes = b"null") -> bytes:
    return (
        b"event: message_delta\n"
        b'data: {"type":"message_delta","delta":{"stop_reason":"' + reason + b'",'
        b'"stop_sequence":' + sequence + b'},"usage":{"input_tokens":5,'
        b'"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":2}}\n\n'
        b"event: message_stop\n"
        b'data: {"type":"message_stop"}\n\n'
    )


def test_a_stream_byte_by_byte() -> None:
    assert written(a_stream(), events("Hi", "", " there")) == (
        START + b"event: content_block_start\n"
        b'data: {"type":"content_block_start","index":0,'
        b'"content_block":{"type":"text","text":""}}\n\n'
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"Hi"}}\n\n'
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":" there"}}\n\n'
        b"event: content_block_stop\n"
        b'data: {"type":"content_block_stop","index":0}\n\n' + end(b"end_turn")
    )


def test_an_empty_answer_has_no_block() -> None:
    assert written(a_stream(), events()) == START + end(b"end_turn")


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", None, "end_turn"),
        ("stop", "\n", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("filtered", None, "refusal"),
    ],
)
def test_every_finish_has_its_reason(finish: str, stop: str | None, reason: str) -> None:
    summary = check_anthropic_stream(written(a_stream(), events("x", finish=finish, stop=stop)))
    assert (summary.stop_reason, summary.stop_sequence) == (reason, stop)


def test_an_error_is_an_event_and_nothing_follows() -> None:
    stream = a_stream()
    raw = stream.open(Opened(prompt_tokens=9, cached_tokens=4))
    raw += stream.broke(Broke(refusal=a_refusal()))
    assert raw == (
        START + b"event: error\n"
        b'data: {"type":"error","error":{"type":"overloaded_error",'
        b'"message":"No replica is free."},"request_id":"' + REQUEST_ID.encode() + b'"}\n\n'
    )


def test_keep_alive_is_a_comment_until_the_message_has_started() -> None:
    stream = a_stream()
    assert stream.keep_alive() == b": ping\n\n"
    stream.open(Opened(prompt_tokens=1))
    assert stream.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_events_out_of_order_are_a_broken_contract() -> None:
    stream = a_stream()
    for early in (
        Delta(choice=0, text="x"),
        ChoiceEnd(choice=0, finish="stop"),
        Done(usage=USAGE),
    ):
        with pytest.raises(AssertionError):
            stream.write(early)
    stream.open(Opened(prompt_tokens=1))
    stream.end(ChoiceEnd(choice=0, finish="stop"))
    for late in (
        Opened(prompt_tokens=1),
        Delta(choice=0, text="x"),
        ChoiceEnd(choice=0, finish="stop"),
    ):
        with pytest.raises(AssertionError):
            stream.write(late)


def test_this_dialect_has_one_choice() -> None:
    with pytest.raises(AssertionError):
        AnthropicStream(a_conversation(n=2), request_id=REQUEST_ID)


def test_logprobs_have_no_place_in_this_dialect() -> None:
    stream = a_stream()
    stream.open(Opened(prompt_tokens=1))
    chance = TokenChance(token=b"x", logprob=-1.0)
    assert stream.delta(Delta(choice=0, text="", chances=(chance,))) == b""


@given(drawn=finished_events(), usage=usages(), pings=st.booleans())
def test_any_answer_is_a_legal_stream(drawn: Events, usage: Usage, *, pings: bool) -> None:
    summary = check_anthropic_stream(written(a_stream(), whole(drawn, usage), pings=pings))
    assert summary.text == said(drawn, 0)
    assert to_usage(summary.usage) == usage


@given(drawn=finished_events(), at=st.integers(0, 15), pings=st.booleans())
def test_a_broken_answer_is_a_legal_stream_that_ends_with_the_error(
    drawn: Events, at: int, *, pings: bool
) -> None:
    summary = check_anthropic_stream(
        written(a_stream(), broken(whole(drawn, USAGE), at), pings=pings)
    )
    assert summary.error == {"type": "overloaded_error", "message": "No replica is free."}
    assert not summary.done


@given(drawn=finished_events(), at=st.integers(0, 2000))
def test_a_client_that_left_saw_the_beginning_of_a_legal_stream(drawn: Events, at: int) -> None:
    check_anthropic_stream(written(a_stream(), whole(drawn, USAGE))[:at], cut=True)
