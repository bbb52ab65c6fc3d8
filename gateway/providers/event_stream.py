"""Server-sent events as they come off a socket, in pieces of any size.

As the HTML standard says (9.2.6): lines end in LF, CR or CRLF, a comment is a line that begins
with a colon, `data` lines of one event are joined, an empty line ends it, and one that the
stream ends in is nothing. Stricter than the standard where leniency would hide a fault: bytes
that are not UTF-8 and an event without end are errors.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

EVENT_BYTES_MAX = 8 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = "\ufeff"


class ServerEvent(NamedTuple):
    """`event` is empty for one without a name."""

    event: str
    data: str


class EventStreamError(Exception):
    """These bytes are no event stream that we would hold."""


class EventParser:
    """Of one stream. `event_bytes_max` bounds what an unfinished event may hold here."""

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._line: list[bytes] = []  # the unfinished one, in pieces
        self._held = 0  # bytes of the unfinished event, its unfinished line included
        self._after_cr = False  # a line feed that comes next ends no other line
        self._first = True
        self._event = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """The events that these bytes complete, to be taken to the end.

        Raises EventStreamError, after the events before it.
        """
        if not piece:
            return
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_cr = piece.endswith(b"\r")
        *ends, rest = _LINE_END.split(piece)
        for end in ends:
            self._hold(end)
            line, self._line = b"".join(self._line), []
            event = self._take(line)
            if event is not None:
                yield event
        self._hold(rest)

    def _hold(self, piece: bytes) -> None:
        self._held += len(piece)
        if self._held > self._event_bytes_max:
            raise EventStreamError(f"an event is over {self._event_bytes_max} bytes")
        self._line.append(piece)

    def _take(self, line: bytes) -> ServerEvent | None:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise EventStreamError("a line is not UTF-8") from error
        if self._first:
            self._first, text = False, text.removeprefix(_BYTE_ORDER_MARK)
        if not text:
            return self._end()
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif not name:
            self._held -= len(line)  # a comment is gone at once
        return None

    def _end(self) -> ServerEvent | None:
        event = ServerEvent(self._event, "\n".join(self._data)) if self._data else None
        self._event, self._data, self._held = "", [], 0
        return event
