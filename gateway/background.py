"""Loops beside the requests: each does one thing, every so often, until it is closed.

A loop never dies of its work's failures; it tells of the first in a row and of the recovery.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)

CLOSE_TRIES = 5


class Background:
    """The loops of one process."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def every(
        self, seconds: float, name: str, work: Callable[[], Awaitable[object]], *, within_s: float
    ) -> None:
        """Start `work` now and then each `seconds` after the last start; cut it at `within_s`."""
        self._tasks.append(asyncio.create_task(_loop(seconds, name, work, within_s), name=name))

    async def close(self) -> None:
        """Stop them all, within `CLOSE_TRIES` seconds.

        A connection pool that hands out a connection just then swallows a cancellation.
        """
        left = set(self._tasks)
        for _ in range(CLOSE_TRIES):
            for task in left:
                task.cancel()
            if left:
                _, left = await asyncio.wait(left, timeout=1.0)
        self._tasks.clear()


async def _loop(
    seconds: float, name: str, work: Callable[[], Awaitable[object]], within_s: float
) -> None:
    clock = asyncio.get_running_loop().time
    failing = False
    while True:
        began_s = clock()
        try:
            async with asyncio.timeout(within_s):
                await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next round may go well
            if not failing:
                facts = {"loop": name, "error": repr(error)}
                _log.warning("a background loop fails", extra={"facts": facts})
            failing = True
        else:
            if failing:
                _log.info("a background loop is well again", extra={"facts": {"loop": name}})
            failing = False
        await asyncio.sleep(max(0.0, began_s + seconds - clock()))
