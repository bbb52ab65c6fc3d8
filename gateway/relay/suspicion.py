"""Whether one request is what replicas die of: asked before each attempt, and after each death.

A life counts only when it is over: nobody listens at its address, or somebody else does. What
was cut on the way, and a replica that drains or is stopped as asked, count for nothing. The
fingerprint is made when there is something to compare it with, and so for hardly any request.
"""

import asyncio
from collections.abc import Coroutine
from functools import cached_property

from core.errors import Code, Refusal
from core.tickets import Placed
from gateway.relay.fingerprint import fingerprint
from gateway.relay.job import Job, Parts

MINUTE_MS = 60_000
ASKS_S = (0.0, 0.05, 0.25)  # pauses before each time that a silent replica is asked
ASKS_TOLD_S = (1.0, 2.0, 4.0)  # and one that could still tell: a watchdog may be ending it
VERDICT_S = 1.5  # that another attempt waits for


class Suspicion:
    """One request's. Nothing here raises; what is under way at its end goes on by itself."""

    def __init__(self, parts: Parts, job: Job) -> None:
        self._parts = parts
        self._job = job
        self._inquests: list[asyncio.Task[None]] = []

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._parts.fingerprint_key, self._job)

    def refusal(self) -> Refusal | None:
        """What such a request is told, if two replicas have died under it."""
        failures = self._parts.failures
        if not failures.has_suspects:
            return None
        left_ms = failures.refused_ms(self._fingerprint)
        return None if left_ms is None else _refused(left_ms)

    def died(self, placed: Placed, number: int, *, told: bool) -> None:
        """An attempt came to nothing: find out whether its replica ended with it.

        One that could still tell of it (`told`) may be about to end. One that was asked to leave
        is killed at some time, whatever it works on.

        It may be the way that is broken and not the worker: what we cannot read any more, it
        need not produce, so that the same call aborts it.
        """
        views = self._parts.routes.replicas(self._job.arm.pool)
        if any(view.boot_id == placed.boot_id and not view.ready for view in views):
            _start(self._parts, self._abort(placed, number))
            return
        self._inquests.append(_start(self._parts, self._inquest(placed, number, told=told)))

    async def verdict(self) -> Refusal | None:
        """After another death: as `refusal`, once it is known which of them were any.

        With one death there is nothing to wait for.
        """
        if len(self._inquests) > 1:
            await asyncio.wait(self._inquests, timeout=VERDICT_S)
        return self.refusal()

    def answered(self) -> None:
        """It has come to its end on a replica that lives: nobody dies of it."""
        failures = self._parts.failures
        if self._inquests or (failures.has_suspects and failures.deaths(self._fingerprint)):
            _start(self._parts, self._absolve())

    async def _absolve(self) -> None:
        if self._inquests:
            await asyncio.wait(self._inquests)
        if self._parts.failures.deaths(self._fingerprint):
            await self._parts.failures.absolve(self._fingerprint)

    async def _abort(self, placed: Placed, number: int) -> None:
        await self._parts.workers.abort(placed.url, self._job.request_id, number)

    async def _inquest(self, placed: Placed, number: int, *, told: bool) -> None:
        for pause_s in ASKS_TOLD_S if told else ASKS_S:
            await asyncio.sleep(pause_s)
            heard = await self._parts.workers.abort(placed.url, self._job.request_id, number)
            if heard.refused or heard.boot_id not in ("", placed.boot_id):
                await self._parts.failures.record_death(self._fingerprint, placed.boot_id)
                return
            if heard.boot_id and not told:
                return


def _start(parts: Parts, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
    """Beside the request, and beyond its end; `Parts` keeps it from being forgotten."""
    task = asyncio.create_task(work)
    parts.beside.add(task)
    task.add_done_callback(parts.beside.discard)
    return task


def _refused(left_ms: int) -> Refusal:
    minutes = -(-left_ms // MINUTE_MS)
    return Refusal(
        code=Code.UNPROCESSABLE,
        message="Two replicas of the model crashed while they worked on this request. It is not "
        f"tried again for {minutes} min. Change it, or tell us about it.",
        retry_after_ms=left_ms,
    )
