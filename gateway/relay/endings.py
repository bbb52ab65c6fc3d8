"""What follows a request's end and must not be lost: settlements, and letting go of tickets.

They outlive the response and its client, and are waited for at shutdown.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class Endings:
    """Tasks that nobody cancels."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it, and say so if it failed. Who waits for the task need not."""
        task = asyncio.create_task(ending)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def drain(self, within_s: float) -> int:
        """Wait for all of them, new ones included; returns how many are still not done."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while self._tasks and loop.time() < until_s:
            await asyncio.wait(self._tasks, timeout=until_s - loop.time())
        return len(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("an ending failed", exc_info=task.exception())
