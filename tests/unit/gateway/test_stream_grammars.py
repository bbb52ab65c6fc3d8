"""The judges of every stream must themselves refuse what is illegal, and say why."""

from collections.abc import Callable

import pytest

from core.protocol import Usage
from gateway.anthropic import AnthropicStream
from gateway.conversation import ChoiceEnd, Delta
from gateway.openai import OpenAIChatStream, OpenAICompletionStream
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.dialect_events import CREATED_MS, REQUEST_ID, a_conversation, whole, written
from tests.support.openai_grammar import check_openai_chat_stream, check_openai_completion_stream
from tests.support.sse_frames import GrammarError

EVENTS = whole(
    [Delta(choice=0, text="Hi"), ChoiceEnd(choice=0, finish="stop")],
    Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2),
)
USING = a_conversation(include_usage=True)
PLAIN = a_conversation()

Edit = Callable[[list[bytes]], list[bytes]]


def chat_frames(*, include_usage: bool) -> list[bytes]:
    conversation = USING if include_usage else PLAIN
    stream = OpenAIChatStream(conversation, request_id=REQUEST_ID, created_ms=CREATED_MS)
    return frames(written(stream, EVENTS))


def completion_frames() -> list[bytes]:
    stream = OpenAICompletionStream(PLAIN, request_id=REQUEST_ID, created_ms=CREATED_MS)
    return frames(written(stream, EVENTS))


def message_frames() -> list[bytes]:
    return frames(written(AnthropicStream(PLAIN, request_id=REQUEST_ID), EVENTS))


def frames(raw: bytes) -> list[bytes]:
    return [frame + b"\n\n" for frame in raw.split(b"\n\n")[:-1]]


def drop(i: int) -> Edit:
    return lambda frames: [*frames[:i], *frames[i + 1 :]]


def double(i: int) -> Edit:
    return lambda frames: [*frames[: i + 1], *frames[i:]]


def swap(i: int, j: int) -> Edit:
    def edit(frames: list[bytes]) -> list[bytes]:
        frames[i], frames[j] = frames[j], frames[i]
        return frames

    return edit


def insert(i: int, frame: bytes) -> Edit:
    return lambda frames: [*frames[:i], frame, *frames[i:]]


def replace(i: int, old: bytes, new: bytes) -> Edit:
    def edit(frames: list[bytes]) -> list[bytes]:
        assert old in frames[i]
        frames[i] = frames[i].replace(old, new)
        return frames

    return edit


def numbered(cases: list[tuple[Edit, str]]) -> list[str]:
    """Two faults may have one reason."""
    return [f"{i}-{reason}" for i, (_, reason) in enumerate(cases)]


ERROR = b'data: {"error":{"message":"m","type":"t","param":null,"code":"c"}}\n\n'

