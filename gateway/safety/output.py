"""An answer's events as its caller may have them: held, masked, or ended early.

Each choice's prose is one text, and each call's arguments are another. A call ends what prose
before it could still have become part of; so the order of events stays as it was.
"""

from collections.abc import Callable

from core.safety.rulebook import Rulebook
from gateway.conversation import CallDelta, CallStart, ChoiceEnd, Delta, StreamEvent
from gateway.safety.screen import JSONScreen, Screen
from gateway.safety.sieve import Hit

ChoiceEvent = Delta | CallStart | CallDelta | ChoiceEnd
Tell = Callable[[int, Hit], None]  # the choice, and what was found in it


class _Choice:
    def __init__(self, prose: Screen) -> None:
        self.prose = prose
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
        if isinstance(event, Delta):
            return told + _delta(number, choice.prose.feed(event.text))
        told += _delta(number, choice.prose.feed("", final=True))
        if isinstance(event, CallStart):
            choice.call = JSONScreen(self._book, self._book.output)
            choice.calls = event.call
        else:
            choice.ended = True
        return [*told, event]

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
        if choice.call is not None:
            self._note(number, choice.call)
            cut = choice.call.cut if cut is None else cut
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


def _arguments(choice: int, call: int, text: str) -> list[StreamEvent]:
    return [CallDelta(choice=choice, call=call, arguments=text)] if text else []
