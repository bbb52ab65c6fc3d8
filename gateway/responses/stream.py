"""The event stream of `POST /v1/responses`.

    response.created response.in_progress item* (response.completed | response.incomplete)
    item: output_item.added, content_part.added output_text.delta+ output_text.done
          content_part.done, output_item.done              a message
          output_item.added function_call_arguments.delta* function_call_arguments.done
          output_item.done                                 a call
          output_item.added, [summary_part.added summary_text.delta+ summary_text.done
          summary_part.done], output_item.done             a thought
    … error response.failed: nothing follows it

`sequence_number` counts every event from 0. The last event holds the whole response, so that a
reader of it alone misses nothing. There is no `[DONE]`.
"""

from typing import Any

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
    TokenChance,
)
from gateway.items import CallItem, MessageItem, ReasoningItem
from gateway.responses.answer import (
    ask_of,
    ended,
    error_of,
    failed,
    is_whole,
    response_fields,
    response_id,
)
from gateway.responses.output import Output, OutputItem, logprobs_json
from gateway.responses.reasoning import summary_of
from gateway.responses.usage import from_usage
from gateway.sse import KEEP_ALIVE, json_line, named_frame

_DELTA = b"response.output_text.delta"
_SUMMARY = b"response.reasoning_summary_text.delta"
_ARGUMENTS = b"response.function_call_arguments.delta"