# Frames: 0 role, 1 content, 2 finish, 3 [DONE].
CHAT: list[tuple[Edit, str]] = [
    (drop(0), "begins with"),
    (drop(2), "before every choice ended"),
    (drop(3), r"without \[DONE\]"),
    (double(0), "delta has keys"),
    (double(2), "goes on after its end"),
    (double(3), r"a frame after \[DONE\]"),
    (swap(1, 2), "goes on after its end"),
    (insert(4, ERROR), r"a frame after \[DONE\]"),
    (insert(2, ERROR), "a frame after an error"),
    (insert(1, b"event: ping\ndata: {}\n\n"), "a named event"),
    (insert(1, b"data: {\n\n"), "not JSON"),
    (insert(1, b"data: []\n\n"), "not an object"),
    (insert(1, b'data: {"a":NaN}\n\n'), "not JSON"),
    (insert(1, b"data: \xff\n\n"), "not UTF-8"),
    (insert(1, b"data: a\ndata: b\n\n"), "2 lines of data"),
    (insert(1, b"id: 5\n\n"), "without data"),
    (insert(1, b": ping\ndata: {}\n\n"), "a comment shares"),
    (replace(1, b"Hi", "\u2028".encode()), "another line end"),
    (replace(1, b"Hi", b""), "says nothing"),
    (replace(1, b'"Hi"', b"5"), "content is 5"),
    (replace(1, b'"index":0', b'"index":1'), "index is 1"),
    (replace(1, b'"logprobs":null,', b""), "a choice has keys"),
    (replace(1, b'"logprobs":null', b'"logprobs":{"content":[],"refusal":null}'), "no token"),
    (replace(0, b'"finish_reason":null', b'"finish_reason":"stop"'), "has a finish_reason"),
    (replace(0, b'"logprobs":null', b'"logprobs":{}'), "has logprobs"),
    (replace(2, b'"delta":{}', b'"delta":{"content":"x"}'), "has a delta"),
    (replace(2, b'"logprobs":null', b'"logprobs":{}'), "has logprobs"),
    (replace(2, b'"stop"', b'"done"'), "finish_reason is 'done'"),
    (replace(0, b"chatcmpl-", b"cmpl-"), "id is"),
    (replace(1, b"chatcmpl-l", b"chatcmpl-x"), "the head changed"),
    (replace(1, b'"created":1', b'"created":2'), "the head changed"),
    (replace(0, b'"created":1790000000', b'"created":1.5'), "created"),
    (replace(1, b"completion.chunk", b"completion"), "object is"),
    (replace(1, b"}]}", b'}],"usage":null}'), "a chunk has keys"),
    (replace(3, b"\n\n", b"\n"), "inside a frame"),
    (insert(2, b'data: {"error":{"message":"m"}}\n\n'), "error has keys"),
    (insert(2, ERROR.replace(b'"c"', b"5")), "error.code"),
    (insert(2, ERROR.replace(b'"m"', b'""')), "error.message is empty"),
]


@pytest.mark.parametrize(("edit", "reason"), CHAT, ids=numbered(CHAT))
def test_an_illegal_chat_stream_is_refused(edit: Edit, reason: str) -> None:
    check_openai_chat_stream(b"".join(chat_frames(include_usage=False)), include_usage=False)
    with pytest.raises(GrammarError, match=reason):
        check_openai_chat_stream(
            b"".join(edit(chat_frames(include_usage=False))), include_usage=False
        )


# Frames: 0 role, 1 content, 2 finish, 3 usage, 4 [DONE].
USAGE: list[tuple[Edit, str]] = [
    (drop(3), "without the usage chunk"),
    (double(3), "after the usage chunk"),
    (swap(2, 3), "before every choice ended"),
    (replace(1, b'"usage":null', b'"usage":{}'), "usage before the usage chunk"),
    (replace(3, b'"total_tokens":11', b'"total_tokens":12'), "total_tokens is off"),
    (replace(3, b'"cached_tokens":4', b'"cached_tokens":10'), "cached_tokens is over"),
    (replace(3, b'"prompt_tokens":9', b'"prompt_tokens":-9'), "not a count"),
    (replace(3, b'"total_tokens":11,', b""), "usage has keys"),
]


@pytest.mark.parametrize(("edit", "reason"), USAGE, ids=numbered(USAGE))
def test_an_illegal_usage_chunk_is_refused(edit: Edit, reason: str) -> None:
    check_openai_chat_stream(b"".join(chat_frames(include_usage=True)), include_usage=True)
    with pytest.raises(GrammarError, match=reason):
        check_openai_chat_stream(
            b"".join(edit(chat_frames(include_usage=True))), include_usage=True
        )


def test_usage_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(GrammarError):
        check_openai_chat_stream(b"".join(chat_frames(include_usage=True)), include_usage=False)
    bare = [frame.replace(b',"usage":null', b"") for frame in chat_frames(include_usage=True)]
    bare[3] = bare[3].replace(b',"usage":{', b',"us":{')
    with pytest.raises(GrammarError, match="a chunk has keys"):
        check_openai_chat_stream(b"".join(bare), include_usage=False)


