"""Virtual time: what happens next, in order of time and then of scheduling.

One event is one callback and all that it sets off at the same moment (`soon`). Invariant: the
order of events is a function of what was scheduled, never of the machine.
"""

import heapq
from collections import deque
from collections.abc import Callable

START_MS = 1_000_000_000  # some Unix milliseconds: 0 means "none" to the decision modules


class Timer:
    """A callback that is due. Cancelling one that has run is harmless."""

    __slots__ = ("action", "cancelled", "label")

    def __init__(self, label: str, action: Callable[[], None]) -> None:
        self.label = label
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        """It will not run."""
        self.cancelled = True


class Clock:
    """Virtual milliseconds and everything that is due."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self._due: list[tuple[int, int, Timer]] = []
        self._scheduled = 0
        self._soon: deque[Callable[[], object]] = deque()

    def after(self, delay_ms: int, label: str, action: Callable[[], None]) -> Timer:
        """Schedule `action`; `label` names it in the history."""
        assert delay_ms >= 0
        return self.at(self.now_ms + delay_ms, label, action)

    def at(self, at_ms: int, label: str, action: Callable[[], None]) -> Timer:
        """The same at a moment that is not in the past."""
        assert at_ms >= self.now_ms
        timer = Timer(label, action)
        self._scheduled += 1
        heapq.heappush(self._due, (at_ms, self._scheduled, timer))
        return timer

    def soon(self, action: Callable[[], object]) -> None:
        """Run within the present event, after what is running."""
        self._soon.append(action)

    def step(self) -> str | None:
        """Run the next event and return its label; None when nothing is due any more."""
        while self._due:
            at_ms, _, timer = heapq.heappop(self._due)
            if timer.cancelled:
                continue
            self.now_ms = at_ms
            timer.action()
            while self._soon:
                self._soon.popleft()()
            return timer.label
        return None
