"""An upstream's chat completion, streamed or whole, into our events.

Lenient where servers differ and nothing is lost by it: unknown fields, calls that repeat their
name, chunks that say nothing after a choice's end, a missing `[DONE]`. Strict where leniency
would pass a broken answer for a whole one: a finish reason that we do not know, text after the
end, an error anywhere, an end with a choice open.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.conversation import Delta, Finish, StreamEvent, ThoughtDelta, TokenChance
from gateway.providers.answer import Choice, UpstreamAnswer
from gateway.providers.event_stream import ServerEvent
from gateway.providers.faults import broken
from gateway.providers.usage import UNTOLD, read_openai
from gateway.providers.verdict import told_error

DONE = "[DONE]"

FINISHES: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "filtered",
}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # vLLM's newer name for it; others have other things there
    tool_calls: list[_Call] | None = None


class _Likelihood(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Token(_Likelihood):
    top_logprobs: list[_Likelihood] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # vLLM's: the stop string, or a token's id


class _Body(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = UNTOLD
    error: Any = None


_decoder = msgspec.json.Decoder(_Body)


class OpenAIAnswer(UpstreamAnswer):
    """Of one request. `wants_chances` keeps log probabilities that were asked for."""

    def __init__(self, *, choices: int, prompt_tokens: int, wants_chances: bool = False) -> None:
        super().__init__(choices=choices, prompt_tokens=prompt_tokens)
        self._wants_chances = wants_chances
        self._calls: dict[int, tuple[int | None, str | None]] = {}  # by choice: index, id

    def take(self, event: ServerEvent) -> list[StreamEvent]:
        """One chunk."""
        if event.data == DONE:
            return self.finish()
        if self.over:
            raise broken("it goes on after its end")
        body = _read(event.data)
        if event.event == "error":
            raise told_error(msgspec.json.decode(event.data))
        return self._body(body)

    def whole(self, body: bytes) -> list[StreamEvent]:
        """A `chat.completion`."""
        return [*self._body(_read(body)), *self.finish()]

    def _body(self, body: _Body) -> list[StreamEvent]:
        if body.error:
            raise told_error({"error": body.error})
        self.usage = read_openai(body.usage) or self.usage
        events = [event for each in body.choices or () for event in self._choice(each)]
        return self.told(events)

    def _choice(self, told: _Choice) -> Iterable[StreamEvent]:
        choice = self.choice(told.index)
        message = told.delta or told.message or _Message()
        thought = message.reasoning_content or message.reasoning
        if isinstance(thought, str) and thought:
            yield from self.say(choice, ThoughtDelta(choice=choice.index, text=thought))
        # Its own refusal is said where an answer would be: none of our dialects' parts is lost.
        text = (message.content or "") + (message.refusal or "")
        chances = self._chances(told.logprobs)
        if text or chances:
            yield from self.say(choice, Delta(choice=choice.index, text=text, chances=chances))
        for call in message.tool_calls or ():
            yield from self._call(choice, call)
        if told.finish_reason is not None and not choice.ended:
            if told.finish_reason not in FINISHES:
                raise broken(f"it ended for a reason unknown to us: {told.finish_reason[:64]}")
            stop = told.stop_reason if isinstance(told.stop_reason, str) else None
            yield from choice.end(FINISHES[told.finish_reason], stop)

    def _call(self, choice: Choice, call: _Call) -> Iterable[StreamEvent]:
        if choice.ended:
            raise broken("it calls a tool after the choice has ended")
        function = call.function or _Function()
        last = self._calls.get(choice.index)
        if function.name and (last is None or _is_another(last, call)):
            self._calls[choice.index] = (call.index, call.id)
            yield from choice.call(function.name)
        elif last is None or (call.index is not None and call.index != last[0]):
            raise broken("arguments of a call that has not begun, or is no longer the last")
        yield from choice.argue(function.arguments or "")

    def _chances(self, told: _Logprobs | None) -> tuple[TokenChance, ...]:
        if told is None or not self._wants_chances:
            return ()
        return tuple(
            TokenChance(
                token=_token(one),
                logprob=one.logprob,
                top=tuple((_token(each), each.logprob) for each in one.top_logprobs or ()),
            )
            for one in told.content or ()
        )


def _read(body: str | bytes) -> _Body:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise broken(f"it is no chat completion: {error}") from error


def _is_another(last: tuple[int | None, str | None], call: _Call) -> bool:
    # Some repeat a call's name with every fragment; some count no calls and only name them.
    if call.index is not None and call.index != last[0]:
        return True
    return call.id is not None and call.id != last[1]


def _token(told: _Likelihood) -> bytes:
    if told.bytes is None:
        return told.token.encode()
    try:
        return bytes(told.bytes)
    except ValueError as error:
        raise broken("a token's bytes are none") from error
