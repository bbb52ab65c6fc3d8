"""Every split of every case, on every streaming route: what is told is what the whole is told."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.protocol import Usage
from gateway import anthropic, openai, responses
from gateway.conversation import CallDelta, CallStart, ChoiceEnd, Delta, Done, Opened
from gateway.safety.output import OutputScreen
from gateway.safety.screen import JSONScreen, Screen
from tests.support.safety_cases import CASES, a_book, pattern, pii, terms

IDS = [f"{type(case[0]).__name__}-{number}" for number, case in enumerate(CASES)]


def splits(text):
    """Whole, by character, and every one and two cuts."""
    yield [text]
    yield list(text)
    for first in range(1, len(text)):
        yield [text[:first], text[first:]]
        for second in range(first + 1, len(text)):
            yield [text[:first], text[first:second], text[second:]]


def fed(screen, pieces):
    return "".join([screen.feed(piece) for piece in pieces]) + screen.feed("", final=True)


@pytest.mark.parametrize(("detector", "text", "left"), CASES, ids=IDS)
def test_every_split_of_a_text_leaves_the_same(detector, text, left):
    book = a_book(detector, replacement="#")
    for pieces in splits(text):
        assert fed(Screen(book, book.output), pieces) == left, pieces


@pytest.mark.parametrize(("detector", "text", "left"), CASES, ids=IDS)
def test_every_split_of_escaped_arguments_leaves_the_same(detector, text, left):
    book = a_book(detector, replacement="#")
    raw = json.dumps({"a": [text]})
    if "^" in getattr(detector, "pattern", "") or "$" in getattr(detector, "pattern", ""):
        return  # a string within arguments is neither their beginning nor their end
    for pieces in ([raw], list(raw), *([raw[:at], raw[at:]] for at in range(1, len(raw)))):
        told = fed(JSONScreen(book, book.output), pieces)
        assert json.loads(told) == {"a": [left]}, pieces


@pytest.mark.parametrize(("detector", "text", "left"), CASES, ids=IDS)
@pytest.mark.parametrize("action", ["end", "block"])
def test_nothing_of_a_hit_is_told_where_it_ends_the_text(detector, text, left, action):
    book = a_book(detector, action=action)
    for pieces in splits(text):
        assert fed(Screen(book, book.output), pieces) == left.partition("#")[0]


@settings(max_examples=60, deadline=None)
@given(
    cases=st.lists(st.sampled_from(CASES), min_size=1, max_size=4),
    text=st.text(alphabet="abcs e1-. @4", max_size=30),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_policy_on_any_text_in_any_pieces_says_what_it_says_of_the_whole(cases, text, cuts):
    text = text.join([case[1] for case in cases])
    book = a_book(*[case[0] for case in cases])
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = fed(Screen(book, book.output), [text])
    assert fed(Screen(book, book.output), pieces) == whole
    assert fed(Screen(book, book.output), list(text)) == whole
    raw = json.dumps(text)
    masked = fed(JSONScreen(book, book.output), [raw])
    assert fed(JSONScreen(book, book.output), list(raw)) == masked
    json.loads(masked)


def chat_writer(conversation):
    return openai.OpenAIChatStream(conversation, request_id="req_1", created_ms=0)


def completion_writer(conversation):
    return openai.OpenAICompletionStream(conversation, request_id="req_1", created_ms=0)


def messages_writer(conversation):
    return anthropic.AnthropicStream(conversation, request_id="req_1")


def responses_writer(conversation):
    return responses.ResponsesStream(conversation, request_id="req_1", created_ms=0)


CHAT_BODY = b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"x"}],"stream":true}'
ROUTES = {
    "chat": (openai.parse_chat, CHAT_BODY, chat_writer),
    "completions": (
        openai.parse_completion, b'{"model":"m","prompt":"x","stream":true}', completion_writer,
    ),
    "messages": (anthropic.parse_messages, CHAT_BODY, messages_writer),
    "responses": (
        responses.parse_response, b'{"model":"m","input":"x","stream":true}', responses_writer,
    ),
}  # fmt: skip


def told_on(route, book, pieces, *, as_call=False):
    """The bytes of a stream, with these pieces as its prose or as a call's arguments."""
    parse, body, make_writer = ROUTES[route]
    conversation = parse(body)
    writer = make_writer(conversation)
    screen = OutputScreen(book, choices=1, is_json=False, tell=lambda *_: None)
    events = [Opened(prompt_tokens=1)]
    if as_call:
        events += [CallStart(choice=0, call=0, name="f")]
        events += [CallDelta(choice=0, call=0, arguments=piece) for piece in pieces]
    else:
        events += [Delta(choice=0, text=piece) for piece in pieces]
    events.append(ChoiceEnd(choice=0, finish="tool_calls" if as_call else "stop"))
    frames = [writer.write(told) for event in events for told in screen.take(event)]
    return b"".join([*frames, writer.write(Done(usage=Usage()))]).decode()


def said(stream):
    """All text and all arguments of a stream, in order."""
    told = []
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            delta = event.get("delta", {})
            if isinstance(delta, str):  # of /v1/responses
                told.append(delta)
                continue
            told += [delta.get("text", ""), delta.get("partial_json", "")]
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                told.append(delta.get("content") or choice.get("text") or "")
                told += [call["function"]["arguments"] for call in delta.get("tool_calls", ())]
    return "".join(told)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("detector", "text", "left"), CASES, ids=IDS)
def test_every_split_leaks_nothing_on_any_streaming_route(route, detector, text, left):
    book = a_book(detector, replacement="#")
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        assert said(told_on(route, book, pieces)) == left, pieces


@pytest.mark.parametrize("route", ["chat", "messages", "responses"])
def test_every_split_of_arguments_leaks_nothing_on_any_streaming_route(route):
    book = a_book(terms("secret"), pii("card"), pattern(r"[a-z]{3}\d"), replacement="#")
    raw = json.dumps({"to": "a sécret", "n": 4111111111111111, "x": ["abc7", True]})
    for at in range(1, len(raw)):
        told = said(told_on(route, book, [raw[:at], raw[at:]], as_call=True))
        assert json.loads(told) == {"to": "a #", "n": 9, "x": ["#", True]}


def test_neighbours_are_one_replacement_that_of_the_first_rule():
    book = a_book(terms("ab"), terms("bc", "cd"), replacement="#")
    assert fed(Screen(book, book.output), ["abcd", "ab ", "cd"]) == "# #"


def test_logging_holds_nothing_back_and_changes_nothing():
    book = a_book(terms("secret"), action="log")
    screen = Screen(book, book.output)
    assert [screen.feed(piece) for piece in ("se", "cr", "et")] == ["se", "cr", "et"]
    (hit,) = screen.take_hits()
    assert hit.text == "secret"
    assert screen.take_hits() == []


def test_a_hits_text_is_bounded_and_its_length_is_not():
    book = a_book(pattern("[ab]{300}"))
    screen = Screen(book, book.output)
    fed(screen, ["ab" * 200])
    (hit,) = screen.take_hits()
    assert (len(hit.text), hit.chars) == (256, 400)


def test_held_text_is_never_more_than_the_bound_that_is_stated():
    book = a_book(terms("secret"), pii(), replacement="#")
    screen = Screen(book, book.output)
    text = "secre +49 170 12345 a.b@c.d 4111 1111 1111 1 sk-aaaaaaaa eyJaaaa" * 20
    for given_chars, char in enumerate(text, 1):
        screen.feed(char)
        assert given_chars - screen._acting._base <= book.hold_chars
