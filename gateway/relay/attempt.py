"""One attempt of a generation on one replica: its frames, until there is a verdict.

    frames ─┬─ finished ───────────────► Outcome
            ├─ refused (NACK), unsent ─┐
            └─ died, failed ───────────┴► Setback

Invariant: an attempt that has ended has its totals in `totals`, once, if it did anything.
"""

import asyncio
import logging
from typing import TypeAlias

import msgspec

from core.errors import Code, Refusal
from core.metering import AttemptTotals
from core.money import EndCause
from core.protocol import (
    Failed,
    Finished,
    Frame,
    Generate,
    Load,
    Nack,
    Prompted,
    Started,
    Tokens,
    Usage,
)
from core.tickets import Dropped, Placed
from gateway.overload import told
from gateway.relay.delivery import Delivery
from gateway.relay.job import FAULT, OVERDUE, Job, Outcome, Parts
from gateway.relay.setbacks import Kind, Setback
from gateway.relay.totals import Totals
from gateway.worker_client import (
    ConnectFailedError,
    CutError,
    FrameStream,
    WorkerRefusedError,
)

_log = logging.getLogger(__name__)

HTTP_SERVER_ERROR = 500
HTTP_TOO_MANY, HTTP_UNAVAILABLE = 429, 503
MOVES = frozenset({"shutting_down", "overloaded"})  # of Failed: nothing is wrong there

Verdict: TypeAlias = Outcome | Setback


