"""The event stream of `POST /v1/messages`.

    message_start [content_block_start content_block_delta+ content_block_stop]
        message_delta message_stop
    … error: nothing follows it

The text block opens with the first text, so that an empty answer has no block. Usage in
`message_delta` is cumulative. `ping` may stand between any two events after the first.
"""

from core.protocol import Usage
from gateway.anthropic.answer import message_fields, stop_fields
from gateway.anthropic.errors import error_frame
from gateway.anthropic.usage import from_usage
from gateway.conversation import (
    Broke,
    ChoiceEnd,
    Conversation,
    Delta,
    Done,
    Opened,
    StreamWriter,
)
from gateway.sse import KEEP_ALIVE, json_line, named_frame

_PING = named_frame(b"ping", b'{"type":"ping"}')
_BLOCK_START = named_frame(
    b"content_block_start",
    b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
)
_BLOCK_STOP = named_frame(b"content_block_stop", b'{"type":"content_block_stop","index":0}')
_MESSAGE_STOP = named_frame(b"message_stop", b'{"type":"message_stop"}')
_DELTA_HEAD = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
_DELTA_TAIL = b"}}\n\n"


class AnthropicStream(StreamWriter):
    """Events of one message; its one choice is number 0."""

    def __init__(self, conversation: Conversation, *, request_id: str) -> None:
        assert conversation.n == 1
        self._conversation = conversation
        self._request_id = request_id
        self._opened = False
        self._block_open = False
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
            "usage": from_usage(usage),
        }
        return named_frame(
            b"message_start", json_line({"type": "message_start", "message": message})
        )

    def delta(self, event: Delta) -> bytes:
        """`content_block_delta`, after the block's start if it is the first."""
        assert self._opened
        assert self._end is None
        if not event.text:
            return b""
        frame = b"%b%b%b" % (_DELTA_HEAD, json_line(event.text), _DELTA_TAIL)
        if self._block_open:
            return frame
        self._block_open = True
        return _BLOCK_START + frame

    def end(self, event: ChoiceEnd) -> bytes:
        """`content_block_stop`, if a block is open; the reason waits for the totals."""
        assert self._opened
        assert self._end is None
        self._end = event
        return _BLOCK_STOP if self._block_open else b""

    def done(self, event: Done) -> bytes:
        """`message_delta` and `message_stop`."""
        assert self._end is not None
        delta = json_line(
            {
                "type": "message_delta",
                "delta": stop_fields(self._end.finish, self._end.stop),
                "usage": from_usage(event.usage),
            }
        )
        return named_frame(b"message_delta", delta) + _MESSAGE_STOP

    def broke(self, event: Broke) -> bytes:
        """The `error` event."""
        return error_frame(event.refusal, self._request_id)

    def keep_alive(self) -> bytes:
        """A `ping`; before `message_start`, which must be the first event, a comment."""
        return _PING if self._opened else KEEP_ALIVE
