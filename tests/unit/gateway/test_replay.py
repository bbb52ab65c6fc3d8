"""Answers kept as they were told: whole or not at all, and the same when told again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.idempotency import Claim
from core.money import EndCause
from core.protocol import Usage
from gateway.accumulator import Accumulator
from gateway.conversation import (
    CallDelta,
    CallStart,
    ChoiceEnd,
    Conversation,
    Delta,
    Done,
    Opened,
    PromptToken,
    StreamEvent,
    ThoughtDelta,
    TokenChance,
)
from gateway.replay import Keeping, Recorder, read_answer

CLAIM = Claim(scope="POST /", key="k", fingerprint="f")
DONE = Done(usage=Usage(prompt_tokens=3, output_tokens=4))
CHANCE = TokenChance(token=b"\xff", logprob=-1.5, top=((b"a", -2.0),))
TOLD: list[StreamEvent] = [
    Opened(prompt_tokens=3, prompt=(PromptToken(id=1, token=b"x"),), echo="Once"),
    Delta(choice=0, text="a", chances=(CHANCE,)),
    Delta(choice=0, text="b"),
    Delta(choice=1, text="c"),
    CallStart(choice=0, call=0, name="f"),
    CallDelta(choice=0, call=0, arguments="{"),
    CallDelta(choice=0, call=0, arguments="}"),
    CallStart(choice=0, call=1, name="g"),
    CallDelta(choice=0, call=1, arguments="{}"),
    ChoiceEnd(choice=0, finish="tool_calls"),
    ChoiceEnd(choice=1, finish="stop", stop="."),
    DONE,
]


def recorded(events: list[StreamEvent], bytes_max: int = 100_000) -> Recorder:
    recorder = Recorder(bytes_max)
    for event in events:
        recorder.take(event, 1, "req")
    return recorder


def test_an_answer_is_told_again_with_its_runs_joined() -> None:
    answer = read_answer(recorded(TOLD).answer(7) or b"")
    assert answer is not None
    assert (answer.request_id, answer.created_ms) == ("req", 7)
    assert answer.events == (
        (TOLD[0], 1),
        (Delta(choice=0, text="ab", chances=(CHANCE,)), 2),
        (TOLD[3], 1),
        (TOLD[4], 1),
        (CallDelta(choice=0, call=0, arguments="{}"), 2),
        *((event, 1) for event in TOLD[7:]),
    )


def test_thoughts_are_joined_up_to_what_ends_them() -> None:
    def think(text: str = "", **more: str) -> ThoughtDelta:
        return ThoughtDelta(choice=0, text=text, **more)

    events: list[StreamEvent] = [
        *(think("a"), think("b"), think(signature="s")),
        *(think("c"), think(redacted="r"), think("d")),
        *(ThoughtDelta(choice=1, text="e"), Delta(choice=1, text="f"), DONE),
    ]
    answer = read_answer(recorded(events).answer(7) or b"")
    assert answer is not None
    assert [event for event, _ in answer.events] == [
        *(think("ab", signature="s"), think("c"), think(redacted="r"), think("d")),
        *(ThoughtDelta(choice=1, text="e"), Delta(choice=1, text="f"), DONE),
    ]
    assert recorded(events, bytes_max=100).answer(7) == b""


pieces = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=4), st.booleans()), max_size=12)


@given(said=pieces)
def test_it_gathers_to_the_same_answer(said: list[tuple[int, str, bool]]) -> None:
    events: list[StreamEvent] = [Opened(prompt_tokens=1)]
    events += [Delta(choice=c, text=t, chances=(CHANCE,) * with_) for c, t, with_ in said]
    events += [*(ChoiceEnd(choice=c, finish="stop") for c in range(3)), DONE]
    kept = read_answer(recorded(events).answer(0) or b"")
    assert kept is not None
    conversation = Conversation(dialect="openai", kind="chat", model="m", n=3, logprobs=1)
    answers = []
    for told in (events, [event for event, _ in kept.events]):
        gathered = Accumulator(conversation)
        for event in told:
            if not isinstance(event, Done):
                gathered.take(event)
        answers.append(gathered.answer(DONE.usage))
    assert answers[0] == answers[1]
    assert sum(tokens for _, tokens in kept.events) == len(events)


def test_what_was_not_told_in_full_is_not_kept() -> None:
    assert recorded(TOLD[:-1]).answer(0) is None
    assert Recorder(100).answer(0) is None


@pytest.mark.parametrize("bytes_max", range(0, 600, 50))
def test_an_answer_over_its_bound_leaves_only_that_there_was_one(bytes_max: int) -> None:
    assert recorded(TOLD, bytes_max).answer(0) == b""


def test_only_a_whole_answer_is_kept_for_its_claim() -> None:
    keeping = Keeping(CLAIM, bytes_max=100_000, created_ms=7)
    for event in TOLD:
        keeping.recorder.take(event, 0, "req")
    for cause in EndCause:
        kept = keeping.kept(cause)
        is_whole = cause in {EndCause.COMPLETE, EndCause.LENGTH, EndCause.FILTERED}
        assert (kept is not None) == is_whole
        if kept is not None:
            assert (kept.scope, kept.key) == ("POST /", "k")
            assert read_answer(kept.answer) is not None
    assert Keeping(CLAIM, bytes_max=0, created_ms=7).kept(EndCause.COMPLETE) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode((2, "req", 0, [])),
        msgspec.msgpack.encode((1, "req", 0, [("Sung", {}, 0)])),
        msgspec.msgpack.encode((1, "req", 0, [("Delta", {"text": 5}, 0)])),
    ],
)
def test_what_cannot_be_read_is_no_answer(data: bytes) -> None:
    assert read_answer(data) is None
