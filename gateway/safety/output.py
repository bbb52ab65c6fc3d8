"""An answer's events as its caller may have them: held, masked, or ended early.

Each choice's prose is one text, each thought is another, and so are each call's arguments. A
thought or a call ends what prose before it could still have become part of; so the order of
events stays as it was. A thought that was changed loses its signature, and with it its use; so
do those right after it, for without a signature between them all are told as one.
"""

from collections.abc import Callable

from core.safety.rulebook import Rulebook
from gateway.conversation import (
    CallDelta,
    CallStart,
    ChoiceEnd,
    Delta,
    StreamEvent,
    ThoughtDelta,
)
from gateway.safety.screen import JSONScreen, Screen
from gateway.safety.sieve import Hit

ChoiceEvent = Delta | ThoughtDelta | CallStart | CallDelta | ChoiceEnd
Tell = Callable[[int, Hit], None]  # the choice, and what was found in it


class _Choice:
    def __init__(self, prose: Screen) -> None:
        self.prose = prose
        self.thought: Screen | None = None
        self.changed = False  # what was thought since prose, a call or a sealed thought was told
        self.call: JSONScreen | None = None
        self.calls = 0
        self.ended = False


class OutputScreen:
    """One answer. `filtered` says that a rule has ended a choice."""

    def __init__(self, book: Rulebook, *, choices: int, is_json: bool, tell: Tell) -> None:
        self._book = book
        self._tell = tell
        kind = JSONScreen if is_json else Screen
        self._choices = [_Choice(kind(book, book.output)) for _ in range(choices)]
        self.filtered = False

    @property
    def over(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.ended for choice in self._choices)

    @property
    def waits(self) -> bool:
        """Whether somebody must be asked before more is told: nobody here."""
        return False

    async def settle(self, *, final: bool) -> list[StreamEvent]:  # noqa: ARG002 - for who asks
        """What is told after that."""
        return []

    def take(self, event: StreamEvent) -> list[StreamEvent]:
        """What may be told now, in order; nothing of a choice that has ended."""
        if not isinstance(event, ChoiceEvent):
            return [event]
        number = event.choice
        choice = self._choices[number]
        if choice.ended:
            return []
        told = self._take(choice, event)
        cut = self._cut(number, choice)
        if cut is None:
            return told
        told = [each for each in told if not isinstance(each, CallStart | ChoiceEnd)]
        return told + self._end(number, all_choices=self._book.rules[cut].action == "block")

    def _take(self, choice: _Choice, event: ChoiceEvent) -> list[StreamEvent]:
        number = event.choice
        if isinstance(event, CallDelta):
            assert choice.call is not None
            return _arguments(number, event.call, choice.call.feed(event.arguments))
        told = self._close_call(choice, number)
        if choice.call is not None:
            return told  # it was cut at its end
        if isinstance(event, ThoughtDelta):
            return told + self._think(choice, event)
        told += self._close_thought(choice, number)
        if choice.thought is not None:
            return told
        if isinstance(event, Delta):
            return told + self._say(choice, number, event.text)
        told += self._say(choice, number, "", final=True)
        if isinstance(event, CallStart):
            choice.changed = False
            choice.call = JSONScreen(self._book, self._book.output)
            choice.calls = event.call
        else:
            choice.ended = True
        return [*told, event]

    def _say(
        self, choice: _Choice, number: int, text: str, *, final: bool = False
    ) -> list[StreamEvent]:
        told = _delta(number, choice.prose.feed(text, final=final))
        choice.changed = choice.changed and not told
        return told

    def _think(self, choice: _Choice, event: ThoughtDelta) -> list[StreamEvent]:
        number = event.choice
        told = self._close_thought(choice, number) if event.redacted else []
        if choice.thought is None:
            told += self._say(choice, number, "", final=True)
            if choice.prose.cut is not None:
                return told
        if event.redacted:  # which nobody here can read
            choice.changed = False
            return told if choice.thought is not None else [*told, event]
        if choice.thought is None:
            choice.thought = Screen(self._book, self._book.output)
        screen = choice.thought
        text = screen.feed(event.text, final=bool(event.signature))
        choice.changed = choice.changed or screen.masked
        if event.signature and screen.cut is None:
            self._note(number, screen)
            choice.thought = None
        signature = "" if choice.changed or screen.cut is not None else event.signature
        return told + _thought(number, text, signature)

    def _close_thought(self, choice: _Choice, number: int) -> list[StreamEvent]:
        screen = choice.thought
        if screen is None:
            return []
        told = _thought(number, screen.feed("", final=True))
        choice.changed = choice.changed or screen.masked
        self._note(number, screen)
        if screen.cut is None:
            choice.thought = None
        return told

    def _close_call(self, choice: _Choice, number: int) -> list[StreamEvent]:
        call = choice.call
        if call is None:
            return []
        told = _arguments(number, choice.calls, call.feed("", final=True))
        self._note(number, call)
        if call.cut is None:
            choice.call = None
        return told

    def _cut(self, number: int, choice: _Choice) -> int | None:
        """The rule that has ended the choice."""
        self._note(number, choice.prose)
        cut = choice.prose.cut
        for screen in (choice.thought, choice.call):
            if screen is not None:
                self._note(number, screen)
                cut = screen.cut if cut is None else cut
        return cut

    def _note(self, number: int, screen: Screen) -> None:
        for hit in screen.take_hits():
            self._tell(number, hit)

    def _end(self, number: int, *, all_choices: bool) -> list[StreamEvent]:
        self.filtered = True
        ended: list[StreamEvent] = []
        self._choices[number].ended = False
        for at, choice in enumerate(self._choices):
            if not choice.ended and (all_choices or at == number):
                choice.ended = True
                ended.append(ChoiceEnd(choice=at, finish="filtered"))
        return ended


def _delta(choice: int, text: str) -> list[StreamEvent]:
    return [Delta(choice=choice, text=text)] if text else []


def _thought(choice: int, text: str, signature: str = "") -> list[StreamEvent]:
    if not (text or signature):
        return []
    return [ThoughtDelta(choice=choice, text=text, signature=signature)]


def _arguments(choice: int, call: int, text: str) -> list[StreamEvent]:
    return [CallDelta(choice=choice, call=call, arguments=text)] if text else []
