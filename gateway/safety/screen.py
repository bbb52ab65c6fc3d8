"""One text on its way out: prose, or JSON whose strings are read as what they stand for.

    text ─► sieve of acting rules ─► passed, or a replacement for each stretch that is masked
        └─► sieve of logging rules: looks, and holds nothing back

A stretch of masked characters becomes one replacement, that of the rule that masks its first.
"""

from collections.abc import Iterable

from core.safety.rulebook import Rulebook, Searches
from gateway.safety.json_units import NUMBER, STRING, STRUCTURE, Unit, Units
from gateway.safety.sieve import Hit, Piece, Sieve

NUMBER_MASK = "9"  # wherever in a number it is put, the number remains one


class Screen:
    """One choice's prose."""

    def __init__(self, book: Rulebook, searches: Searches) -> None:
        self._book = book
        self._acting = Sieve(book.rules, searches.acting)
        self._logging = Sieve(book.rules, searches.logging)
        self._logs = bool(searches.logging)
        self._masking = False  # the last character passed was masked
        self.masked = False  # some was

    @property
    def cut(self) -> int | None:
        """The rule that ended it."""
        return self._acting.cut

    def feed(self, text: str, *, final: bool = False) -> str:
        """What may be told now."""
        if self._logs:
            self._logging.feed(text, final=final)
        return "".join(self._told(self._acting.feed(text, final=final)))

    def take_hits(self) -> list[Hit]:
        """Those since the last time; a hit may still grow."""
        hits = self._acting.hits + self._logging.hits
        if hits:
            self._acting.hits, self._logging.hits = [], []
        return hits

    def _told(self, pieces: Iterable[Piece]) -> Iterable[str]:
        for piece in pieces:
            if piece.rule is None:
                yield piece.text
            elif not self._masking:
                self.masked = True
                yield self._book.rules[piece.rule].replacement
            self._masking = piece.rule is not None


class JSONScreen(Screen):
    """One text of JSON. Strings and numbers are masked; what gives it its shape never is."""

    def __init__(self, book: Rulebook, searches: Searches) -> None:
        super().__init__(book, searches)
        self._units = Units()
        self._waiting: list[Unit] = []  # read and not told

    def feed(self, text: str, *, final: bool = False) -> str:
        """What may be told now."""
        units = self._units.feed(text, final=final)
        read = "".join([unit.char for unit in units])
        if self._logs:
            self._logging.feed(read, final=final)
        self._waiting += units
        return "".join(self._told(self._acting.feed(read, final=final)))

    def _told(self, pieces: Iterable[Piece]) -> Iterable[str]:
        for piece in pieces:
            units, self._waiting = (
                self._waiting[: len(piece.text)],
                self._waiting[len(piece.text) :],
            )
            for unit in units:
                yield unit.raw if piece.rule is None else self._mask(unit, piece.rule)
                self._masking = piece.rule is not None and unit.kind != STRUCTURE

    def _mask(self, unit: Unit, rule: int) -> str:
        if unit.kind == STRUCTURE:
            return unit.raw
        if self._masking:
            return ""
        return self._book.rules[rule].replacement if unit.kind == STRING else NUMBER_MASK


__all__ = ["NUMBER", "JSONScreen", "Screen"]
