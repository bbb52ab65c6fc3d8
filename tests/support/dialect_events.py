"""Hypothesis strategies for answers in the making, and builders with defaults."""

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from core.errors import Code, Refusal
from core.protocol import Usage
from gateway.accumulator import Accumulator
from gateway.conversation import (
    Answer,
    Broke,
    CallDelta,
    CallStart,
    ChoiceEnd,
    Conversation,
    Delta,
    Done,
    Finish,
    Opened,
    StreamEvent,
    StreamWriter,
    ThoughtDelta,
    TokenChance,
    Turn,
)

Told = Delta | ThoughtDelta | CallStart | CallDelta | ChoiceEnd

REQUEST_ID = "req_local_0123456789abcdef01234567"
CREATED_MS = 1_790_000_000_123

# Text that has broken somebody's framing: line ends of every kind, markers, half of an escape.
NASTY = (
    "data: [DONE]",
    "\n\n",
    "\r\n",
    "\r",
    "\x85",
    "\u2028",
    "\u2029",
    "\x0b\x0c\x1c",
    "\x00",
    "event: error\n",
    ": ping",
    "😀",
    "é",
    "中文",
    "\ufeff",
    '"\\u',
    "</script>",
)
texts = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=8)), max_size=4).map("".join)

chances = st.lists(
    st.builds(
        TokenChance,
        token=st.binary(max_size=4),
        logprob=st.floats(max_value=0, allow_nan=False),
        top=st.lists(
            st.tuples(st.binary(max_size=4), st.floats(max_value=0, allow_nan=False)), max_size=3
        ).map(tuple),
    ),
    max_size=3,
).map(tuple)


def a_conversation(**changes: Any) -> Conversation:
    fields: dict[str, Any] = {
        "dialect": "openai",
        "kind": "chat",
        "model": "smollm2-135m-instruct",
        "turns": (Turn(role="user", content="Hello"),),
        "stream": True,
    }
    return Conversation(**(fields | changes))


def a_refusal(**changes: Any) -> Refusal:
    fields: dict[str, Any] = {"code": Code.OVERLOADED, "message": "No replica is free."}
    return Refusal(**(fields | changes))


@st.composite
def finished_events(
    draw: st.DrawFn,
    *,
    n: int = 1,
    logprobs: bool = False,
    finishes: tuple[Finish, ...] = ("stop", "length", "filtered"),
    tools: bool = False,
    thoughts: bool = False,
) -> list[Told]:
    """Deltas, thoughts, calls and ends of `n` choices in any legal order."""
    events: list[Told] = []
    live = list(range(n))
    calls = [0] * n
    for _ in range(draw(st.integers(0, 12))):
        choice = draw(st.sampled_from(live))
        if thoughts and draw(st.booleans()):
            events += draw(_a_thought(choice))
            continue
        if tools and draw(st.booleans()):
            events += draw(_a_call(choice, calls[choice]))
            calls[choice] += 1
            continue
        drawn = draw(chances) if logprobs else ()
        events.append(Delta(choice=choice, text=draw(texts), chances=drawn))
        if len(live) > 1 and draw(st.booleans()):
            events.append(_end(draw, choice, finishes))
            live.remove(choice)
    events += [_end(draw, choice, finishes) for choice in live]
    return events


@st.composite
def _a_thought(draw: st.DrawFn, choice: int) -> list[Told]:
    """In pieces, signed or not; or sealed."""
    if draw(st.integers(0, 3)) == 0:
        return [ThoughtDelta(choice=choice, redacted="c2VhbGVk")]
    pieces: list[Told] = [
        ThoughtDelta(choice=choice, text=text) for text in draw(st.lists(texts, max_size=3))
    ]
    if draw(st.booleans()):
        pieces.append(ThoughtDelta(choice=choice, signature="c2lnbmVk"))
    return pieces


@st.composite
def _a_call(draw: st.DrawFn, choice: int, call: int) -> list[Told]:
    """Its arguments in pieces, none empty."""
    arguments = json.dumps(draw(st.dictionaries(texts, texts, max_size=2)), ensure_ascii=False)
    cuts = draw(st.lists(st.integers(0, len(arguments)), max_size=3))
    places = sorted({0, len(arguments), *cuts})
    start = CallStart(choice=choice, call=call, name=draw(st.sampled_from(["look", "f"])))
    pieces = (arguments[a:b] for a, b in pairwise(places))
    return [start, *(CallDelta(choice=choice, call=call, arguments=piece) for piece in pieces)]


def _end(draw: st.DrawFn, choice: int, finishes: tuple[Finish, ...]) -> ChoiceEnd:
    finish = draw(st.sampled_from(finishes))
    stop = draw(st.none() | st.just("\n")) if finish == "stop" else None
    return ChoiceEnd(choice=choice, finish=finish, stop=stop)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    count = st.one_of(st.just(0), st.integers(0, 10**6))
    fresh, cached, write_5m, write_1h, shown, reasoning = (draw(count) for _ in range(6))
    return Usage(
        prompt_tokens=fresh + cached + write_5m + write_1h,
        cached_tokens=cached,
        cache_write_5m_tokens=write_5m,
        cache_write_1h_tokens=write_1h,
        output_tokens=shown + reasoning,
        reasoning_tokens=reasoning,
    )


def whole(events: Iterable[Told], usage: Usage) -> list[StreamEvent]:
    """The same with its opening and its end."""
    opened = Opened(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
    return [opened, *events, Done(usage=usage)]


def broken(events: list[StreamEvent], at: int) -> list[StreamEvent]:
    """The same, with a fault after `at` events at most."""
    return [*events[: min(at, len(events) - 1)], Broke(refusal=a_refusal())]


def gathered(conversation: Conversation, events: Iterable[Told], usage: Usage) -> Answer:
    """The same as a whole answer."""
    accumulator = Accumulator(conversation)
    for event in whole(events, usage):
        accumulator.take(event)
    return accumulator.answer(usage)


def written(writer: StreamWriter, events: Iterable[StreamEvent], *, pings: bool = False) -> bytes:
    """Everything the writer says, with a keep-alive before each event if wanted."""
    return b"".join((writer.keep_alive() if pings else b"") + writer.write(e) for e in events)


def thought(events: Iterable[StreamEvent], choice: int) -> str:
    """What one choice was made to think."""
    return "".join(e.text for e in events if isinstance(e, ThoughtDelta) and e.choice == choice)


def called(events: Iterable[StreamEvent], choice: int) -> list[tuple[str, str]]:
    """The calls that one choice was made to make: names and arguments."""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case CallStart() if event.choice == choice:
                calls.append((event.name, ""))
            case CallDelta() if event.choice == choice:
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + event.arguments)
    return calls


def said(events: Iterable[StreamEvent], choice: int) -> str:
    """What one choice was made to say."""
    return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)
