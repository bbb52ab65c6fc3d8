"""The event stream of `POST /v1/messages`.

    message_start (content_block_start content_block_delta+ content_block_stop)*
        message_delta message_stop
    … error: nothing follows it

A text block opens with its first text, so that an empty answer has no block; each call of a
tool is a block of its own, and so is each thought, which its signature ends. Usage in
`message_delta` is cumulative. `ping` may stand between any two events after the first.
"""

from typing import Literal

from core.protocol import Usage
from gateway.anthropic.answer import (
    call_fields,
    message_fields,
    served_tier,
    stop_fields,
    thought_fields,
)
from gateway.anthropic.errors import error_frame
from gateway.anthropic.usage import from_usage
from gateway.conversation import (
    Broke,
    CallDelta,
    CallStart,
    ChoiceEnd,
    Conversation,
    Delta,
    Done,
    Opened,
    StreamWriter,
    ThoughtDelta,
)
from gateway.sse import KEEP_ALIVE, json_line, named_frame
from gateway.thinking import Thought

_PING = named_frame(b"ping", b'{"type":"ping"}')
_MESSAGE_STOP = named_frame(b"message_stop", b'{"type":"message_stop"}')
_INPUT = b'{"type":"input_json_delta","partial_json":%b}'
_THOUGHT = json_line(thought_fields(Thought()))
_TEXT = b'{"type":"text","text":""}'


class AnthropicStream(StreamWriter):
    """Events of one message; its one choice is number 0."""

    def __init__(self, conversation: Conversation, *, request_id: str) -> None:
        assert conversation.n == 1
        self._conversation = conversation
        self._request_id = request_id
        self._opened = False
        self._blocks = 0  # closed ones: the index of the one that is open
        self._in: Literal["text", "call", "thought"] | None = None
        self._end: ChoiceEnd | None = None

    def open(self, event: Opened) -> bytes:
        """`message_start`, with what the prompt has cost."""
        assert not self._opened
        self._opened = True
        usage = Usage(prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens)
        message = {
            **message_fields(self._conversation, self._request_id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**from_usage(usage), **served_tier(self._conversation)},
        }
        return named_frame(
            b"message_start", json_line({"type": "message_start", "message": message})
        )

    def delta(self, event: Delta) -> bytes:
        """A delta of a text block, which is opened for it if none is."""
        assert self._opened
        assert self._end is None
        if not event.text:
            return b""
        opening = b"" if self._in == "text" else self._close() + self._block_start(_TEXT)
        self._in = "text"
        return opening + self._block_delta(b'{"type":"text_delta","text":%b}', event.text)

    def thought(self, event: ThoughtDelta) -> bytes:
        """A delta of a thinking block, which is opened for it; one that is sealed comes whole."""
        assert self._opened
        assert self._end is None
        if not (event.text or event.signature or event.redacted):
            return b""
        if event.redacted:
            opening = self._close()
            sealed = json_line(thought_fields(Thought(redacted=event.redacted)))
            opening += self._block_start(sealed)
            self._in = "thought"
            return opening + self._close()
        opening = b"" if self._in == "thought" else self._close() + self._block_start(_THOUGHT)
        self._in = "thought"
        if event.text:
            opening += self._block_delta(b'{"type":"thinking_delta","thinking":%b}', event.text)
        if event.signature:
            signed = b'{"type":"signature_delta","signature":%b}'
            opening += self._block_delta(signed, event.signature) + self._close()
        return opening

    def call(self, event: CallStart) -> bytes:
        """The start of a `tool_use` block, and a first delta: a block is never without."""
        assert self._opened
        assert self._end is None
        fields = call_fields(event.name, self._request_id, call=event.call)
        opening = self._close() + self._block_start(json_line({**fields, "input": {}}))
        self._in = "call"
        return opening + self._block_delta(_INPUT, "")

    def arguments(self, event: CallDelta) -> bytes:
        """A delta of the block."""
        assert self._in == "call"
        assert self._end is None
        return self._block_delta(_INPUT, event.arguments)

    def end(self, event: ChoiceEnd) -> bytes:
        """`content_block_stop`, if a block is open; the reason waits for the totals."""
        assert self._opened
        assert self._end is None
        self._end = event
        return self._close()

    def done(self, event: Done) -> bytes:
        """`message_delta` and `message_stop`."""
        assert self._end is not None
        delta = json_line(
            {
                "type": "message_delta",
                "delta": stop_fields(self._end.finish, self._end.stop),
                "usage": from_usage(event.usage, event.bill),
            }
        )
        return named_frame(b"message_delta", delta) + _MESSAGE_STOP

    def broke(self, event: Broke) -> bytes:
        """The `error` event."""
        return error_frame(event.refusal, self._request_id)

    def keep_alive(self) -> bytes:
        """A `ping`; before `message_start`, which must be the first event, a comment."""
        return _PING if self._opened else KEEP_ALIVE

    def _close(self) -> bytes:
        if self._in is None:
            return b""
        self._in = None
        self._blocks += 1
        return named_frame(
            b"content_block_stop", b'{"type":"content_block_stop","index":%d}' % (self._blocks - 1)
        )

    def _block_start(self, block: bytes) -> bytes:
        start = b'{"type":"content_block_start","index":%d,"content_block":%b}'
        return named_frame(b"content_block_start", start % (self._blocks, block))

    def _block_delta(self, delta: bytes, text: str) -> bytes:
        more = b'{"type":"content_block_delta","index":%d,"delta":%b}'
        return named_frame(b"content_block_delta", more % (self._blocks, delta % json_line(text)))
