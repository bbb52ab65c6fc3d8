"""An answer that served models judge: held until they have spoken, or told and judged after.

    screen ─► held ──(every so many characters, and at the end)──► judges ─┬─ told
                                                                           └─ ended

Where a judge acts, nothing is told that it has not seen. Where judges only log, nothing is held
for them; they are asked at the end.
"""

from collections.abc import Awaitable, Callable

from core.safety.policy import Judge
from core.safety.rulebook import Rulebook
from gateway.conversation import (
    CallDelta,
    ChoiceEnd,
    Delta,
    Opened,
    StreamEvent,
    ThoughtDelta,
)
from gateway.safety.output import OutputScreen, Tell
from gateway.safety.sieve import Hit

JUDGED_CHARS_MAX = 16_000  # the end of a longer text

Ask = Callable[[int, str], Awaitable[bool]]  # a rule's number and a text: whether it is a hit


class JudgeFaultError(Exception):
    """A judge gave no verdict, and why."""


class JudgedScreen:
    """One answer, after `inner` has screened it."""

    def __init__(
        self, inner: OutputScreen, book: Rulebook, *, choices: int, ask: Ask, tell: Tell
    ) -> None:
        self._inner = inner
        self._book = book
        self._ask = ask
        self._tell = tell
        judges = book.output.judges
        self._acting = [n for n in judges if book.rules[n].action != "log"]
        self._logging = [n for n in judges if book.rules[n].action == "log"]
        self._every = _every(book, self._acting)
        self._texts = [""] * choices
        self._ended = [False] * choices
        self._new: set[int] = set()  # choices with text that no acting judge has seen
        self._held: list[StreamEvent] = []
        self._held_chars = 0
        self._cut = False

    @property
    def filtered(self) -> bool:
        """Whether a choice was ended."""
        return self._cut or self._inner.filtered

    @property
    def over(self) -> bool:
        """Whether every choice has ended."""
        return self._inner.over or all(self._ended)

    @property
    def waits(self) -> bool:
        """Whether enough is held to ask."""
        return bool(self._every) and self._held_chars >= self._every

    def take(self, event: StreamEvent) -> list[StreamEvent]:
        """What may be told now."""
        told = self._inner.take(event)
        for each in told:
            self._read(each)
        if not self._acting or isinstance(event, Opened):
            return told
        self._held += told
        return []

    async def settle(self, *, final: bool) -> list[StreamEvent]:
        """What may be told after judges were asked about all there is."""
        ended: list[StreamEvent] = []
        for number in sorted(self._new):
            ended += await self._judge(number)
        self._new.clear()
        held, self._held, self._held_chars = self._held, [], 0
        if final:
            await self._log()
        return [each for each in held if not self._is_of_ended(each)] + ended

    def _read(self, event: StreamEvent) -> None:
        if isinstance(event, Delta | ThoughtDelta | CallDelta):
            text = event.arguments if isinstance(event, CallDelta) else event.text
            self._texts[event.choice] = (self._texts[event.choice] + text)[-JUDGED_CHARS_MAX:]
            self._held_chars += len(text)
            self._new.add(event.choice)

    async def _judge(self, number: int) -> list[StreamEvent]:
        """The ends of what the judges end."""
        for rule in self._acting:
            if self._ended[number]:
                return []
            if await self._asked(rule, number):
                return self._end(number, all_choices=self._book.rules[rule].action == "block")
        return []

    async def _log(self) -> None:
        for rule in self._logging:
            for number, text in enumerate(self._texts):
                if text and not self._ended[number]:
                    await self._asked(rule, number)

    async def _asked(self, rule: int, number: int) -> bool:
        text = self._texts[number]
        is_hit = await self._ask(rule, text)
        if is_hit:
            self._tell(number, Hit.of(rule, text))
        return is_hit

    def _end(self, number: int, *, all_choices: bool) -> list[StreamEvent]:
        self._cut = True
        told: list[StreamEvent] = []
        for at, ended in enumerate(self._ended):
            if not ended and (all_choices or at == number):
                self._ended[at] = True
                told.append(ChoiceEnd(choice=at, finish="filtered"))
        return told

    def _is_of_ended(self, event: StreamEvent) -> bool:
        choice = getattr(event, "choice", None)
        return choice is not None and self._ended[choice]


def _every(book: Rulebook, acting: list[int]) -> int:
    """How many characters are held before judges are asked; 0 is all of them."""
    detectors = [book.rules[number].detector for number in acting]
    asked = [each.every_chars for each in detectors if isinstance(each, Judge)]
    return 0 if not asked or 0 in asked else min(asked)
