"""What a request needs before it can be submitted and takes too long for the event loop.

That is its grammar, compiled in threads of their own: up to half a second, where most take a
millisecond. Requests without one do not come here. Bounded: beyond the bound a request is
refused, and may go elsewhere.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from core.protocol import Generate

THREADS = 2
WAITING_MAX = 256


class Preparing(Protocol):
    """The part of an engine that this needs."""

    def prepare(self, request: Generate) -> None:
        """Whatever makes `submit` quick for it. Called in any thread; never raises."""


class Preparation:
    """Requests on their way to `submit`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="preparation")
        self._waiting = 0

    async def of(self, request: Generate, engine: Preparing) -> bool:
        """Returns when it can be submitted; False, at once, where too many are waiting."""
        if request.sampling.grammar is None:
            return True
        if self._waiting >= WAITING_MAX:
            return False
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, engine.prepare, request)
        finally:
            self._waiting -= 1
        return True
