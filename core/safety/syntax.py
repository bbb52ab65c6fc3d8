r"""Regular expressions as policies may have them: those whose matches have a greatest length.

    alternation   a|b          repeats     x?  x{3}  x{2,5}
    groups        (a)  (?:a)   sets        [a-z]  [^a-z]  .  \d \w \s \D \W \S
    places        ^  $  \b \B  characters  \n \t \r \x41 \u20ac  and \ before punctuation

What has no greatest length (`*`, `+`, `{2,}`) would hold a stream back for ever; what looks
around or back (`(?=`, `\1`) is not regular. Both are refused by name. Decimal digits of any
script count as 0 to 9, and full-width letters as letters (`core.safety.folding.narrow`).
"""

import re
from typing import NamedTuple, NoReturn

from core.safety.folding import is_word

REPEATS_MAX = 512
NESTED_MAX = 32


class PatternError(ValueError):
    """This pattern cannot be used, and why."""


class CharSet(NamedTuple):
    """Characters, by ranges and by kinds (`d`, `w`, `s`; a capital is all others)."""

    ranges: tuple[tuple[str, str], ...] = ()
    kinds: str = ""
    negated: bool = False
    ignore_case: bool = False

    def holds(self, char: str) -> bool:
        """Whether a character, already narrowed, is of the set."""
        return self._lists(char) is not self.negated

    def _lists(self, char: str) -> bool:
        if any(_is_kind(char, kind) for kind in self.kinds):
            return True
        if any(low <= char <= high for low, high in self.ranges):
            return True
        if not self.ignore_case:
            return False
        variants = {char.lower(), char.upper(), char.casefold()}
        return any(low <= each <= high for low, high in self.ranges for each in variants)


class Char(NamedTuple):
    """One character of a set."""

    of: CharSet


class Place(NamedTuple):
    """Nothing, at a place: `^ $ b B`, or `<w >w <d >d`, no word or digit before or after it."""

    what: str


class Sequence(NamedTuple):
    """One after another."""

    parts: tuple["Node", ...]


class Either(NamedTuple):
    """One of several."""

    parts: tuple["Node", ...]


class Repeat(NamedTuple):
    """`low` to `high` times."""

    part: "Node"
    low: int
    high: int


Node = Char | Place | Sequence | Either | Repeat

_COUNT = re.compile(r"\{(\d{1,6})(,?)(\d{0,6})\}")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
_CODES = {"x": 2, "u": 4}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_PLACES = "bB"
_KINDS = "dwsDWS"
_ANY = CharSet(ranges=(("\n", "\n"),), negated=True)


def parse(pattern: str, *, ignore_case: bool = False) -> Node:
    """Raises PatternError with the reason."""
    parser = _Parser(pattern, ignore_case=ignore_case)
    node = parser.alternation(0)
    if parser.left():
        parser.refuse("')' closes no group")
    return node


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, *, ignore_case: bool) -> None:
        self._text = pattern
        self._at = 0
        self._ignore_case = ignore_case

    def left(self) -> str:
        """What was not read."""
        return self._text[self._at :]

    def refuse(self, why: str) -> NoReturn:
        """Raises PatternError."""
        raise PatternError(f"at character {self._at}: {why}")

    def alternation(self, depth: int) -> Node:
        if depth > NESTED_MAX:
            self.refuse(f"groups are nested more than {NESTED_MAX} deep")
        parts = [self._sequence(depth)]
        while self._passes("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.left() and self._next() not in "|)":
            parts.append(self._repeated(self._one(depth)))
        return Sequence(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        char = self._next()
        if char in ("*", "+") and char:
            self.refuse(f"'{char}' repeats without end, so a match has no greatest length; "
                        "use {0,20} or the like")  # fmt: skip
        if self._passes("?"):
            low, high = 0, 1
        elif char == "{":
            low, high = self._count()
        else:
            return part
        if self._next() in ("?", "+", "*", "{") and self.left():
            self.refuse("a repeat of a repeat: write a group around the first")
        return Repeat(part, low, high)

    def _count(self) -> tuple[int, int]:
        match = _COUNT.match(self._text, self._at)
        if match is None:
            self.refuse("'{' begins no repeat; write '\\{' for the character")
        low = int(match[1])
        if match[2] and not match[3]:
            self.refuse(f"'{match[0]}' repeats without end; give it a greatest number")
        high = int(match[3]) if match[3] else low
        if high > REPEATS_MAX or low > high or high == 0:
            self.refuse(f"'{match[0]}' must repeat from low to high, at most {REPEATS_MAX} times")
        self._at = match.end()
        return low, high

    def _one(self, depth: int) -> Node:
        char = self._take()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return Char(self._set())
        if char == ".":
            return Char(_ANY)
        if char in "^$":
            return Place(char)
        if char == "\\":
            return self._escaped()
        if char in "*+?{":
            self._at -= 1
            self.refuse(f"'{char}' has nothing to repeat")
        return self._literal(char)

    def _group(self, depth: int) -> Node:
        if self._passes("?") and not self._passes(":"):
            self.refuse("groups that look around, have names or set flags are not supported")
        inside = self.alternation(depth + 1)
        if not self._passes(")"):
            self.refuse("a group is not closed")
        return inside

    def _escaped(self) -> Node:
        char = self._next()
        if char and char in _PLACES:
            self._at += 1
            return Place(char)
        if char and char in _KINDS:
            self._at += 1
            return Char(CharSet(kinds=char))
        return self._literal(self._escaped_char())

    def _escaped_char(self) -> str:
        """The one that an escape stands for."""
        char = self._take()
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _CODES:
            digits = self._text[self._at : self._at + _CODES[char]]
            if len(digits) < _CODES[char] or _HEXADECIMAL.fullmatch(digits) is None:
                self.refuse(f"'\\{char}' wants {_CODES[char]} hexadecimal digits")
            self._at += len(digits)
            return chr(int(digits, 16))
        if char.isdigit():
            self.refuse(f"'\\{char}' refers back, which is not regular")
        if char.isalpha():
            self.refuse(f"'\\{char}' is not supported")
        return char

    def _set(self) -> CharSet:
        negated = self._passes("^")
        ranges: list[tuple[str, str]] = []
        kinds = ""
        while not self._passes("]"):
            if self._next() == "\\" and self._text[self._at + 1 : self._at + 2] in tuple(_KINDS):
                kinds += self._text[self._at + 1]
                self._at += 2
                continue
            low = self._set_char()
            high = low
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._set_char()
            if low > high:
                self.refuse(f"'{low}-{high}' is no range")
            ranges.append((low, high))
        if not ranges and not kinds:
            self.refuse("a set is empty")
        return CharSet(tuple(ranges), kinds, negated, self._ignore_case)

    def _set_char(self) -> str:
        char = self._take()
        return self._escaped_char() if char == "\\" else char

    def _literal(self, char: str) -> Char:
        return Char(CharSet(ranges=((char, char),), ignore_case=self._ignore_case))

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._next()
        if not char:
            self.refuse("the pattern ends too early")
        self._at += 1
        return char

    def _passes(self, char: str) -> bool:
        passes = self._next() == char
        self._at += passes
        return passes


def _is_kind(char: str, kind: str) -> bool:
    match kind.lower():
        case "d":
            holds = "0" <= char <= "9"
        case "w":
            holds = is_word(char)
        case _:
            holds = char.isspace()
    return holds is kind.islower()
