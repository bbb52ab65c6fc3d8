"""Jobs that run for ever beside the API: each supervised, timed, counted and bounded.

A job that fails is tried again with growing pauses and never takes the process or another job
with it: a control plane that answers but does not sweep is worth more than none, and the
metrics say which job is ill.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from control_plane.leader import Leadership
from control_plane.metrics import Metrics
from store.leader import NotLeaderError

STAND_BY_MS = 200  # until a leader's job looks again whether we lead

_log = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`run` does one round and returns; `every_ms` lies between the end of one and the next.

    A leader's job runs on the control plane that leads, and fences each of its transactions.
    """

    name: str
    every_ms: int
    run: Callable[[], Awaitable[None]]
    leader: bool = False


def pause_ms(every_ms: int, *, failures: int, max_ms: int) -> int:
    """How long to wait after a round: doubled for each failure in a row, up to `max_ms`.

    A job that runs each hour is tried again after `max_ms`, not after an hour.

    >>> [pause_ms(1000, failures=n, max_ms=5000) for n in (0, 1, 2, 3)]
    [1000, 2000, 4000, 5000]
    >>> [pause_ms(3_600_000, failures=n, max_ms=5000) for n in (0, 1)]
    [3600000, 5000]
    """
    if failures == 0:
        return every_ms
    return min(every_ms << min(failures, 30), max_ms)


class Background:
    """Owns the tasks. `start` once, `close` once."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        timeout_ms: int,
        backoff_max_ms: int,
        leadership: Leadership | None = None,
    ) -> None:
        self._metrics = metrics
        self._leadership = leadership
        self._timeout_ms = timeout_ms
        self._backoff_max_ms = backoff_max_ms
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    def start(self, jobs: list[Job]) -> None:
        """Begin every job at once."""
        assert not self._tasks, "started twice"
        self._tasks = [asyncio.create_task(self._for_ever(job), name=job.name) for job in jobs]

    async def close(self) -> None:
        """Cancel what runs and wait for it. Every job may be cut: the next round starts over."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _for_ever(self, job: Job) -> None:
        failures = 0
        # Not `while True`: Python 3.11's wait_for, with which the pool waits for a connection,
        # loses a cancellation that comes at the same moment as the answer (bpo-37658).
        while not self._closing:
            if job.leader and not (self._leadership and self._leadership.held):
                await asyncio.sleep(STAND_BY_MS / 1000)
                continue
            failures = 0 if await self._round(job, failures) else failures + 1
            pause = pause_ms(job.every_ms, failures=failures, max_ms=self._backoff_max_ms)
            if not self._closing:
                await asyncio.sleep(pause / 1000)

    async def _round(self, job: Job, failures: int) -> bool:
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self._run(job)
        except NotLeaderError as error:
            _log.warning("a leader's job was fenced: %s", error, extra={"facts": {"job": job.name}})
            self._metrics.job_runs.labels(job.name, "fenced").inc()
            return True  # nothing is wrong with the job
        except Exception:  # noqa: BLE001 - whatever it was, the next round may do better
            if self._closing:  # its connections go before it when a cancellation was lost
                return False
            facts = {"job": job.name, "failures": failures + 1}
            _log.exception("background job failed", extra={"facts": facts})
            self._metrics.job_runs.labels(job.name, "failed").inc()
            return False
        self._metrics.job_runs.labels(job.name, "done").inc()
        self._metrics.job_success.labels(job.name).set(time.time_ns() / 1e9)
        return True

    async def _run(self, job: Job) -> None:
        if not job.leader:
            return await job.run()
        assert self._leadership is not None, "a leader's job runs only where somebody may lead"
        with self._leadership.within_term():
            return await job.run()
