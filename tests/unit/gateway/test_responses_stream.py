"""The stream of the Responses API: strict, and as the official SDK gathers it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Code
from core.protocol import Usage
from gateway.bill import Bill, bill_json, usage_headers
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
    TokenChance,
)
from gateway.items import CallItem, MessageItem
from gateway.responses import (
    ResponsesStream,
    answer_items,
    continued,
    deleted_json,
    input_tokens_json,
    items_json,
    parse_response,
    response_json,
)
from tests.support.dialect_events import (
    CREATED_MS,
    REQUEST_ID,
    a_refusal,
    broken,
    finished_events,
    gathered,
    usages,
    whole,
    written,
)
from tests.support.responses_grammar import check_responses_stream
from tests.support.sdk_clients import JSON, MODEL, openai_client
from tests.support.sse_frames import GrammarError

USAGE = Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2)


def a_request(**changes: Any) -> Conversation:
    body = {"model": MODEL, "input": "Hi", "stream": True} | changes
    return continued(parse_response(json.dumps(body).encode()), ())


def a_stream(conversation: Conversation | None = None, *, kept: bool = True) -> ResponsesStream:
    stream = ResponsesStream(
        conversation or a_request(), request_id=REQUEST_ID, created_ms=CREATED_MS
    )
    stream.kept, stream.ended_ms = kept, CREATED_MS + 5_000
    return stream


def body_of(events: list[Any], usage: Usage, conversation: Conversation | None = None) -> bytes:
    asked = conversation or a_request()
    return response_json(
        gathered(asked, events, usage),
        asked,
        request_id=REQUEST_ID,
        created_ms=CREATED_MS,
        ended_ms=CREATED_MS + 5_000,
        kept=True,
    )


TOLD = st.sampled_from(["stop", "length", "filtered"])


@given(data=st.data(), usage=usages(), tools=st.booleans(), pings=st.booleans())
def test_every_stream_is_legal_and_ends_in_the_whole_answer(
    data: st.DataObject, usage: Usage, *, tools: bool, pings: bool
) -> None:
    events = data.draw(finished_events(tools=tools))
    told = check_responses_stream(written(a_stream(), whole(events, usage), pings=pings))
    assert told.response == json.loads(body_of(events, usage))


@given(data=st.data())
def test_logprobs_are_told_with_their_texts(data: st.DataObject) -> None:
    events = data.draw(finished_events(logprobs=True))
    asked = a_request(include=["message.output_text.logprobs"])
    told = check_responses_stream(written(a_stream(asked), whole(events, USAGE)))
    count = sum(len(event.chances) for event in events if isinstance(event, Delta))
    parts = [part for item in told.output for part in item["content"]]
    assert sum(len(part["logprobs"]) for part in parts) == count
    assert told.response == json.loads(body_of(events, USAGE, asked))


# litellm #32357 and PR #33859 have the same in the Anthropic dialect: events out of their order.
@given(data=st.data(), at=st.integers(0, 20), tools=st.booleans())
def test_a_fault_at_any_point_is_an_error_and_a_failed_response(
    data: st.DataObject, at: int, *, tools: bool
) -> None:
    events = whole(data.draw(finished_events(tools=tools)), USAGE)
    told = check_responses_stream(written(a_stream(), broken(events, at)))
    assert told.status == "failed"
    assert told.error is not None
    assert told.response["store"] is False


@settings(max_examples=15)  # the SDK's own models take long
@given(data=st.data(), tools=st.booleans())
def test_the_sdk_s_accumulator_gathers_the_answer(data: st.DataObject, *, tools: bool) -> None:
    events = data.draw(finished_events(tools=tools, finishes=("stop",)))
    raw = written(a_stream(), whole(events, USAGE))
    with openai_client(raw).responses.stream(model=MODEL, input="Hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    told = json.loads(body_of(events, USAGE))
    assert [item.type for item in final.output] == [item["type"] for item in told["output"]]
    expected = [p["text"] for i in told["output"] for p in i.get("content", ())]
    assert final.output_text == "".join(expected)
    assert final.usage is not None
    assert final.usage.total_tokens == USAGE.prompt_tokens + USAGE.output_tokens


def test_the_sdk_reads_a_whole_answer_and_every_field_is_of_its_type() -> None:
    events = [
        Delta(choice=0, text="Well."),
        CallStart(choice=0, call=0, name="f"),
        CallDelta(choice=0, call=0, arguments="{}"),
        ChoiceEnd(choice=0, finish="tool_calls"),
    ]
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = body_of(events, USAGE, a_request(tools=[tool], tool_choice="auto", metadata={"a": "b"}))
    read = openai_client(body, JSON).responses.create(model=MODEL, input="Hi")
    type(read).model_validate(json.loads(body), strict=False)
    assert read.status == "completed"
    assert read.output_text == "Well."
    assert read.tools[0].type == "function"


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("filtered", "content_filter")]
)
def test_what_was_cut_short_is_incomplete_and_so_is_its_last_item(finish: Any, reason: str) -> None:
    events = [
        CallStart(choice=0, call=0, name="f"),
        CallDelta(choice=0, call=0, arguments="{}"),
        Delta(choice=0, text="Half"),
        ChoiceEnd(choice=0, finish=finish),
    ]
    told = check_responses_stream(written(a_stream(), whole(events, USAGE)))
    assert told.status == "incomplete"
    assert told.response["incomplete_details"] == {"reason": reason}
    assert [item["status"] for item in told.output] == ["completed", "incomplete"]
    first, last = answer_items(gathered(a_request(), events, USAGE), a_request(), REQUEST_ID)
    assert isinstance(first, CallItem)
    assert isinstance(last, MessageItem)
    assert (first.whole, last.whole) == (True, False)


def test_an_end_says_what_was_kept_and_what_it_cost() -> None:
    events: list[StreamEvent] = [
        Opened(prompt_tokens=1),
        ChoiceEnd(choice=0, finish="stop"),
        Done(usage=USAGE, bill=Bill(micro=12, currency="EUR")),
    ]
    told = check_responses_stream(written(a_stream(kept=False), events))
    assert told.response["store"] is False
    assert told.response["output"] == []
    assert told.response["usage"]["headworks"] == {"cost_micro": 12, "currency": "EUR"}


def test_headers_tell_tokens_and_what_they_cost_where_that_is_known() -> None:
    tokens = {
        "x-headworks-prompt-tokens": "9",
        "x-headworks-cached-tokens": "4",
        "x-headworks-output-tokens": "2",
    }
    assert usage_headers(USAGE, None) == tokens
    assert usage_headers(USAGE, Bill(micro=12, currency="EUR")) == {
        **tokens,
        "x-headworks-cost-micro": "12",
        "x-headworks-currency": "EUR",
    }
    assert bill_json(None) == {}


def test_a_limit_of_the_caller_s_is_told_as_one() -> None:
    limited = Broke(refusal=a_refusal(code=Code.RATE_LIMITED))
    told = check_responses_stream(written(a_stream(), [Opened(prompt_tokens=1), limited]))
    assert told.response["error"]["code"] == "rate_limit_exceeded"


def test_tokens_of_no_text_keep_their_logprobs() -> None:
    asked = a_request(include=["message.output_text.logprobs"])
    chance = TokenChance(token=b"\xf0", logprob=-1.0)
    call = CallStart(choice=0, call=0, name="f")
    end = ChoiceEnd(choice=0, finish="stop")
    for before in ([], [Delta(choice=0, text="a")], [call]):
        events = [*before, Delta(choice=0, text="", chances=(chance,)), end]
        told = check_responses_stream(written(a_stream(asked), whole(events, USAGE)))
        assert len(told.output[-1]["content"][0]["logprobs"]) == 1


def test_items_are_told_in_pages() -> None:
    items = tuple(MessageItem(id=f"i{n}", role="user", parts=(str(n),)) for n in range(3))
    page = json.loads(items_json(items, limit=2, newest_first=False, after="i0") or b"")
    assert [item["id"] for item in page["data"]] == ["i1", "i2"]
    assert page["has_more"] is False
    newest = json.loads(items_json(items, limit=1, newest_first=True, after=None) or b"")
    assert (newest["first_id"], newest["last_id"], newest["has_more"]) == ("i2", "i2", True)
    none = json.loads(items_json((), limit=1, newest_first=True, after=None) or b"")
    assert (none["data"], none["first_id"], none["last_id"]) == ([], None, None)
    assert items_json(items, limit=1, newest_first=True, after="x") is None


def test_small_bodies() -> None:
    assert json.loads(deleted_json("resp_1"))["deleted"] is True
    assert json.loads(input_tokens_json(3)) == {
        "object": "response.input_tokens",
        "input_tokens": 3,
    }


def _legal() -> list[bytes]:
    events = [
        Delta(choice=0, text="Well."),
        CallStart(choice=0, call=0, name="f"),
        CallDelta(choice=0, call=0, arguments="{}"),
        ChoiceEnd(choice=0, finish="tool_calls"),
    ]
    raw = written(a_stream(), whole(events, USAGE))
    return [frame + b"\n\n" for frame in raw.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("number", range(len(_legal())))
def test_the_judge_refuses_a_stream_without_any_one_of_its_events(number: int) -> None:
    frames = _legal()
    check_responses_stream(b"".join(frames))
    del frames[number]
    with pytest.raises(GrammarError):
        check_responses_stream(b"".join(frames))


@pytest.mark.parametrize("number", range(len(_legal()) - 1))
def test_the_judge_refuses_a_stream_with_two_events_swapped(number: int) -> None:
    frames = _legal()
    frames[number], frames[number + 1] = frames[number + 1], frames[number]
    with pytest.raises(GrammarError):
        check_responses_stream(b"".join(frames))
