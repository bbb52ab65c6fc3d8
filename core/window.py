"""How many of something happened lately: a count over a sliding window, in two numbers.

The window before is counted by the part of it that still lies inside. Time never goes back.
"""

import msgspec


class Window(msgspec.Struct, kw_only=True):
    """A count over the last `span_ms`."""

    span_ms: int
    start_ms: int = 0  # of the present window
    count: int = 0
    before: int = 0  # the count of the window before the present one

    def add(self, number: int, now_ms: int) -> None:
        """So many happened now."""
        self.move(now_ms)
        self.count += number

    def total(self, now_ms: int) -> int:
        """How many in the last `span_ms`, rounded down."""
        self.move(now_ms)
        inside_ms = self.span_ms - max(0, now_ms - self.start_ms)
        return self.count + self.before * inside_ms // self.span_ms

    def move(self, now_ms: int) -> None:
        """Begin a new window where the present one is over."""
        spans = max(0, now_ms - self.start_ms) // self.span_ms
        if spans:
            self.before = self.count if spans == 1 else 0
            self.count = 0
            self.start_ms += spans * self.span_ms
