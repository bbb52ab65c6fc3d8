"""What providers answer: usage, verdicts on refusals, odd answers."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code
from core.protocol import Usage
from gateway.conversation import (
    CallDelta,
    CallStart,
    ChoiceEnd,
    Delta,
    Opened,
    StreamEvent,
    ThoughtDelta,
)
from gateway.providers.answer import UpstreamAnswer
from gateway.providers.anthropic_answer import AnthropicAnswer
from gateway.providers.event_stream import ServerEvent
from gateway.providers.faults import Fault, FaultError
from gateway.providers.openai_answer import OpenAIAnswer
from gateway.providers.usage import AnthropicUsage, OpenAIUsage, from_anthropic, from_openai
from gateway.providers.verdict import refused, retry_after_ms, told_error

# Usage.

COUNTS = st.none() | st.integers(-5, 2**60)


@given(st.fixed_dictionaries({}, optional={
    "prompt_tokens": st.integers(-5, 2**60), "completion_tokens": st.integers(-5, 2**60),
    "total_tokens": COUNTS, "prompt_cache_hit_tokens": COUNTS,
    "prompt_tokens_details": st.none() | st.fixed_dictionaries(
        {"cached_tokens": COUNTS, "cache_write_tokens": COUNTS}),
    "completion_tokens_details": st.none() | st.fixed_dictionaries({"reasoning_tokens": COUNTS}),
}))  # fmt: skip
def test_whatever_openai_usage_is_told_can_be_billed(told: dict[str, Any]) -> None:

    assert from_openai(msgspec.convert(told, OpenAIUsage)).is_possible


@given(st.fixed_dictionaries({}, optional={
    "input_tokens": COUNTS, "output_tokens": COUNTS, "cache_read_input_tokens": COUNTS,
    "cache_creation_input_tokens": COUNTS,
    "cache_creation": st.none() | st.fixed_dictionaries(
        {"ephemeral_5m_input_tokens": COUNTS, "ephemeral_1h_input_tokens": COUNTS}),
    "output_tokens_details": st.none() | st.fixed_dictionaries({"thinking_tokens": COUNTS}),
}))  # fmt: skip
def test_whatever_anthropic_usage_is_told_can_be_billed(told: dict[str, Any]) -> None:

    assert from_anthropic(msgspec.convert(told, AnthropicUsage)).is_possible


def usage_of(**told: Any) -> Usage:

    kind = OpenAIUsage if "prompt_tokens" in told else AnthropicUsage
    read = msgspec.convert(told, kind)
    return from_openai(read) if isinstance(read, OpenAIUsage) else from_anthropic(read)


def test_cached_tokens_are_within_the_prompt_for_one_and_beside_it_for_the_other() -> None:
    openai = usage_of(
        prompt_tokens=100,
        completion_tokens=9,
        total_tokens=109,
        prompt_tokens_details={"cached_tokens": 60, "cache_write_tokens": 30},
        completion_tokens_details={"reasoning_tokens": 4},
    )
    anthropic = usage_of(
        input_tokens=10,
        cache_read_input_tokens=60,
        cache_creation_input_tokens=30,
        output_tokens=9,
        output_tokens_details={"thinking_tokens": 4},
    )
    assert (
        openai
        == anthropic
        == Usage(
            prompt_tokens=100,
            cached_tokens=60,
            cache_write_5m_tokens=30,
            output_tokens=9,
            reasoning_tokens=4,
        )
    )
    by_cache = {"ephemeral_1h_input_tokens": 5, "ephemeral_5m_input_tokens": 4}
    hour = usage_of(input_tokens=1, cache_creation_input_tokens=9, cache_creation=by_cache)
    assert (hour.cache_write_1h_tokens, hour.cache_write_5m_tokens) == (5, 4)


def test_reasoning_told_beside_the_answer_or_in_the_total_alone_is_counted_once() -> None:
    beside = {"completion_tokens_details": {"reasoning_tokens": 50}}
    assert usage_of(prompt_tokens=5, completion_tokens=10, **beside).output_tokens == 60
    assert usage_of(prompt_tokens=5, completion_tokens=10, total_tokens=65).output_tokens == 60
    assert (
        usage_of(prompt_tokens=5, completion_tokens=0, prompt_cache_hit_tokens=3).cached_tokens == 3
    )


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        ("null", None),
        ("[]", None),
        ('{"prompt_tokens": "many"}', None),
        ('{"prompt_tokens": 1e400}', None),
        (
            '{"prompt_tokens": 7.0, "completion_tokens": "3"}',
            Usage(prompt_tokens=7, output_tokens=3),
        ),
    ],
)
def test_usage_that_cannot_be_read_is_not_told_and_breaks_no_answer(told, usage) -> None:
    body = '{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}],"usage":%s}' % told  # noqa: UP031 - JSON is full of braces
    answer, events = of(body)
    assert answer.usage == usage
    assert len(events) == 3
    message = '{"content":[],"stop_reason":"end_turn","usage":%s}' % told.replace("prompt", "input")  # noqa: UP031 - JSON is full of braces
    claude_answer = AnthropicAnswer(prompt_tokens=5)
    claude_answer.whole(message.encode())
    assert claude_answer.usage is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "message", "index", "content", "tool_calls", "function", "name",
             "arguments", "finish_reason", "logprobs", "usage", "error", "type", "content_block",
             "text", "input", "stop_reason", "id", "token", "logprob"]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip
KINDS = st.sampled_from(
    [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop", "error", "ping"),
    ]
)


@given(st.lists(JSON | st.dictionaries(st.just("type"), KINDS), max_size=6), st.booleans())
def test_whatever_a_provider_sends_ends_in_events_or_in_a_fault(bodies, whole) -> None:
    for answer in (
        OpenAIAnswer(choices=2, prompt_tokens=5, wants_chances=True),
        AnthropicAnswer(prompt_tokens=5),
    ):
        events: list[StreamEvent] = []
        try:
            for body in bodies:
                text = json.dumps(body)
                more = answer.whole(text.encode()) if whole else answer.take(ServerEvent("", text))
                events += more
            events += answer.finish()
        except FaultError:
            continue
        assert not answer.open_choices
        assert isinstance(events[0], Opened)


@given(
    st.integers(400, 599), st.binary(max_size=60) | JSON.map(lambda body: json.dumps(body).encode())
)
def test_whatever_a_provider_refuses_with_is_a_refusal_of_ours(status, body) -> None:
    fault = refused(status, {}, body).fault
    assert 400 <= fault.refusal.status <= 599
    assert fault.refusal.message


# Verdicts.


@pytest.mark.parametrize(
    ("headers", "ms"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2_000),
        ({"retry-after": "0.5"}, 500),
        ({"retry-after-ms": "30", "retry-after": "9"}, 30),
        ({"retry-after": "99999"}, 120_000),
        ({"retry-after": "-4"}, 0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:30 GMT"}, 20_000),
    ],
)
def test_a_wait_is_read_in_every_form_and_bounded(headers, ms) -> None:
    assert retry_after_ms(headers, now_s=10.0) == ms


def fault_of(status: int, error: Any) -> Fault:
    body = error if isinstance(error, bytes) else json.dumps({"error": error}).encode()
    return refused(status, {}, body).fault


@pytest.mark.parametrize(
    ("status", "error", "kind", "code"),
    [
        (400, {"code": "context_length_exceeded", "message": "x"}, "context_window", "context"),
        (400, {"type": "invalid_request_error", "message": "prompt is too long"},
            "context_window", "context"),
        (400, {"code": "content_policy_violation", "message": "x"}, "content_policy", "policy"),
        (400, {"type": "invalid_request_error", "message": "bad image"}, "refused", "bad"),
        (413, {"type": "request_too_large", "message": "big"}, "refused", "large"),
        (400, {"message": "who knows", "type": 5}, "error", "away"),
        (400, b"<html>", "error", "away"),
        (422, [], "error", "away"),
        (400, "plain words", "error", "away"),
        (404, {"message": "no model gpt-secret"}, "error", "away"),
        (402, {"type": "billing_error", "message": "pay"}, "error", "away"),
        (429, {"code": "insufficient_quota", "message": "pay"}, "error", "away"),
    ],
)  # fmt: skip
def test_a_refusal_is_the_callers_only_where_it_plainly_is(status, error, kind, code) -> None:
    codes = {
        "context": Code.CONTEXT_LENGTH, "policy": Code.CONTENT_POLICY, "bad": Code.BAD_REQUEST,
        "large": Code.TOO_LARGE, "away": Code.UNAVAILABLE,
    }  # fmt: skip
    fault = fault_of(status, error)
    assert (fault.kind, fault.refusal.code) == (kind, codes[code])
    assert not fault.counts  # nothing that a caller can provoke opens the breaker
    assert fault.ours == (status in {404, 402, 429})
    if fault.refusal.code is Code.UNAVAILABLE:
        assert "secret" not in fault.refusal.message


def test_names_of_accounts_do_not_reach_the_caller() -> None:
    told = {
        "type": "invalid_request_error",
        "message": "in org-abcdef123 with sk-proj-99999\n" + "x" * 999,
    }
    message = fault_of(400, told).refusal.message
    assert "org-" not in message
    assert "sk-" not in message
    assert "\n" not in message
    assert len(message) < 600
    empty = fault_of(400, {"type": "invalid_request_error", "param": "n"})
    assert empty.refusal.message


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"error": {"type": "overloaded_error", "message": "x"}}, "capacity"),
        ({"error": {"code": 429, "message": "x"}}, "capacity"),
        ({"error": {"type": "timeout_error"}}, "timeout"),
        ({"error": {"type": "api_error"}}, "error"),
        ({"error": {"code": "content_filter"}}, "content_policy"),
        ({"error": {"message": "maximum context length is 5"}}, "context_window"),
        ([], "error"),
    ],
)
def test_an_error_within_an_answer_is_one_of_ours(event, kind) -> None:
    assert told_error(event).fault.kind == kind


# Odd answers.


def of(*chunks: Any, choices: int = 1) -> tuple[UpstreamAnswer, list[StreamEvent]]:
    answer = OpenAIAnswer(choices=choices, prompt_tokens=5)
    events: list[StreamEvent] = []
    for chunk in chunks:
        events += answer.take(
            ServerEvent("", chunk if isinstance(chunk, str) else json.dumps(chunk))
        )
    return answer, events


def delta(finish: str | None = None, **message: Any) -> dict[str, Any]:
    return {"choices": [{"delta": message, "finish_reason": finish}]}


def call(
    index: int | None = None,
    name: str | None = None,
    args: str | None = None,
    call_id: str | None = None,
) -> dict[str, Any]:
    function = {"name": name, "arguments": args}
    return {"tool_calls": [{"index": index, "id": call_id, "function": function}]}


def test_calls_are_told_apart_however_a_server_counts_them() -> None:
    _, events = of(
        delta(**call(0, "a", "", "1")),
        delta(**call(0, "a", "{}", "1")),  # repeats the name
        delta(**call(0, None, " ")),
        delta(**call(None, "b", '{"x":1}', "2")),  # names them and does not count
        delta(**call(3, "c")),
        delta("stop", tool_calls=[{"index": 3}]),
    )
    assert [event for event in events if isinstance(event, CallStart)] == [
        CallStart(choice=0, call=number, name=name) for number, name in enumerate("abc")
    ]
    assert [event.arguments for event in events if isinstance(event, CallDelta)] == [
        "{}", " ", '{"x":1}', "{}",
    ]  # fmt: skip
    assert events[-1] == ChoiceEnd(choice=0, finish="tool_calls")


def test_a_call_cut_off_by_the_bound_keeps_what_came() -> None:
    _, events = of(delta(**call(0, "a")), delta("length"))
    assert events[1:] == [
        CallStart(choice=0, call=0, name="a"), ChoiceEnd(choice=0, finish="length"),
    ]  # fmt: skip


def test_a_refusal_of_the_model_is_told_as_its_text() -> None:
    _, events = of(delta("stop", refusal="I cannot."))
    assert events[1] == Delta(choice=0, text="I cannot.")


def test_chunks_that_say_nothing_after_the_end_are_passed_over() -> None:
    answer, events = of(
        delta("stop", content="x"), delta("stop"), delta(), {"choices": None}, "[DONE]"
    )
    assert answer.over
    assert len(events) == 3


@pytest.mark.parametrize(
    "chunks",
    [
        [delta(**call(0, None, "{}"))],
        [delta(**call(0, "a")), delta(**call(1, None, "{}"))],
        [delta(**call(0, "a")), delta(**call(1, "b")), delta(**call(0, None, "{}"))],
        [delta("stop", content="x"), delta(**call(0, "a"))],
        [delta("stop"), "[DONE]", delta(content="x")],
        [{"choices": [{"index": -1, "delta": {"content": "x"}}]}],
        [{"choices": [{"delta": {"content": 5}}]}],
        ["[" * 5000],
        [{"error": {"message": "x"}}],
    ],
)
def test_an_answer_out_of_order_is_an_error(chunks) -> None:
    with pytest.raises(FaultError):
        of(*chunks)


def test_an_event_named_error_is_an_error_whatever_is_in_it() -> None:
    with pytest.raises(FaultError):
        OpenAIAnswer(choices=1, prompt_tokens=1).take(ServerEvent("error", '{"message":"x"}'))


def test_a_token_whose_bytes_are_none_is_an_error_and_one_without_is_its_text() -> None:
    def told(raw: Any) -> bytes:
        body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop",
            "logprobs": {"content": [{"token": "é", "logprob": -1, "bytes": raw}]}}]}  # fmt: skip
        answer = OpenAIAnswer(choices=1, prompt_tokens=1, wants_chances=True)
        event = answer.whole(json.dumps(body).encode())[1]
        assert isinstance(event, Delta)
        return event.chances[0].token

    assert told(None) == "é".encode()
    assert told([195]) == b"\xc3"
    with pytest.raises(FaultError):
        told([999])


START = {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 9}}}


def block(kind: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": {"type": kind, **more}}


def more_of(kind: str, index: int = 0, **said: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **said}}


def close(index: int = 0) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def end(reason: str | None) -> dict[str, Any]:
    return {
        "type": "message_delta",
        "delta": {"stop_reason": reason},
        "usage": {"output_tokens": 4},
    }


STOP = {"type": "message_stop"}


def claude(*events: dict[str, Any]) -> tuple[UpstreamAnswer, list[StreamEvent]]:
    answer = AnthropicAnswer(prompt_tokens=5)
    told: list[StreamEvent] = []
    for event in events:
        told += answer.take(ServerEvent(event["type"], json.dumps(event)))
    return answer, told


def test_thinking_is_told_with_its_signature() -> None:
    answer, events = claude(
        START,
        block("thinking", thinking=""),
        more_of("thinking_delta", thinking="hm"),
        more_of("signature_delta", signature="x"),
        close(),
        {"type": "ping"},
        {"type": "from_next_year"},
        block("redacted_thinking", 1, data="zz"),
        close(1),
        block("text", 2, text="a"),
        more_of("text_delta", 2, text="b"),
        more_of("citations_delta", 2),
        close(2),
        end("end_turn"),
        STOP,
    )
    assert events == [
        Opened(prompt_tokens=9),
        ThoughtDelta(choice=0, text="hm"),
        ThoughtDelta(choice=0, signature="x"),
        ThoughtDelta(choice=0, redacted="zz"),
        Delta(choice=0, text="a"),
        Delta(choice=0, text="b"),
        ChoiceEnd(choice=0, finish="stop"),
    ]
    assert answer.usage == Usage(prompt_tokens=9, output_tokens=4)
    assert answer.finish() == []


def test_a_call_may_say_its_input_at_once_or_in_pieces_or_not_at_all() -> None:
    _, events = claude(
        START,
        block("tool_use", name="a", input={"x": 1}), close(),
        block("tool_use", name="b", input={}), more_of("input_json_delta", partial_json='{"y":'),
        more_of("input_json_delta", partial_json=""),
        more_of("input_json_delta", partial_json="2}"), close(),
        block("tool_use", name="c"), close(),
        end("tool_use"),
    )  # fmt: skip
    said = [event.arguments for event in events if isinstance(event, CallDelta)]
    assert said == ['{"x":1}', '{"y":', "2}", "{}"]


def test_a_message_without_its_last_event_is_whole_once_it_said_why_it_stopped() -> None:
    answer, _ = claude(START, block("text", text="a"), close(), end("refusal"))
    assert answer.finish() == [ChoiceEnd(choice=0, finish="filtered")]
    untold = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}
    silent, events = claude(START, untold, STOP)
    assert events == [Opened(prompt_tokens=9), ChoiceEnd(choice=0, finish="length")]
    assert silent.over


@pytest.mark.parametrize(
    "events",
    [
        [block("text")],
        [START, START],
        [START, block("text"), block("text", 1)],
        [START, block("text"), close(1)],
        [START, more_of("text_delta", text="x")],
        [START, block("text"), more_of("input_json_delta", partial_json="x")],
        [START, block("text"), more_of("text_delta", 1, text="x")],
        [START, block("server_tool_use")],
        [START, end("end_turn"), block("text")],
        [end("end_turn")],
        [START, end("pause_turn"), STOP],
        [START, end(None), STOP],
        [START, block("text"), end("end_turn"), STOP],
        [START, end("end_turn"), STOP, STOP],
        [{"type": "error", "error": {"type": "overloaded_error"}}],
        [START, {"type": "content_block_delta", "index": "x"}],
    ],
)
def test_a_message_out_of_order_is_an_error(events) -> None:
    with pytest.raises(FaultError):
        claude(*events)


def test_a_message_that_is_none_is_an_error() -> None:
    for body in (b"{", b'{"type":"error","error":{}}', b"[" * 5000):
        with pytest.raises(FaultError):
            AnthropicAnswer(prompt_tokens=1).whole(body)


def test_what_cannot_be_paid_any_further_is_closed_with_length() -> None:
    answer, events = of({"choices": [{"index": 1, "delta": {"content": "x"}}]}, choices=2)
    assert answer.cut_short() == [
        ChoiceEnd(choice=0, finish="length"), ChoiceEnd(choice=1, finish="length"),
    ]  # fmt: skip
    assert len(events) == 2
