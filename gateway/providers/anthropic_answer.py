"""An upstream's message, streamed or whole, into our events.

Events of a kind we do not know are passed over, as the interface asks of its clients; blocks and
stop reasons of such a kind are errors, for something would be missing from the answer.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.conversation import Delta, Finish, StreamEvent, ThoughtDelta
from gateway.providers.answer import UpstreamAnswer
from gateway.providers.event_stream import ServerEvent
from gateway.providers.faults import broken
from gateway.providers.usage import UNTOLD, AnthropicUsage, from_anthropic, later, read_anthropic
from gateway.providers.verdict import told_error

FINISHES: dict[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "filtered",
}


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    data: str = ""
    name: str = ""
    input: Any = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    partial_json: str = ""
    thinking: str = ""
    signature: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Message(msgspec.Struct):
    content: list[_Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: msgspec.Raw = UNTOLD


class _Event(msgspec.Struct):
    type: str = ""
    message: _Message | None = None
    index: int = 0
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: msgspec.Raw = UNTOLD
    error: Any = None


_events = msgspec.json.Decoder(_Event)
_messages = msgspec.json.Decoder(_Message)


class AnthropicAnswer(UpstreamAnswer):
    """Of one request; it has one choice."""

    def __init__(self, *, prompt_tokens: int) -> None:
        super().__init__(choices=1, prompt_tokens=prompt_tokens)
        self._told = AnthropicUsage()
        self._begun = False
        self._block: tuple[int, str] | None = None  # the open one's number and type
        self._input: Any = None  # what the open call said at its start
        self._stop: tuple[str, str | None] | None = None

    def take(self, event: ServerEvent) -> list[StreamEvent]:
        """One event."""
        if self.over:
            raise broken("it goes on after its end")
        return self.told(list(self._event(_read(_events, event.data))))

    def whole(self, body: bytes) -> list[StreamEvent]:
        """A `message`."""
        message = _read(_messages, body)
        self._count(message.usage)
        events = [
            event
            for index, block in enumerate(message.content)
            for event in (*self._start(index, block), *self._close())
        ]
        self._end(message.stop_reason, message.stop_sequence)
        return [*self.told(events), *self.finish()]

    def finish(self) -> list[StreamEvent]:
        """The end of the stream. It may leave out the last event, but not why it stopped."""
        if self.over:
            return []
        if self._stop is None or self._block is not None:
            raise broken("the stream ended in the middle of the answer")
        reason, sequence = self._stop
        if reason not in FINISHES:
            raise broken(f"it ended for a reason unknown to us: {reason[:64]}")
        events = list(self.choices[0].end(FINISHES[reason], sequence))
        return [*self.told(events), *super().finish()]

    def _event(self, event: _Event) -> Iterable[StreamEvent]:
        match event:
            case _Event(type="error"):
                raise told_error({"type": "error", "error": event.error})
            case _Event(type="message_start", message=_Message() as message):
                self._begin(message)
            case _Event(type="content_block_start", content_block=_Block() as block):
                self._expect(self._begun and self._stop is None)
                yield from self._start(event.index, block)
            case _Event(type="content_block_delta", delta=_Delta() as delta):
                yield from self._more(event.index, delta)
            case _Event(type="content_block_stop"):
                self._expect(self._block is not None and self._block[0] == event.index)
                yield from self._close()
            case _Event(type="message_delta", delta=_Delta() as delta):
                self._expect(self._begun)
                self._count(event.usage)
                self._end(delta.stop_reason, delta.stop_sequence)
            case _Event(type="message_stop"):
                yield from self.finish()
            case _:
                pass

    def _begin(self, message: _Message) -> None:
        self._expect(not self._begun)
        self._begun = True
        self._count(message.usage)

    def _start(self, index: int, block: _Block) -> Iterable[StreamEvent]:
        self._expect(self._block is None)
        self._block = (index, block.type)
        match block.type:
            case "text":
                yield from self._text(block.text)
            case "thinking":
                yield from self._thought(block.thinking, block.signature)
            case "redacted_thinking":
                yield from self._thought(redacted=block.data)
            case "tool_use":
                self._input = block.input
                yield from self.choices[0].call(block.name)
            case kind:
                raise broken(f"its answer has a block of a kind unknown to us: {kind[:64]}")

    def _more(self, index: int, delta: _Delta) -> Iterable[StreamEvent]:
        at, kind = self._block or (-1, "")
        self._expect(at == index)
        match kind, delta.type:
            case "text", "text_delta":
                yield from self._text(delta.text)
            case "tool_use", "input_json_delta":
                if delta.partial_json:
                    self._input = None
                yield from self.choices[0].argue(delta.partial_json)
            case "thinking", "thinking_delta":
                yield from self._thought(delta.thinking)
            case "thinking", "signature_delta":
                yield from self._thought(signature=delta.signature)
            case _:
                # Where a text comes from: it is there without.
                self._expect((kind, delta.type) == ("text", "citations_delta"))

    def _close(self) -> Iterable[StreamEvent]:
        # A call may say its whole input as it begins.
        if self._input:
            yield from self.choices[0].argue(msgspec.json.encode(self._input).decode())
        yield from self.choices[0].close_call()
        self._block = self._input = None

    def _thought(
        self, text: str = "", signature: str = "", redacted: str = ""
    ) -> list[StreamEvent]:
        if not (text or signature or redacted):
            return []
        more = ThoughtDelta(choice=0, text=text, signature=signature, redacted=redacted)
        return self.say(self.choices[0], more)

    def _text(self, text: str) -> list[StreamEvent]:
        return self.say(self.choices[0], Delta(choice=0, text=text)) if text else []

    def _end(self, reason: str | None, sequence: str | None) -> None:
        if reason is not None:
            self._stop = (reason, sequence)

    def _count(self, told: msgspec.Raw) -> None:
        self._told = later(self._told, read_anthropic(told))
        self.usage = from_anthropic(self._told)

    def _expect(self, right: bool) -> None:  # noqa: FBT001 - reads as a sentence where it is called
        if not right:
            raise broken("its events are out of order")


def _read(decoder: msgspec.json.Decoder[Any], body: str | bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise broken(f"it is no message: {error}") from error
