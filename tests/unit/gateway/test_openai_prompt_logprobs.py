"""A prompt told back: `echo` with its logprobs, and vLLM's `prompt_logprobs`."""

import json
from typing import Any

import pytest

from core.protocol import Prompted, TokenLogprob, Usage
from gateway.accumulator import Accumulator
from gateway.conversation import (
    Answer,
    ChoiceEnd,
    Conversation,
    Delta,
    Done,
    Opened,
    PromptToken,
    StreamEvent,
    TokenChance,
)
from gateway.openai import (
    OpenAIChatStream,
    OpenAICompletionStream,
    chat_json,
    completion_json,
    parse_completion,
)
from gateway.relay.prompt import PromptSoFar
from tests.support.dialect_events import CREATED_MS, REQUEST_ID, a_conversation, written

USAGE = Usage(prompt_tokens=3, output_tokens=1)
PROMPT = (
    PromptToken(id=5, token=b"On"),
    PromptToken(
        id=6, token=b"ce", logprob=-0.5, top=((6, b"ce", -0.5), (7, b"ly", -1.5), (8, b"", -2.0))
    ),
    PromptToken(id=9, token=b"\xe2", logprob=-float("inf"), top=((7, b"ly", -0.1),)),
)
OPENED = Opened(prompt_tokens=3, prompt=PROMPT, echo="Once\u2026")
CHANCE = TokenChance(token=b" upon", logprob=-0.25, top=((b" upon", -0.25),))
EVENTS: list[StreamEvent] = [
    Delta(choice=0, text=" upon", chances=(CHANCE,)),
    ChoiceEnd(choice=0, finish="length"),
]


def a_text(**changes: object) -> Conversation:
    return a_conversation(kind="text", turns=(), prompt="Once\u2026", **changes)


def gathered(conversation: Conversation, opened: Opened = OPENED) -> Answer:
    accumulator = Accumulator(conversation)
    accumulator.open(opened)
    for event in EVENTS:
        if isinstance(event, Delta):
            accumulator.delta(event)
        elif isinstance(event, ChoiceEnd):
            accumulator.end(event)
    return accumulator.answer(USAGE)


def completion(conversation: Conversation, opened: Opened = OPENED) -> dict[str, Any]:
    """The only choice."""
    body = completion_json(
        gathered(conversation, opened), conversation, request_id=REQUEST_ID, created_ms=CREATED_MS
    )
    [choice] = json.loads(body)["choices"]
    return choice


def test_an_echoed_prompt_comes_before_the_answer_with_its_logprobs() -> None:
    choice = completion(a_text(echo=True, logprobs=2))
    assert choice["text"] == "Once\u2026 upon"
    told = choice["logprobs"]
    assert told["tokens"] == ["On", "ce", "bytes:\\xe2", " upon"]
    assert told["token_logprobs"] == [None, -0.5, -9999.0, -0.25]
    assert told["top_logprobs"] == [
        None,
        {"ce": -0.5, "ly": -1.5},
        {"ly": -0.1, "bytes:\\xe2": -9999.0},
        {" upon": -0.25},
    ]
    assert told["text_offset"] == [0, 2, 4, 4]


def test_an_echo_without_logprobs_is_text_alone() -> None:
    opened = Opened(prompt_tokens=3, echo="Once\u2026")
    choice = completion(a_text(echo=True), opened)
    assert (choice["text"], choice["logprobs"]) == ("Once\u2026 upon", None)


def test_prompt_logprobs_are_vllms_in_each_choice_of_a_completion() -> None:
    opened = Opened(prompt_tokens=3, prompt=PROMPT)
    choice = completion(a_text(prompt_logprobs=2), opened)
    assert choice["text"] == " upon"
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "ce"},
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": "ly"},
        },
        {
            "9": {"logprob": -9999.0, "rank": None, "decoded_token": "bytes:\\xe2"},
            "7": {"logprob": -0.1, "rank": 1, "decoded_token": "ly"},
        },
    ]


