"""Whole answers in each dialect's JSON."""

import json

import pytest

from core.protocol import Usage
from gateway import anthropic, openai
from gateway.accumulator import Accumulator
from gateway.conversation import (
    Answer,
    AnswerChoice,
    ChoiceEnd,
    Delta,
    StreamEvent,
    TokenChance,
)
from tests.support.dialect_events import CREATED_MS, REQUEST_ID, a_conversation

USAGE = Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2)
CHANCE = TokenChance(token=b"Hi", logprob=-0.5, top=((b"Hi", -0.5),))


def an_answer(**changes: object) -> Answer:
    fields: dict[str, object] = {"index": 0, "text": "Hi", "finish": "stop"}
    return Answer(choices=(AnswerChoice(**(fields | changes)),), usage=USAGE)


def test_a_chat_answer() -> None:
    body = openai.chat_json(
        an_answer(), a_conversation(), request_id=REQUEST_ID, created_ms=CREATED_MS
    )
    assert json.loads(body) == {
        "id": "chatcmpl-local_0123456789abcdef01234567",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "smollm2-135m-instruct",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hi",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_completion_answer_with_logprobs() -> None:
    body = openai.completion_json(
        an_answer(chances=(CHANCE,), finish="length"),
        a_conversation(kind="text", turns=(), prompt="Once", logprobs=1),
        request_id=REQUEST_ID,
        created_ms=CREATED_MS,
    )
    answer = json.loads(body)
    assert answer["object"] == "text_completion"
    assert answer["id"] == "cmpl-local_0123456789abcdef01234567"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Hi",
            "logprobs": {
                "tokens": ["Hi"],
                "token_logprobs": [-0.5],
                "top_logprobs": [{"Hi": -0.5}],
                "text_offset": [0],
            },
            "finish_reason": "length",
        }
    ]


def test_a_chat_answer_with_logprobs() -> None:
    body = openai.chat_json(
        an_answer(chances=(CHANCE,)),
        a_conversation(logprobs=1),
        request_id=REQUEST_ID,
        created_ms=CREATED_MS,
    )
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    assert json.loads(body)["choices"][0]["logprobs"] == {
        "content": [{**token, "top_logprobs": [token]}],
        "refusal": None,
    }


def test_a_message() -> None:
    body = anthropic.message_json(
        an_answer(stop="\n"), a_conversation(dialect="anthropic"), request_id=REQUEST_ID
    )
    assert json.loads(body) == {
        "id": "msg_local_0123456789abcdef01234567",
        "type": "message",
        "role": "assistant",
        "model": "smollm2-135m-instruct",
        "content": [{"type": "text", "text": "Hi", "citations": None}],
        "stop_reason": "stop_sequence",
        "stop_sequence": "\n",
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 2,
            "service_tier": "standard",
        },
    }


def test_an_empty_message_has_no_block() -> None:
    body = anthropic.message_json(
        an_answer(text=""), a_conversation(dialect="anthropic"), request_id=REQUEST_ID
    )
    assert json.loads(body)["content"] == []


def test_counted_tokens() -> None:
    assert anthropic.count_tokens_json(7) == b'{"input_tokens":7}'


def accumulated(events: list[StreamEvent], **changes: object) -> Answer:
    accumulator = Accumulator(a_conversation(**changes))
    for event in events:
        if isinstance(event, Delta):
            accumulator.delta(event)
        elif isinstance(event, ChoiceEnd):
            accumulator.end(event)
    return accumulator.answer(USAGE)


def test_events_add_up_to_an_answer() -> None:
    events: list[StreamEvent] = [
        Delta(choice=1, text="b", chances=(CHANCE,)),
        Delta(choice=0, text="a"),
        ChoiceEnd(choice=1, finish="length"),
        Delta(choice=0, text="c"),
        ChoiceEnd(choice=0, finish="stop", stop="d"),
    ]
    assert accumulated(events, n=2) == Answer(
        choices=(
            AnswerChoice(index=0, text="ac", finish="stop", stop="d"),
            AnswerChoice(index=1, text="b", finish="length"),
        ),
        usage=USAGE,
    )
    assert [choice.chances for choice in accumulated(events, n=2, logprobs=1).choices] == [
        (),
        (CHANCE,),
    ]


def test_an_answer_wants_every_choice_ended_once_and_nothing_after() -> None:
    end = ChoiceEnd(choice=0, finish="stop")
    with pytest.raises(AssertionError):
        accumulated([end], n=2)
    with pytest.raises(AssertionError):
        accumulated([end, end])
    with pytest.raises(AssertionError):
        accumulated([end, Delta(choice=0, text="late")])


@pytest.mark.parametrize(
    ("service_class", "theirs", "ours"),
    [
        ("standard", "default", "standard"),
        ("batch", "flex", "batch"),
        ("interactive", "priority", "priority"),
    ],
)
def test_who_named_a_tier_is_told_the_one_that_served(
    service_class: str, theirs: str, ours: str
) -> None:
    asked = a_conversation(service_class=service_class, tier_asked=True)
    for write in (openai.chat_json, openai.completion_json):
        body = write(an_answer(), asked, request_id=REQUEST_ID, created_ms=CREATED_MS)
        assert json.loads(body)["service_tier"] == theirs
    message = anthropic.message_json(an_answer(), asked, request_id=REQUEST_ID)
    assert json.loads(message)["usage"]["service_tier"] == ours
