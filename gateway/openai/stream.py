"""Event streams of both OpenAI interfaces.

    chat        role chunk for each choice, then (text | thought | call | finish)*, [usage], [DONE]
    completions [echo of each choice], (text | finish)*, [usage], [DONE]
    either      … error: no finish, no usage, no [DONE] after it

With `include_usage` every chunk before the last carries `"usage": null`, or what there is of it
so far if `running_usage` was asked for; without it, none mentions usage.
"""

from abc import abstractmethod
from collections.abc import Sequence

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
from gateway.openai.answer import (
    CALL_PREFIX,
    FINISH_REASONS,
    chat_id,
    completion_id,
    served_tier,
)
from gateway.openai.errors import error_frame
from gateway.openai.logprobs import CompletionLogprobs, chat_logprobs
from gateway.openai.thinking import FIELD
from gateway.openai.usage import from_usage
from gateway.sse import KEEP_ALIVE, data_frame, json_line
from gateway.tools.ids import call_id

_DONE = data_frame(b"[DONE]")


class _ChunkStream(StreamWriter):
    """What chat and completions share: the frame around a chunk's one choice."""

    def __init__(
        self,
        conversation: Conversation,
        *,
        answer_id: str,
        object_name: str,
        request_id: str,
        created_ms: int,
    ) -> None:
        self._conversation = conversation
        self._request_id = request_id
        # {"id":…,"object":…,"created":…,"model":…  and the rest of the object still to come
        self._head = json_line(
            {
                "id": answer_id,
                "object": object_name,
                "created": created_ms // 1000,
                "model": conversation.model,
                **served_tier(conversation),
            }
        )[:-1]
        self._before = b"data: " + self._head + b',"choices":[{"index":'
        null_usage = b',"usage":null' if conversation.include_usage else b""
        self._after = b"}]" + null_usage + b"}\n\n"
        self._read = 0  # tokens of the prompt
        self._opened = False
        self._live: set[int] = set()

    def open(self, event: Opened) -> bytes:
        """The first chunk of each choice, where the interface has one."""
        assert not self._opened
        assert event.prompt_tokens >= event.cached_tokens
        self._opened = True
        self._read = event.prompt_tokens
        self._live = set(range(self._conversation.n))
        choices = range(self._conversation.n)
        return b"".join(self._open_chunk(choice, event) for choice in choices)

    def delta(self, event: Delta) -> bytes:
        """One chunk; none for neither text nor logprobs."""
        assert event.choice in self._live
        if not event.text and not event.chances:
            return b""
        return self._delta_chunk(event.choice, event.text, event.chances)

    def end(self, event: ChoiceEnd) -> bytes:
        """The chunk with the choice's finish reason."""
        self._live.remove(event.choice)
        return self._end_chunk(event.choice, FINISH_REASONS[event.finish].encode())

    def done(self, event: Done) -> bytes:
        """The usage chunk, if asked for, and the terminator."""
        assert self._opened
        assert not self._live
        if not self._conversation.include_usage:
            return _DONE
        usage = json_line(from_usage(event.usage, event.bill))
        return data_frame(self._head + b',"choices":[],"usage":' + usage + b"}") + _DONE

    def broke(self, event: Broke) -> bytes:
        """The error; SDKs take a stream that merely ends for a whole one."""
        return error_frame(event.refusal, self._request_id)

    def keep_alive(self) -> bytes:
        """A comment."""
        return KEEP_ALIVE

    def _chunk(self, choice: int, rest: bytes) -> bytes:
        after = self._running() if self._conversation.running_usage else self._after
        return b"%b%d%b%b" % (self._before, choice, rest, after)

    def _running(self) -> bytes:
        read, made = self._read, self.produced
        return b'}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
            read,
            made,
            read + made,
        )

    @abstractmethod
    def _open_chunk(self, choice: int, event: Opened) -> bytes: ...

    @abstractmethod
    def _delta_chunk(self, choice: int, text: str, chances: Sequence[TokenChance]) -> bytes: ...

    @abstractmethod
    def _end_chunk(self, choice: int, reason: bytes) -> bytes: ...