# Frames: 0 text, 1 finish, 2 [DONE].
COMPLETION: list[tuple[Edit, str]] = [
    (drop(1), "before every choice ended"),
    (swap(0, 1), "goes on after its end"),
    (replace(0, b'"Hi"', b"null"), "text is None"),
    (replace(0, b'"Hi"', b'""'), "says nothing"),
    (
        replace(
            0,
            b'"logprobs":null',
            b'"logprobs":{"tokens":["a"],"token_logprobs":[],"top_logprobs":[],"text_offset":[]}',
        ),
        "differ in length",
    ),
    (
        replace(
            0,
            b'"logprobs":null',
            b'"logprobs":{"tokens":["a","b"],"token_logprobs":[0,0],"top_logprobs":[null,null],'
            b'"text_offset":[3,2]}',
        ),
        "text_offset goes back",
    ),
]


@pytest.mark.parametrize(("edit", "reason"), COMPLETION, ids=numbered(COMPLETION))
def test_an_illegal_completion_stream_is_refused(edit: Edit, reason: str) -> None:
    check_openai_completion_stream(b"".join(completion_frames()), include_usage=False)
    with pytest.raises(GrammarError, match=reason):
        check_openai_completion_stream(b"".join(edit(completion_frames())), include_usage=False)


ANTHROPIC_ERROR = (
    b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"m"},'
    b'"request_id":"r"}\n\n'
)

# Frames: 0 message_start, 1 block start, 2 block delta, 3 block stop, 4 message_delta, 5 stop.
MESSAGE: list[tuple[Edit, str]] = [
    (drop(0), "content_block_start in state new"),
    (drop(1), "content_block_delta in state between"),
    (drop(2), "content_block_stop in state block"),
    (drop(3), "message_delta in state delta"),
    (drop(4), "message_stop in state between"),
    (drop(5), "without message_stop"),
    (double(0), "a second message_start"),
    (double(1), "content_block_start in state block"),
    (double(3), "content_block_stop in state between"),
    (double(4), "message_delta in state ending"),
    (double(5), "a frame after message_stop"),
    (insert(0, b'event: ping\ndata: {"type":"ping"}\n\n'), "a ping before message_start"),
    (insert(6, b"data: [DONE]\n\n"), "a frame after message_stop"),
    (insert(3, b"data: [DONE]\n\n"), "without an event name"),
    (insert(3, b'event: note\ndata: {"type":"note"}\n\n'), "an unknown event"),
    (insert(3, b'event: ping\ndata: {"type":"pong"}\n\n'), "event and type differ"),
    (insert(3, ANTHROPIC_ERROR), "a frame after an error"),
    (insert(3, ANTHROPIC_ERROR.replace(b"api_error", b"oops")), "error.type"),
    (insert(3, ANTHROPIC_ERROR.replace(b'"m"', b'""')), "error.message"),
    (replace(0, b'"msg_', b'"m_'), "id is"),
    (replace(0, b'"role":"assistant"', b'"role":"user"'), "message begins as"),
    (replace(0, b'"stop_reason":null', b'"stop_reason":"end_turn"'), "stopped before it began"),
    (replace(0, b'"output_tokens":0', b'"output_tokens":-1'), "not a count"),
    (replace(1, b'"index":0', b'"index":1'), "index is 1"),
    (replace(2, b'"index":0', b'"index":1'), "index is 1"),
    (replace(3, b'"index":0', b'"index":1'), "index is 1"),
    (replace(1, b'"text":""', b'"text":"x"'), "the block begins as"),
    (replace(2, b"text_delta", b"thinking_delta"), "a thinking_delta in a text block"),
    (replace(2, b'"Hi"', b'""'), "text: "),
    (replace(4, b"end_turn", b"stop"), "stop_reason is"),
    (replace(4, b"end_turn", b"stop_sequence"), "stop is"),
    (replace(4, b'"input_tokens":5', b'"input_tokens":9'), "changed its length"),
]


@pytest.mark.parametrize(("edit", "reason"), MESSAGE, ids=numbered(MESSAGE))
def test_an_illegal_message_stream_is_refused(edit: Edit, reason: str) -> None:
    assert len(message_frames()) == 6
    check_anthropic_stream(b"".join(message_frames()))
    with pytest.raises(GrammarError, match=reason):
        check_anthropic_stream(b"".join(edit(message_frames())))
