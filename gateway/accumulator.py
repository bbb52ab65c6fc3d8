"""Gathers an answer's events into the whole of it, for a caller that does not stream."""

from core.protocol import Usage
from gateway.bill import Bill
from gateway.conversation import (
    Answer,
    AnswerCall,
    AnswerChoice,
    CallDelta,
    CallStart,
    ChoiceEnd,
    Conversation,
    Delta,
    Opened,
    StreamEvent,
    ThoughtDelta,
    TokenChance,
)
from gateway.thinking import Thoughts


class _Gathered:
    """One choice so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.chars = 0
        self.calls: list[tuple[CallStart, int, list[str]]] = []
        self.thoughts = Thoughts()
        self.chances: list[TokenChance] = []
        self.end: ChoiceEnd | None = None


class Accumulator:
    """Takes events as `gateway.conversation` orders them. A `Broke` is not its business."""

    def __init__(self, conversation: Conversation) -> None:
        self._wants_chances = conversation.logprobs is not None
        self._choices = [_Gathered() for _ in range(conversation.n)]
        self._opened = Opened(prompt_tokens=0)

    def take(self, event: StreamEvent) -> None:
        """Any event but the last, which says nothing of the choices."""
        match event:
            case Delta():
                self.delta(event)
            case ThoughtDelta():
                self.thought(event)
            case CallDelta():
                self.arguments(event)
            case CallStart():
                self.call(event)
            case ChoiceEnd():
                self.end(event)
            case Opened():
                self.open(event)
            case _:
                pass

    def open(self, event: Opened) -> None:
        """The answer begins."""
        self._opened = event

    def delta(self, event: Delta) -> None:
        """Take more of a choice that has not ended."""
        choice = self._open(event.choice)
        choice.texts.append(event.text)
        choice.chars += len(event.text)
        choice.chances.extend(event.chances)

    def thought(self, event: ThoughtDelta) -> None:
        """Take more of what a choice thinks, after the text and the calls so far."""
        choice = self._open(event.choice)
        at, calls = choice.chars, len(choice.calls)
        choice.thoughts.take(event.text, event.signature, event.redacted, at=at, calls=calls)

    def call(self, event: CallStart) -> None:
        """A call begins, after the text so far."""
        choice = self._open(event.choice)
        assert event.call == len(choice.calls)
        choice.calls.append((event, choice.chars, []))

    def arguments(self, event: CallDelta) -> None:
        """Take more of the last call."""
        start, _, arguments = self._open(event.choice).calls[-1]
        assert event.call == start.call
        arguments.append(event.arguments)

    def end(self, event: ChoiceEnd) -> None:
        """Close a choice, once."""
        self._open(event.choice).end = event

    def answer(self, usage: Usage, bill: Bill | None = None) -> Answer:
        """The whole, once every choice has ended."""
        choices = (self._choice(index, each) for index, each in enumerate(self._choices))
        return Answer(choices=tuple(choices), usage=usage, bill=bill, opened=self._opened)

    def _open(self, index: int) -> _Gathered:
        choice = self._choices[index]
        assert choice.end is None
        return choice

    def _choice(self, index: int, choice: _Gathered) -> AnswerChoice:
        assert choice.end is not None
        return AnswerChoice(
            index=index,
            text="".join(choice.texts),
            calls=tuple(
                AnswerCall(name=start.name, arguments="".join(arguments), at=at)
                for start, at, arguments in choice.calls
            ),
            thoughts=choice.thoughts.all,
            finish=choice.end.finish,
            stop=choice.end.stop,
            chances=tuple(choice.chances) if self._wants_chances else None,
        )