class OpenAIChatStream(_ChunkStream):
    """`chat.completion.chunk` frames."""

    def __init__(self, conversation: Conversation, *, request_id: str, created_ms: int) -> None:
        super().__init__(
            conversation,
            answer_id=chat_id(request_id),
            object_name="chat.completion.chunk",
            request_id=request_id,
            created_ms=created_ms,
        )

    def thought(self, event: ThoughtDelta) -> bytes:
        """A chunk of its text; signatures and what is sealed have no place here."""
        assert event.choice in self._live
        if not event.text:
            return b""
        delta = b',"delta":{"%b":%b},"logprobs":null,"finish_reason":null'
        return self._chunk(event.choice, delta % (FIELD.encode(), json_line(event.text)))

    def call(self, event: CallStart) -> bytes:
        """The chunk that names a call; its arguments are still to come."""
        assert event.choice in self._live
        named = {
            "index": event.call,
            "id": call_id(CALL_PREFIX, self._request_id, choice=event.choice, call=event.call),
            "type": "function",
            "function": {"name": event.name, "arguments": ""},
        }
        return self._call_chunk(event.choice, json_line(named))

    def arguments(self, event: CallDelta) -> bytes:
        """A chunk of a call's arguments."""
        assert event.choice in self._live
        arguments = json_line(event.arguments)
        more = b'{"index":%d,"function":{"arguments":%b}}' % (event.call, arguments)
        return self._call_chunk(event.choice, more)

    def _call_chunk(self, choice: int, call: bytes) -> bytes:
        return self._chunk(
            choice, b',"delta":{"tool_calls":[%b]},"logprobs":null,"finish_reason":null' % call
        )

    def _open_chunk(self, choice: int, event: Opened) -> bytes:  # noqa: ARG002 - a chat has no echo
        delta = b'{"role":"assistant","content":""}'
        return self._chunk(choice, b',"delta":' + delta + b',"logprobs":null,"finish_reason":null')

    def _delta_chunk(self, choice: int, text: str, chances: Sequence[TokenChance]) -> bytes:
        logprobs = json_line(chat_logprobs(chances)) if chances else b"null"
        return self._chunk(
            choice,
            b',"delta":{"content":%b},"logprobs":%b,"finish_reason":null'
            % (json_line(text), logprobs),
        )

    def _end_chunk(self, choice: int, reason: bytes) -> bytes:
        return self._chunk(choice, b',"delta":{},"logprobs":null,"finish_reason":"%b"' % reason)


class OpenAICompletionStream(_ChunkStream):
    """`text_completion` frames."""

    def __init__(self, conversation: Conversation, *, request_id: str, created_ms: int) -> None:
        super().__init__(
            conversation,
            answer_id=completion_id(request_id),
            object_name="text_completion",
            request_id=request_id,
            created_ms=created_ms,
        )
        self._logprobs = [CompletionLogprobs() for _ in range(conversation.n)]

    def _open_chunk(self, choice: int, event: Opened) -> bytes:
        """This interface opens with text: the prompt's, if it is to be echoed."""
        conversation = self._conversation
        if not conversation.echo:
            return b""
        logprobs = b"null"
        if conversation.logprobs is not None:
            writer = self._logprobs[choice]
            logprobs = json_line(writer.write_prompt(event.prompt, conversation.logprobs))
        return self._text_chunk(choice, event.echo, logprobs)

    def _delta_chunk(self, choice: int, text: str, chances: Sequence[TokenChance]) -> bytes:
        logprobs = json_line(self._logprobs[choice].write(chances)) if chances else b"null"
        return self._text_chunk(choice, text, logprobs)

    def _text_chunk(self, choice: int, text: str, logprobs: bytes) -> bytes:
        return self._chunk(
            choice,
            b',"text":%b,"logprobs":%b,"finish_reason":null' % (json_line(text), logprobs),
        )

    def _end_chunk(self, choice: int, reason: bytes) -> bytes:
        return self._chunk(choice, b',"text":"","logprobs":null,"finish_reason":"%b"' % reason)
