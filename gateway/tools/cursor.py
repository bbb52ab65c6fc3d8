"""An answer's text as the parser of tool calls reads it: forward only, waiting for more.

A form is a generator: it yields whenever it needs text that has not come. What it has read but
not decided about is kept; `call` makes a call of it and `give_back` the text that it is.

    told ─────────┬─ kept: read, undecided ─┬─ not read yet
                  start                     at

Invariant: what is told depends on the text alone, never on the pieces it comes in.
"""

import json
import re
from collections.abc import Generator
from typing import TypeVar

import msgspec

from gateway.tools.json_text import ObjectScanner

HELD_CHARS_MAX = 65_536  # of arguments that come before the name of what they are for
_RUN_CHARS_MAX = 256  # of a string in a call's head, quotes included, or of white space

_SPACES = " \t\r\n"
_SPACE = re.compile(rf"[{_SPACES}]*")
_WORD = re.compile(r"[a-zA-Z0-9_-]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"')

T = TypeVar("T")
Steps = Generator[None, None, T]


class Said(msgspec.Struct, frozen=True):
    """More text."""

    text: str


class Called(msgspec.Struct, frozen=True):
    """A call begins; `index` counts the calls of one answer."""

    index: int
    name: str


class Argued(msgspec.Struct, frozen=True):
    """More of a call's arguments: the next characters of one JSON object."""

    index: int
    text: str


Piece = Said | Called | Argued


class Cursor:
    """One answer. Not for use after its end."""

    def __init__(self, *, calls_max: int) -> None:
        self.whole = 0  # calls with all their arguments
        self._calls_max = calls_max
        self._calls = 0
        self._pieces: list[Piece] = []
        self._text = ""
        self._start = 0
        self._at = 0
        self._after_call = False  # nothing has been said since
        self._final = False

    # From outside.

    def feed(self, text: str, *, final: bool) -> None:
        """More has come; `final` says that nothing follows."""
        self._text += text
        self._final = final

    def take(self) -> list[Piece]:
        """What was told since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    # What a form reads with: each waits for what it needs, and passes nothing of what is not
    # there.

    def prose(self, *markers: str) -> Steps[str | None]:
        """Text up to a marker, which is passed; None at the end."""
        pattern = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        while True:
            found = pattern.search(self._text, self._at)
            if found:
                self._say(self._before_space(found.start()))
                self._at = found.end()
                return found.group()
            if self._final:
                self._say_rest()
                return None
            self._say(self._before_space(_before_half(self._text, self._start, markers)))
            self._forget()
            yield

    def ahead(self, text: str) -> Steps[bool]:
        """Whether exactly these characters come next."""
        while True:
            here = self._text[self._at : self._at + len(text)]
            if here == text or self._final or not text.startswith(here):
                return here == text
            yield

    def literal(self, text: str) -> Steps[bool]:
        """Exactly these characters, if they come next."""
        there = yield from self.ahead(text)
        if there:
            self._at += len(text)
        return there

    def space(self) -> Steps[None]:
        """White space, if there is any."""
        yield from self._run(_SPACE)

    def word(self) -> Steps[str]:
        """The characters of a tool's name; there may be none."""
        return (yield from self._run(_WORD))

    def string(self) -> Steps[str | None]:
        """A JSON string, if there is one and it is short."""
        while True:
            limit = self._at + _RUN_CHARS_MAX
            found = _STRING.match(self._text, self._at, limit)
            if found:
                self._at = found.end()
                value: str = json.loads(found.group())
                return value
            opened = self._text[self._at : self._at + 1] in ("", '"')
            if self._final or not opened or len(self._text) >= limit:
                return None
            yield

    def held_object(self) -> Steps[str | None]:
        """A JSON object, kept until it is whole; None: it is none, or too long to keep."""
        scanner, start = ObjectScanner(), self._at
        while True:
            limit = start + HELD_CHARS_MAX
            self._at = scanner.scan(self._text, self._at, min(limit, len(self._text)))
            if scanner.done:
                return self._text[start : self._at]
            if scanner.broken or self._final or self._at == limit:
                return None
            yield

    # What a form decides.

    def call(self, name: str) -> None:
        """What is kept is the head of a call."""
        self._calls += 1
        self._tell(Called(self._calls - 1, name))
        self._start = self._at
        self._after_call = True

    def argue(self, arguments: str) -> None:
        """All arguments of the call that was just begun."""
        self._tell(Argued(self._calls - 1, arguments))
        self._end_call()

    def arguments(self) -> Steps[bool]:
        """The arguments of the call that was just begun, told as they come; whether all came."""
        scanner = ObjectScanner()
        while True:
            self._start = self._at
            self._at = scanner.scan(self._text, self._at, len(self._text))
            if self._at > self._start:
                self._tell(Argued(self._calls - 1, self._text[self._start : self._at]))
                self._start = self._at
            if scanner.done:
                self._end_call()
            if scanner.done or scanner.broken or self._final:
                return scanner.done
            self._forget()
            yield

    def closing(self, marker: str) -> Steps[bool]:
        """White space and a marker that ends a call, if they come next: they are nobody's."""
        before = self._at
        yield from self.space()
        there = yield from self.literal(marker)
        if there:
            self._start = self._at
        else:
            self._at = before
        return there

    def give_back(self) -> None:
        """What is kept is text."""
        self._say(self._at)

    def pass_over(self) -> None:
        """What is kept is the tail of a call: nobody's."""
        self._start = self._at

    def read_again(self) -> None:
        """What is kept is no part of the call before it."""
        self._at = self._start

    # Telling.

    def _run(self, pattern: re.Pattern[str]) -> Steps[str]:
        while True:
            limit = self._at + _RUN_CHARS_MAX
            found = pattern.match(self._text, self._at, limit)
            assert found is not None, "a pattern of `*` always matches"
            if self._final or found.end() < len(self._text):
                self._at = found.end()
                return found.group()
            yield

    def _before_space(self, end: int) -> int:
        """Where the white space that ends here begins, or as much of it as is kept."""
        core = self._text[self._start : end].rstrip(_SPACES)
        return max(self._start + len(core), end - _RUN_CHARS_MAX)

    def _say(self, upto: int) -> None:
        if upto > self._start:
            self._tell(Said(self._text[self._start : upto]))
            self._after_call = False
        self._start = self._at = upto

    def _say_rest(self) -> None:
        # White space after a call only led to what did not come.
        rest = self._text[self._start :]
        spaces = len(rest) <= _RUN_CHARS_MAX and not rest.strip(_SPACES)
        if not (self._after_call and spaces):
            self._say(len(self._text))

    def _tell(self, piece: Piece) -> None:
        if self.whole < self._calls_max and self._calls <= self._calls_max:
            self._pieces.append(piece)

    def _end_call(self) -> None:
        self.whole += self._calls <= self._calls_max

    def _forget(self) -> None:
        """Drop what was told. Only where no form remembers a place."""
        self._text = self._text[self._start :]
        self._at -= self._start
        self._start = 0


def _before_half(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Where the end of the text could be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text) - start), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return len(text) - longest
