"""Where one attempt's events go: in order, and nothing after the last.

The engine's thread brings them. A last word may also come from a thread that gives up on it,
at any moment; whichever comes first stands.
"""

import threading
from collections.abc import Sequence

from core.protocol import Failed, Finished
from worker.events import Emit, Event


class Outlet:
    """An `Emit` that closes itself."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, events: Sequence[Event]) -> None:
        """From the engine's thread. Raises what the inner `emit` does."""
        with self._lock:
            self._pass(events)

    def cut(self, last: Failed, timeout_s: float) -> bool:
        """From another thread: the last word, unless there was one.

        False when an `emit` has been under way for `timeout_s`: it is what hangs.
        """
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._pass([last])
        finally:
            self._lock.release()
        return True

    def _pass(self, events: Sequence[Event]) -> None:
        if self._closed or not events:
            return
        # Before it is told: after a last word that raised there is no other.
        self._closed = isinstance(events[-1], Finished | Failed)
        self._emit(events)
