"""One text against the rules of one stage: what of it passes, what is masked, where it is cut.

Text is passed on up to the first character that a match to come could hold, and no further
behind than that. Invariant: the pieces put together depend on the text, never on its splits.
"""

from collections.abc import Sequence
from typing import NamedTuple

from core.safety.policy import Rule
from core.safety.rulebook import MakeScanner
from core.safety.scanning import Run

HIT_CHARS_MAX = 256  # of a hit's text that are kept


class Piece(NamedTuple):
    """Characters `start` to `end`: as they are, or masked by a rule."""

    text: str
    rule: int | None


class Hit:
    """One place where a rule matched; it may grow while it is looked at."""

    __slots__ = ("chars", "rule", "text")

    def __init__(self, rule: int) -> None:
        self.rule = rule
        self.chars = 0
        self.text = ""

    @classmethod
    def of(cls, rule: int, text: str) -> "Hit":
        """A text that is one as a whole."""
        hit = cls(rule)
        hit.chars, hit.text = len(text), text[:HIT_CHARS_MAX]
        return hit

    def grow(self, char: str) -> None:
        """One more character of it."""
        self.chars += 1
        if self.chars <= HIT_CHARS_MAX:
            self.text += char


class Sieve:
    """`cut` is the rule that ended the text, once one has; nothing passes after it."""

    def __init__(self, rules: Sequence[Rule], makers: Sequence[MakeScanner]) -> None:
        self._rules = rules
        self._scanners = [make() for make in makers]
        self._held = ""
        self._base = 0
        self._runs: list[Run] = []
        self._growing: dict[int, Hit] = {}  # by rule: hits of the last character passed
        self.hits: list[Hit] = []
        self.cut: int | None = None

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """What is decided now, in order. More may follow a final piece: see `Scanner`."""
        if self.cut is not None:
            return []
        if not self._scanners:
            return [Piece(text, None)] if text else []
        self._held += text
        decided = end = self._base + len(self._held)
        for scanner in self._scanners:
            self._runs += scanner.feed(text, final=final)
            decided = min(decided, scanner.decided)
        assert decided == end or not final
        if decided == self._base:
            return []
        pieces = self._decide(decided) if self._runs else self._pass(decided)
        self._held = self._held[decided - self._base :]
        self._base = decided
        return pieces

    def _pass(self, decided: int) -> list[Piece]:
        self._growing.clear()
        return [Piece(self._held[: decided - self._base], None)]

    def _decide(self, decided: int) -> list[Piece]:
        """Character by character, for there are hits."""
        by_char: list[set[int]] = [set() for _ in range(decided - self._base)]
        for run in self._runs:
            for at in range(run.start - self._base, min(run.end, decided) - self._base):
                by_char[at].add(run.rule)
        self._runs = [
            run._replace(start=max(run.start, decided)) for run in self._runs if run.end > decided
        ]
        pieces: list[Piece] = []
        for char, rules in zip(self._held, by_char, strict=False):
            self._note(char, rules)
            if self.cut is not None:
                break
            masks = [rule for rule in sorted(rules) if self._rules[rule].action == "mask"]
            _append(pieces, char, masks[0] if masks else None)
        return pieces

    def _note(self, char: str, rules: set[int]) -> None:
        growing = {rule: self._growing.get(rule) for rule in sorted(rules)}
        self._growing = {}
        for rule, known in growing.items():
            hit = known
            if hit is None:
                hit = Hit(rule)
                self.hits.append(hit)
            hit.grow(char)
            self._growing[rule] = hit
            if self._rules[rule].action in ("block", "end") and self.cut is None:
                self.cut = rule


def _append(pieces: list[Piece], char: str, rule: int | None) -> None:
    """To the last piece, if it goes the same way."""
    if pieces and pieces[-1].rule == rule:
        pieces[-1] = Piece(pieces[-1].text + char, rule)
    else:
        pieces.append(Piece(char, rule))
