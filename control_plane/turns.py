"""One at a time for each name, in the order of arrival.

Only within this process: for what merely had better not overtake, and is checked where it counts.
"""

import asyncio
from weakref import WeakValueDictionary


class Turns:
    """Remembers a name for as long as somebody has its turn, or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: str) -> asyncio.Lock:
        """To be entered with `async with`. Asyncio's locks are taken in order."""
        return self._locks.setdefault(name, asyncio.Lock())

    def __len__(self) -> int:
        return len(self._locks)
