"""One JSON object, followed character by character until it ends or breaks.

It tells where the object ends without keeping any of it. Invariant: how far it goes depends on
the characters alone, never on the pieces they come in.
"""

import re
from typing import Literal

DEPTH_MAX = 64

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARS = re.compile(r"[-+.0-9a-zA-Z]*")
_SCALAR = re.compile(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null"  # RFC 8259, 3 and 6
)
_HEX_DIGITS = 4

# What may come next, white space aside.
_Next = Literal["object", "key or end", "key", "colon", "value", "value or end", "more or end"]


class ObjectScanner:
    """`done` after the closing brace, `broken` at a character that cannot stand where it is."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._next: _Next = "object"
        self._open = ""  # brackets not closed yet
        self._string = False  # inside one
        self._escape = 0  # characters an escape still wants; -1: the one after the backslash
        self._scalar = ""  # a number or a word, so far

    def scan(self, text: str, at: int, end: int) -> int:
        """Take text[at:end]; returns where it stopped: at `end`, or where it is done or broken."""
        while at < end and not self.done and not self.broken:
            if self._string:
                at = self._in_string(text, at, end)
            elif self._scalar:
                at = self._in_scalar(text, at, end)
            elif (after := _stop(_SPACE, text, at, end)) > at:
                at = after
            else:
                at = self._token(text, at)
        return at

    def _in_string(self, text: str, at: int, end: int) -> int:
        char = text[at]
        if self._escape > 0:
            self.broken = char not in "0123456789abcdefABCDEF"
            self._escape -= 1
        elif self._escape < 0:
            self.broken = char not in '"\\/bfnrtu'
            self._escape = _HEX_DIGITS if char == "u" else 0
        elif char == "\\":
            self._escape = -1
        elif char == '"':
            self._string = False
            self._next = "colon" if self._next in ("key", "key or end") else "more or end"
        else:
            after = _stop(_PLAIN, text, at, end)
            self.broken = after == at
            return after
        return at if self.broken else at + 1

    def _in_scalar(self, text: str, at: int, end: int) -> int:
        after = _stop(_SCALAR_CHARS, text, at, end)
        self._scalar += text[at:after]
        if after < end:
            self.broken = not _SCALAR.fullmatch(self._scalar)
            self._scalar = ""
            self._next = "more or end"
        return after

    def _token(self, text: str, at: int) -> int:
        char = text[at]
        wants_value = self._next in ("value", "value or end")
        if char == '"' and (wants_value or self._next in ("key", "key or end")):
            self._string = True
        elif char == "{" and (wants_value or self._next == "object"):
            self._enter(char, "key or end")
        elif char == "[" and wants_value:
            self._enter(char, "value or end")
        elif char == ":" and self._next == "colon":
            self._next = "value"
        elif char == "," and self._next == "more or end":
            self._next = "key" if self._open[-1] == "{" else "value"
        elif char in "}]" and self._may_close(char):
            self._open = self._open[:-1]
            self._next = "more or end"
            self.done = not self._open
        elif wants_value and _SCALAR_CHARS.match(char, 0).end():  # type: ignore[union-attr] # a pattern of `*` always matches
            self._scalar = char
        else:
            self.broken = True
            return at
        return at if self.broken else at + 1

    def _enter(self, bracket: str, then: _Next) -> None:
        self._open += bracket
        self._next = then
        self.broken = len(self._open) > DEPTH_MAX

    def _may_close(self, bracket: str) -> bool:
        opened = "{" if bracket == "}" else "["
        empty = "key or end" if bracket == "}" else "value or end"
        return self._open[-1:] == opened and self._next in (empty, "more or end")


def _stop(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    found = pattern.match(text, at, end)
    assert found is not None, "a pattern of `*` always matches"
    return found.end()
