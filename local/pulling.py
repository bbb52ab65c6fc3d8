"""The pull of the model, beside the start of everything else.

A thread cannot be cancelled. It is asked to stop, which it hears at its next report of progress;
should it be stuck, it is left behind, and ends with us: a pull may be killed at any moment.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable

from artifacts.manifest import Manifest

STOP_TIMEOUT_S = 10.0

Stopped = Callable[[], bool]
Pull = Callable[[Stopped], Manifest]


class PullStoppedError(Exception):
    """The pull was asked to stop, and did; what it has is kept for the next one."""


class Pulling:
    """One pull, under way from the start."""

    def __init__(self, pull: Pull) -> None:
        self._stop = threading.Event()
        self._outcome: concurrent.futures.Future[Manifest] = concurrent.futures.Future()
        # As one that runs, it outlives whoever is cancelled while awaiting it.
        self._outcome.set_running_or_notify_cancel()
        # Not asyncio's threads: the end of its loop waits for those.
        threading.Thread(target=self._run, args=(pull,), name="pull", daemon=True).start()

    async def result(self) -> Manifest:
        """Raises what the pull raised."""
        return await asyncio.wrap_future(self._outcome)

    async def stop(self) -> None:
        """Returns when it has ended, or is stuck. What it raised is not of interest any more."""
        self._stop.set()
        await asyncio.to_thread(concurrent.futures.wait, {self._outcome}, STOP_TIMEOUT_S)

    def _run(self, pull: Pull) -> None:
        try:
            self._outcome.set_result(pull(self._stop.is_set))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            self._outcome.set_exception(error)
