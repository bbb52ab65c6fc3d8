"""What reads one upstream answer: a base for both dialects.

    take* finish    of an event stream
    whole           of an answer that is one JSON body

Events come out in the grammar of `gateway.conversation`, without its end: `Done` is for who
knows the totals. Anything that is no answer raises FaultError; nothing that was handed out is
taken back then.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from core.protocol import Usage
from gateway.conversation import (
    CallDelta,
    CallStart,
    ChoiceEnd,
    Delta,
    Finish,
    Opened,
    StreamEvent,
    ThoughtDelta,
)
from gateway.providers.event_stream import ServerEvent
from gateway.providers.faults import broken

NO_ARGUMENTS = "{}"


class Choice:
    """One choice so far. Text may follow calls; arguments are of the call that began last."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls = 0
        self.ended = False
        self._argued = True  # the last call has said something

    def call(self, name: str) -> Iterable[StreamEvent]:
        """A call begins."""
        yield from self.close_call()
        yield CallStart(choice=self.index, call=self.calls, name=name)
        self.calls += 1
        self._argued = False

    def argue(self, arguments: str) -> Iterable[StreamEvent]:
        """More of its arguments."""
        if arguments:
            self._argued = True
            yield CallDelta(choice=self.index, call=self.calls - 1, arguments=arguments)

    def close_call(self) -> Iterable[StreamEvent]:
        """A call without arguments has an empty object of them."""
        if not self._argued:
            yield from self.argue(NO_ARGUMENTS)

    def end(self, finish: Finish, stop: str | None) -> Iterable[StreamEvent]:
        """The last word. A choice that called something ended for that."""
        if finish != "length":
            yield from self.close_call()
        if finish == "stop" and self.calls:
            finish, stop = "tool_calls", None
        self.ended = True
        yield ChoiceEnd(choice=self.index, finish=finish, stop=stop)


class UpstreamAnswer(ABC):
    """`prompt_tokens` is our estimate, told to the caller until the provider says better."""

    def __init__(self, *, choices: int, prompt_tokens: int) -> None:
        self.choices = [Choice(index) for index in range(choices)]
        self.usage: Usage | None = None  # as the provider tells it, absolute
        self.opened = False
        self.over = False  # the provider has said its last word
        self._prompt_tokens = prompt_tokens

    @abstractmethod
    def take(self, event: ServerEvent) -> list[StreamEvent]:
        """One event of a stream. Raises FaultError."""

    @abstractmethod
    def whole(self, body: bytes) -> list[StreamEvent]:
        """All of an answer. Raises FaultError."""

    @property
    def open_choices(self) -> tuple[int, ...]:
        """Choices that have not ended."""
        return tuple(choice.index for choice in self.choices if not choice.ended)

    def finish(self) -> list[StreamEvent]:
        """The stream has ended. Raises FaultError when the answer has not."""
        if self.open_choices:
            raise broken("the stream ended in the middle of the answer")
        self.over = True
        return []

    def cut_short(self) -> list[StreamEvent]:
        """End what is open for want of room: nobody pays for more."""
        ends = [
            event
            for index in self.open_choices
            for event in self.choices[index].end("length", None)
        ]
        return self.told(ends)

    def told(self, events: list[StreamEvent]) -> list[StreamEvent]:
        """The events, after the opening if there is anything to tell."""
        if not events or self.opened:
            return events
        self.opened = True
        usage = self.usage
        if usage is None or not usage.prompt_tokens:
            return [Opened(prompt_tokens=self._prompt_tokens), *events]
        opened = Opened(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        return [opened, *events]

    def choice(self, index: int) -> Choice:
        """One that there is. Raises FaultError."""
        if not 0 <= index < len(self.choices):
            raise broken(f"it answers with a choice {index} that nobody asked for")
        return self.choices[index]

    def say(self, choice: Choice, delta: Delta | ThoughtDelta) -> list[StreamEvent]:
        """More of a choice that is open."""
        if choice.ended:
            raise broken("it goes on after a choice has ended")
        return [delta]
