"""Whether one life of a replica is worth being sent work, by what came of the work it was sent.

    closed ── enough failures, half of all ends ──► open ── open_ms ──► half open
      ▲                                              ▲                     │
      └──────────── `successes` attempts get on ─────┼─────────────────────┤
                                                     └── another failure ──┘ for longer

A failure is a connection not made, an attempt cut, an answer of 5xx. What a client got wrong,
and a worker that declines for want of room, are none. Only attempts begun since it opened can
close it or open it again: what was under way by then tells of the time before.
"""

import msgspec

from core.window import Window


class BreakerRules(msgspec.Struct, frozen=True, kw_only=True):
    """When it opens and how soon it lets traffic back."""

    window_ms: int = 10_000  # in which failures are counted
    failures: int = 3  # at least, and half of all ends in the window
    open_ms: int = 1_000  # at first, doubling each time
    open_ms_max: int = 8_000
    probe_ms: int = 250  # between requests let through while half open
    successes: int = 2  # that close it


class Breaker:
    """One replica's life. All times are of one clock, in ms."""

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._failures = Window(span_ms=rules.window_ms)
        self._ends = Window(span_ms=rules.window_ms)  # failures and finished attempts
        self._openings = 0  # in a row, none finished between
        self._opened_ms = 0
        self._until_ms = 0
        self._next_probe_ms = 0
        self._got_on = 0
        self._failed_ms = 0
        self.is_open = False

    def allows(self, now_ms: int) -> bool:
        """Whether a request may be sent there; while half open, one for each `probe_ms`."""
        if not self.is_open:
            return True
        if now_ms < max(self._until_ms, self._next_probe_ms):
            return False
        self._next_probe_ms = now_ms + self._rules.probe_ms
        return True

    def is_failing(self, now_ms: int) -> bool:
        """Whether it is open, and by what happened lately.

        Without traffic it stays open; that it still fails is then not known.
        """
        return self.is_open and now_ms - self._failed_ms < self._rules.window_ms

    def is_idle(self, now_ms: int) -> bool:
        """Whether it knows nothing that a new one would not."""
        return not self.is_open and self._failures.total(now_ms) == 0

    def failed(self, begun_ms: int, now_ms: int) -> None:
        """An attempt begun then came to nothing, by the replica's fault."""
        self._failed_ms = now_ms
        if self.is_open:
            if begun_ms >= self._opened_ms:
                self._open(now_ms)
            return
        self._failures.add(1, now_ms)
        self._ends.add(1, now_ms)
        failures = self._failures.total(now_ms)
        if failures >= self._rules.failures and 2 * failures >= self._ends.total(now_ms):
            self._open(now_ms)

    def got_on(self, begun_ms: int) -> None:
        """An attempt begun then has its first token."""
        if self.is_open and begun_ms >= self._opened_ms:
            self._got_on += 1
            if self._got_on >= self._rules.successes:
                self._close()

    def finished(self, now_ms: int) -> None:
        """An attempt came to its end as it should."""
        self._ends.add(1, now_ms)
        if not self.is_open:
            self._openings = 0

    def _open(self, now_ms: int) -> None:
        rules = self._rules
        pause_ms = min(rules.open_ms_max, rules.open_ms << min(self._openings, 16))
        self._openings += 1
        self.is_open = True
        self._opened_ms, self._until_ms = now_ms, now_ms + pause_ms
        self._got_on = 0

    def _close(self) -> None:
        self.is_open = False
        self._failures = Window(span_ms=self._rules.window_ms)
        self._ends = Window(span_ms=self._rules.window_ms)
