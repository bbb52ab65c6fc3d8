"""What the engine's thread hands to the event loop: one wake for all that a step told.

A wake costs more than a frame: it interrupts the threads that compute the next step. Whatever
is put before the loop comes to fetch it goes along.
"""

import asyncio
import threading
from collections.abc import Callable

from core.protocol import Frame

Deliver = Callable[[list[Frame]], None]


class Handover:
    """To the loop that runs where it is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[tuple[Deliver, list[Frame]]] = []

    def put(self, deliver: Deliver, frames: list[Frame]) -> None:
        """From any thread: `deliver(frames)` on the loop, in the order of the puts."""
        with self._lock:
            self._waiting.append((deliver, frames))
            is_first = len(self._waiting) == 1
        # A loop that is closing has no reader left to tell.
        if is_first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for deliver, frames in waiting:
            deliver(frames)
