r"""JSON text cut into the smallest parts that mean one character, in whatever pieces it comes.

`{"a":"\u00e9"}` is `{`, `"`, `a`, `"`, `:`, `"`, `\u00e9`, `"`, `}`: a search then reads é.
What is no JSON is cut up all the same; nothing is lost or added.
"""

import re
from typing import NamedTuple

STRUCTURE, STRING, NUMBER = range(3)

_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_CODE = re.compile(r"\\u[0-9a-fA-F]{4}")
# What may yet become one of these.
_HALF = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F]"
    r"[0-9a-fA-F]?)?)?)?)?)?)?$"
)
_NUMBER_CHARS = "+-.0123456789eE"
_NUMBER_STARTS = "-0123456789"


class Unit(NamedTuple):
    """`raw` is how it is written, `char` the one character that it stands for."""

    raw: str
    char: str
    kind: int


class Units:
    """One text."""

    def __init__(self) -> None:
        self._text = ""
        self._in_string = False
        self._last = STRUCTURE

    def feed(self, text: str, *, final: bool) -> list[Unit]:
        """The units that are whole; after `final` nothing is kept back."""
        self._text += text
        units: list[Unit] = []
        at = 0
        while at < len(self._text):
            raw = self._raw(at, final=final)
            if raw is None:
                break
            units.append(self._unit(raw))
            at += len(raw)
        self._text = self._text[at:]
        return units

    def _raw(self, at: int, *, final: bool) -> str | None:
        """The next unit as it is written; None where it is not all there."""
        if not self._in_string or self._text[at] != "\\":
            return self._text[at]
        if not final and _HALF.match(self._text, at):
            return None
        for form in (_PAIR, _CODE):
            found = form.match(self._text, at)
            if found:
                return found.group()
        return self._text[at : at + 2]

    def _unit(self, raw: str) -> Unit:
        if self._in_string:
            self._in_string = raw != '"'
            kind = STRING if self._in_string else STRUCTURE
        elif raw == '"':
            self._in_string = True
            kind = STRUCTURE
        else:
            allowed = _NUMBER_CHARS if self._last == NUMBER else _NUMBER_STARTS
            kind = NUMBER if raw in allowed else STRUCTURE
        self._last = kind
        return Unit(raw, _meaning(raw), kind)


def _meaning(raw: str) -> str:
    if len(raw) == 1:
        return raw
    if raw[1] != "u":
        return _ESCAPES.get(raw[1], raw[1])
    codes = [int(code, 16) for code in raw.split("\\u")[1:] if code]
    if len(codes) == 1:
        return chr(codes[0])
    if not codes:
        return "u"
    return chr(0x10000 + ((codes[0] - 0xD800) << 10) + codes[1] - 0xDC00)
