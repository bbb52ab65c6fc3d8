"""What happened, in order: a hash of all of it and the last lines as text.

Two runs of one seed have the same hash, or something in them is not a function of the seed.
"""

import hashlib
from collections import deque


class History:
    """Lines go in with their virtual time. `tail_max` of them are kept for a failure report."""

    def __init__(self, tail_max: int) -> None:
        self._hash = hashlib.sha256()
        self._tail: deque[tuple[int, str]] = deque(maxlen=tail_max)
        self.lines = 0

    def note(self, now_ms: int, line: str) -> None:
        """Add a line."""
        self.lines += 1
        self._hash.update(f"{now_ms} {line}\n".encode())
        self._tail.append((now_ms, line))

    @property
    def digest(self) -> str:
        """16 hex digits over everything so far."""
        return self._hash.hexdigest()[:16]

    def tail(self, since_ms: int) -> list[str]:
        """The last lines, each with its milliseconds since `since_ms`."""
        return [f"{at_ms - since_ms:>8} {line}" for at_ms, line in self._tail]