class Attempt:
    """Sent already: `stream` is its answer. `produced` counts the tokens heard of so far."""

    def __init__(
        self,
        parts: Parts,
        job: Job,
        *,
        number: int,
        placed: Placed,
        stream: FrameStream,
        delivery: Delivery,
        totals: Totals,
    ) -> None:
        self._parts = parts
        self._job = job
        self._number = number
        self._placed = placed
        self._stream = stream
        self._delivery = delivery
        self._totals = totals
        self._read = Usage()  # as of its start
        self.produced = 0
        self.ended = False

    @property
    def usage(self) -> Usage:
        """What it is known to have cost so far."""
        return msgspec.structs.replace(self._read, output_tokens=self.produced)

    @property
    def running(self) -> AttemptTotals | None:
        """Its totals so far, while it has not ended and has any."""
        usage = self.usage
        return None if self.ended or usage == Usage() else self._told(usage)

    async def read(self) -> Verdict | None:
        """The next frames, passed on; a verdict ends the attempt.

        Raises: what `FrameStream.read` does.
        """
        for frame in await self._stream.read():
            verdict = self._take(frame)
            if verdict is not None:
                return verdict
        return None

    def not_understood(self, error: WorkerRefusedError) -> Verdict:
        """A 4xx is our fault, and would be the same everywhere; a 5xx may be the worker's.

        Two of them mean that there is no room, as whoever stands before a worker puts it.
        """
        if error.status in (HTTP_TOO_MANY, HTTP_UNAVAILABLE):
            return Setback("nack", str(error))
        if error.status >= HTTP_SERVER_ERROR:
            return Setback("error", str(error))
        facts = {"request_id": self._job.request_id, "status": error.status}
        _log.error("a worker did not take what we sent", extra={"facts": facts})
        return Outcome(cause=self._totals.failed_cause, refusal=FAULT)

    def close(self) -> None:
        """End it, with what it is known to have cost."""
        if not self.ended:
            self._end(self.usage)

    async def stop(self) -> None:
        """Abort it and hear its totals out, for `abort_s` at most."""
        aborting = asyncio.create_task(self.abort())
        try:
            async with asyncio.timeout(self._parts.limits.abort_s):
                while not self.ended:
                    for frame in await self._stream.read():
                        self._hear_out(frame)
        except (TimeoutError, CutError, ConnectFailedError, WorkerRefusedError) as error:
            facts = {"request_id": self._job.request_id, "error": repr(error)}
            _log.warning("an aborted attempt did not end in time", extra={"facts": facts})
        self.close()
        await aborting

    async def abort(self) -> None:
        """Tell the worker; nothing is heard of it here."""
        url, request_id = self._placed.url, self._job.request_id
        await self._parts.workers.abort(url, request_id, self._number)

    # Frames.

    def _take(self, frame: Frame) -> Verdict | None:
        match frame:
            case Tokens():
                return self._take_tokens(frame)
            case Load():
                pool = self._job.model.pool
                self._parts.dispatch.observe(pool, self._placed.replica, frame)
            case Started():
                self._take_started(frame)
            case Prompted() if not self._delivery.prompted(frame):
                return Setback("death", "logprobs of another prompt")
            case Nack():
                return self._refused(frame)
            case Finished():
                return self._finished(frame)
            case Failed():
                return self._failed(frame)
            case _:
                pass
        return None

    def _take_started(self, frame: Started) -> None:
        self._read = _read(frame)
        self._delivery.open(
            prompt_tokens=len(self._job.prompt_ids), cached_tokens=frame.cached_tokens
        )

    def _take_tokens(self, frame: Tokens) -> Setback | None:
        if not self._delivery.take(frame):
            return Setback("death", "tokens of a choice that is not open")
        self.produced += len(frame.ids)
        return None

    def _refused(self, frame: Nack) -> Verdict:
        self.ended = True
        if frame.fits_never:
            arm = self._job.arm
            never = Dropped(reason="fits_never")
            refusal = told(never, arm.ticket, service_class=arm.service_class)
            return Outcome(cause=self._totals.failed_cause, refusal=refusal)
        return Setback("nack", frame.reason)

    def _failed(self, frame: Failed) -> Verdict:
        self._end(frame.usage)
        if frame.retryable:
            kind: Kind = "moved" if frame.code in MOVES else "death"
            return Setback(kind, f"{frame.code}: {frame.message}")
        if frame.code == "bad_request":
            return Outcome(cause=EndCause.FAILED, refusal=_unanswerable(frame.message))
        facts = {"request_id": self._job.request_id, "code": frame.code}
        _log.error(f"a worker failed: {frame.message}", extra={"facts": facts})
        return Outcome(cause=EndCause.FAILED, refusal=FAULT)

    def _finished(self, frame: Finished) -> Verdict:
        self._end(frame.usage)
        self._totals.engine_timings = frame.timings
        match frame.cause:
            case "complete" if not self._delivery.answer.open():
                return whole(self._delivery)
            case "expired":
                return Outcome(cause=EndCause.EXPIRED, refusal=OVERDUE)
            case cause:
                return Setback("death", f"finished ({cause}) with choices open")

    def _hear_out(self, frame: Frame) -> None:
        """After an abort only totals matter."""
        match frame:
            case Tokens():
                self.produced += len(frame.ids)
                self._delivery.count(len(frame.ids))
            case Started():
                self._read = _read(frame)
            case Finished():
                self._totals.engine_timings = frame.timings
                self._end(frame.usage)
            case Failed():
                self._end(frame.usage)
            case Nack():
                self.ended = True
            case Load() | Prompted():
                pass

    # Totals.

    def _end(self, usage: Usage) -> None:
        """Close it with its totals. One that did nothing has none."""
        self.ended = True
        self._stream.close()
        if not usage.is_possible:
            facts = {"request_id": self._job.request_id, "replica": self._placed.replica}
            _log.error(f"a worker tells impossible totals: {usage}", extra={"facts": facts})
            usage = self.usage  # the ledger would reject the others, and hold for ever
        if usage != Usage():
            self._totals.ended.append(self._told(usage))

    def _told(self, usage: Usage) -> AttemptTotals:
        return AttemptTotals(attempt=self._number, replica_id=self._placed.replica, usage=usage)


def message(job: Job, delivery: Delivery, *, number: int, placed: Placed) -> Generate:
    """What is sent: the job, and what earlier attempts have answered of it."""
    return Generate(
        request_id=job.request_id,
        attempt=number,
        version=job.model.version,
        prompt_ids=job.prompt_ids,
        choices=delivery.answer.to_resume(),
        sampling=job.sampling,
        tenant_salt=job.salt,
        cache_marks=job.cache_marks,
        service_class=job.arm.service_class,
        deadline_ms=job.arm.deadline_ms,
        placement=placed.placement,
    )


def whole(delivery: Delivery) -> Outcome:
    """Of an answer with no choice open."""
    by_length = delivery.answer.by_length
    return Outcome(cause=EndCause.LENGTH if by_length else EndCause.COMPLETE)


def _unanswerable(reason: str) -> Refusal:
    """Of a request whose own constraints contradict each other, as only drawing shows."""
    message = f"The request cannot be answered: {reason}."
    return Refusal(code=Code.BAD_REQUEST, message=message)


def _read(frame: Started) -> Usage:
    """What an attempt has cost as it starts: the prompt, and no more cached than there is."""
    cached = min(frame.cached_tokens, frame.prompt_tokens)
    return Usage(prompt_tokens=frame.prompt_tokens, cached_tokens=cached)
