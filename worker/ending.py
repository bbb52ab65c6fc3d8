"""The end that a worker was asked for: why, and how long what runs still has.

A fleet that drains it, SIGTERM and `POST /drain` (a spot machine that is taken back) all ask for
the same. Asked again, the earlier deadline holds; the end itself is not taken back. Pure: the
caller brings a monotonic clock.
"""


class Ending:
    """Of one process. What the fleet asked for itself it need not be told."""

    def __init__(self) -> None:
        self.reason = ""
        self._deadline_ms = 0
        self._own_deadline_ms: int | None = None
        self._own_reason = ""

    @property
    def asked(self) -> bool:
        """Whether it is to end."""
        return bool(self.reason)

    def ask(self, reason: str, *, within_ms: int, now_ms: int, by_fleet: bool = False) -> None:
        """End within that time. `reason` is not empty."""
        assert reason, "whoever ends a worker says why"
        deadline_ms = now_ms + within_ms
        self._deadline_ms = min(self._deadline_ms, deadline_ms) if self.asked else deadline_ms
        self.reason = self.reason or reason
        if not by_fleet and (self._own_deadline_ms is None or deadline_ms < self._own_deadline_ms):
            self._own_deadline_ms, self._own_reason = deadline_ms, reason

    def left_ms(self, now_ms: int) -> int:
        """Until what still runs is ended, and resumed elsewhere."""
        return max(0, self._deadline_ms - now_ms)

    def told(self, now_ms: int) -> tuple[str, int | None]:
        """For the fleet: the reason, and what is left of the time, where it did not ask itself."""
        if self._own_deadline_ms is None:
            return "", None
        return self._own_reason, max(0, self._own_deadline_ms - now_ms)
