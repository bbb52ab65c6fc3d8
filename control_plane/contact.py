"""How long this process has been in unbroken contact with the world, by its own clock.

Silence is evidence only to someone who was listening. After a pause of our own (a stop, a
stall, a database outage) nobody is judged until we have listened for the whole period again.
"""


class Contact:
    """Pure: the caller brings a monotonic clock."""

    def __init__(self, *, gap_max_ms: int) -> None:
        self._gap_max_ms = gap_max_ms
        self._since_ms: int | None = None
        self._last_ms = 0

    def heard(self, now_ms: int) -> int:
        """Note contact now; returns for how many milliseconds it has been unbroken."""
        if self._since_ms is None or now_ms - self._last_ms > self._gap_max_ms:
            self._since_ms = now_ms
        self._last_ms = now_ms
        return now_ms - self._since_ms