class ResponsesStream(StreamWriter):
    """Events of one response; its one choice is number 0.

    `kept` and `ended_ms` are for whoever knows them to set before its end.
    """

    def __init__(self, conversation: Conversation, *, request_id: str, created_ms: int) -> None:
        assert conversation.n == 1
        self._request_id = request_id
        name = response_id(request_id)
        self._fields = response_fields(conversation, name, created_ms // 1000)
        ask = ask_of(conversation)
        self._output = Output(request_id, ask)
        self._shows = ask.shows_thoughts
        self._open: OutputItem | None = None
        self._head = b""  # of the deltas of the item that is open
        self._chances: list[TokenChance] = []  # of text that is still to come
        self._number = 0
        self._opened = False
        self._end: ChoiceEnd | None = None
        self.kept = False
        self.ended_ms = created_ms

    def open(self, event: Opened) -> bytes:
        """`response.created` and `response.in_progress`."""
        assert not self._opened
        assert event.prompt_tokens >= event.cached_tokens
        self._opened = True
        return self._response("response.created") + self._response("response.in_progress")

    def delta(self, event: Delta) -> bytes:
        """More text of a message, which begins with it."""
        assert self._opened
        assert self._end is None
        self._chances += event.chances
        if not event.text:
            return b""
        opening = b""
        if not self._is_message():
            opening = self._close(whole=True) + self._begin_message()
        return opening + self._more_text(event.text)

    def thought(self, event: ThoughtDelta) -> bytes:
        """More of a thought, which begins with it; its signature ends it."""
        assert self._opened
        assert self._end is None
        if not (event.text or event.signature or event.redacted):
            return b""
        opening = b""
        if event.redacted or self._open is None or not self._is(ReasoningItem):
            opening = self._close(whole=True) + self._begin_thought(event.redacted)
        item = self._open
        assert item is not None
        if event.text:
            opening += self._more_thought(item, event.text)
        if event.signature:
            item.sign(event.signature)
        return opening + (self._close(whole=True) if event.signature or event.redacted else b"")

    def call(self, event: CallStart) -> bytes:
        """A call begins."""
        assert self._opened
        assert self._end is None
        closing = self._close(whole=True)
        item = self._output.call(event)
        self._begin(item, _ARGUMENTS)
        told = {**item.json(whole=True), "status": "in_progress"}
        added = {"output_index": item.index, "item": told}
        return closing + self._event("response.output_item.added", added)

    def arguments(self, event: CallDelta) -> bytes:
        """More of the call that is open."""
        assert self._open is not None
        assert isinstance(self._open.item, CallItem)
        self._open.pieces.append(event.arguments)
        return self._delta(_ARGUMENTS, b"", event.arguments)

    def end(self, event: ChoiceEnd) -> bytes:
        """The item that is open is over; the response waits for the totals."""
        assert self._opened
        assert self._end is None
        self._end = event
        late = b""
        if self._chances:  # of tokens that came to no text, at the very end
            late = b"" if self._is_message() else self._close(whole=True) + self._begin_message()
            late += self._more_text("")
        return late + self._close(whole=is_whole(event.finish))

    def done(self, event: Done) -> bytes:
        """`response.completed` or `response.incomplete`, with all of it."""
        assert self._end is not None
        whole = is_whole(self._end.finish)
        self._fields |= {
            **ended(self._end.finish, completed_s=self.ended_ms // 1000),
            "output": self._output.json(whole=whole),
            "usage": from_usage(event.usage, event.bill),
            "store": self.kept,
        }
        return self._response("response.completed" if whole else "response.incomplete")

    def broke(self, event: Broke) -> bytes:
        """`error`, flat as this API has it, and `response.failed`."""
        opening = b"" if self._opened else self._response("response.created")
        error = error_of(event.refusal, self._request_id)
        flat = {**error, "code": event.refusal.code.value, "param": event.refusal.param}
        opening += self._event("error", flat)
        self._fields |= {
            **failed(event.refusal, self._request_id),
            "output": self._output.json(whole=False),
            "store": False,
        }
        return opening + self._response("response.failed")

    def keep_alive(self) -> bytes:
        """A comment."""
        return KEEP_ALIVE

    # Items.

    def _is_message(self) -> bool:
        return self._is(MessageItem)

    def _is(self, kind: type) -> bool:
        return self._open is not None and isinstance(self._open.item, kind)

    def _begin(self, item: OutputItem, delta: bytes) -> None:
        self._open = item
        name = json_line(item.id)
        self._head = b'{"type":"%b","item_id":%b,"output_index":%d' % (delta, name, item.index)

    def _begin_thought(self, redacted: str) -> bytes:
        item = self._output.thought(redacted)
        self._begin(item, _SUMMARY)
        told = {**item.json(whole=True), "status": "in_progress"}
        told.pop("encrypted_content", None)  # it is not known before its end
        return self._event("response.output_item.added", {"output_index": item.index, "item": told})

    def _more_thought(self, item: OutputItem, text: str) -> bytes:
        first = not item.pieces
        item.pieces.append(text)
        if not self._shows:
            return b""
        opening = b""
        if first:
            part = {**self._summary_place(item), "part": {"type": "summary_text", "text": ""}}
            opening = self._event("response.reasoning_summary_part.added", part)
        return opening + self._delta(_SUMMARY, b',"summary_index":0', text)

    def _begin_message(self) -> bytes:
        item = self._output.message()
        self._begin(item, _DELTA)
        told = {**item.json(whole=True), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event(
            "response.output_item.added", {"output_index": item.index, "item": told}
        )
        return added + self._event(
            "response.content_part.added", {**self._place(item), "part": part}
        )

    def _more_text(self, text: str) -> bytes:
        assert self._open is not None
        logprobs = logprobs_json(self._chances)
        self._chances.clear()
        self._open.pieces.append(text)
        self._open.logprobs += logprobs
        told = json_line(logprobs) if logprobs else b"[]"
        return self._delta(_DELTA, b',"content_index":0,"logprobs":%b' % told, text)

    def _delta(self, name: bytes, more: bytes, text: str) -> bytes:
        data = b'%b%b,"delta":%b,"sequence_number":%d}'
        return named_frame(name, data % (self._head, more, json_line(text), self._next()))

    def _close(self, *, whole: bool) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        told = item.json(whole=whole)
        if isinstance(item.item, CallItem):
            over = {"item_id": item.id, "output_index": item.index, "arguments": item.text}
            frames = self._event("response.function_call_arguments.done", over)
        elif isinstance(item.item, ReasoningItem):
            frames = self._end_summary(item)
        else:
            (part,) = told["content"]
            text = {**self._place(item), "text": item.text, "logprobs": item.logprobs}
            frames = self._event("response.output_text.done", text)
            frames += self._event("response.content_part.done", {**self._place(item), "part": part})
        return frames + self._event(
            "response.output_item.done", {"output_index": item.index, "item": told}
        )

    def _end_summary(self, item: OutputItem) -> bytes:
        if not (self._shows and item.text):
            return b""
        place, (part,) = self._summary_place(item), summary_of(item.text)
        frames = self._event("response.reasoning_summary_text.done", {**place, "text": item.text})
        return frames + self._event("response.reasoning_summary_part.done", {**place, "part": part})

    @staticmethod
    def _summary_place(item: OutputItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index, "summary_index": 0}

    @staticmethod
    def _place(item: OutputItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}

    # Events.

    def _response(self, name: str) -> bytes:
        return self._event(name, {"response": self._fields})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        data = json_line({"type": name, "sequence_number": self._next(), **fields})
        return named_frame(name.encode(), data)

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number
