"""What every search has in common: it is fed a text in pieces, and says what is decided of it.

Offsets count characters from the beginning of the text, whatever pieces it came in.
Invariant: what is told of a text depends on the text alone, never on the pieces.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple


class Run(NamedTuple):
    """Characters `start` to `end` belong to matches of a rule."""

    start: int
    end: int
    rule: int


class Scanner(ABC):
    """One text. `decided` is the first character that a match to come could still hold."""

    decided: int = 0

    @abstractmethod
    def feed(self, text: str, *, final: bool) -> list[Run]:
        """More text; the matched places among what this decides.

        After `final` everything so far is decided, as if nothing followed. More may follow all
        the same: what an open match goes on with then belongs to it.
        """