def test_prompt_logprobs_are_vllms_beside_the_choices_of_a_chat() -> None:
    conversation = a_conversation(prompt_logprobs=0)
    body = chat_json(
        gathered(conversation, Opened(prompt_tokens=3, prompt=PROMPT)),
        conversation,
        request_id=REQUEST_ID,
        created_ms=CREATED_MS,
    )
    told = json.loads(body)["prompt_logprobs"]
    assert told[0] is None
    assert told[1] == {"6": {"logprob": -0.5, "rank": None, "decoded_token": "ce"}}


def test_who_asks_for_none_is_told_none() -> None:
    assert "prompt_logprobs" not in completion(a_text())


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_begins_with_the_echo_of_each_choice(logprobs: int | None) -> None:
    conversation = a_text(echo=True, logprobs=logprobs, n=2)
    writer = OpenAICompletionStream(conversation, request_id=REQUEST_ID, created_ms=CREATED_MS)
    ends: list[StreamEvent] = [ChoiceEnd(choice=choice, finish="length") for choice in (0, 1)]
    data = written(writer, [OPENED, EVENTS[0], *ends, Done(usage=USAGE)])
    chunks = [
        json.loads(line.removeprefix("data: "))["choices"][0]
        for line in data.decode().split("\n\n")
        if line and not line.endswith("[DONE]")
    ]
    assert [(chunk["index"], chunk["text"]) for chunk in chunks[:3]] == [
        (0, "Once\u2026"),
        (1, "Once\u2026"),
        (0, " upon"),
    ]
    told = [chunk["logprobs"] and chunk["logprobs"]["text_offset"] for chunk in chunks[:3]]
    assert told == ([[0, 2, 4], [0, 2, 4], [4]] if logprobs else [None, None, [0]])


def test_a_chat_stream_has_no_echo() -> None:
    writer = OpenAIChatStream(a_conversation(), request_id=REQUEST_ID, created_ms=CREATED_MS)
    assert b"Once" not in writer.open(OPENED)


def test_echo_is_read() -> None:
    body = {"model": "m", "prompt": "Once"}
    assert parse_completion(json.dumps(body | {"echo": True}).encode()).echo
    assert not parse_completion(json.dumps(body).encode()).echo


class Spelling:
    """What `PromptSoFar` needs of text rules."""

    def token_bytes(self, id, /):  # noqa: A002 - the product's name
        return bytes([id])


def frame(start: int, *ids: int) -> Prompted:
    told = tuple(TokenLogprob(id=i, logprob=-float(i), top=((i, -1.0),)) for i in ids)
    return Prompted(start=start, logprobs=told)


def test_a_prompt_is_whole_when_all_its_frames_have_come() -> None:
    prompt = PromptSoFar((65, 66, 67, 68), Spelling())
    assert prompt.tokens == (PromptToken(id=65, token=b"A"),)
    taken = [(prompt.take(one), prompt.whole) for one in (frame(1, 66, 67), frame(3, 68))]
    assert taken == [(True, False), (True, True)]
    assert [one.token for one in prompt.tokens] == [b"A", b"B", b"C", b"D"]
    assert [one.top for one in prompt.tokens][2] == ((67, b"C", -1.0),)


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    assert PromptSoFar((65,), Spelling()).whole


def test_another_attempt_tells_again_what_is_known_and_goes_on() -> None:
    prompt = PromptSoFar((65, 66, 67, 68), Spelling())
    assert prompt.take(frame(1, 66))
    assert prompt.take(frame(1, 66, 67))
    assert prompt.take(frame(3, 68))
    assert prompt.whole
    assert prompt.take(frame(1, 66))  # and once more, after all of it
    assert len(prompt.tokens) == 4


@pytest.mark.parametrize(
    "wrong", [frame(2, 67), frame(1, 67), frame(0, 65), frame(1, 66, 67, 68, 69)]
)
def test_frames_that_are_not_of_this_prompt_are_not_taken(wrong: Prompted) -> None:
    prompt = PromptSoFar((65, 66, 67, 68), Spelling())
    assert not prompt.take(wrong)
    assert len(prompt.tokens) == 1
