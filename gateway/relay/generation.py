"""A request's attempts on workers, from its place in the queue to the engine's last word.

    place ─► attempt ─┬─ finished ──────────► outcome
      ▲               ├─ refused (NACK) ──┐
      └── at the head ┴─ unsent, died ────┘   elsewhere if it can be; resumed if begun

Each setback costs one retry or resume, and both are bounded. Invariant: the channel gets the
grammar of `gateway.conversation`, one answer whatever number of attempts made it.
"""

import asyncio
import logging
from typing import Literal

import msgspec

from core.errors import Code, Refusal
from core.metering import AttemptTotals, RequestTimings, Witness
from core.money import EndCause, Price
from core.protocol import (
    Failed,
    Finished,
    Frame,
    Generate,
    Load,
    Nack,
    Prompted,
    Sampling,
    Started,
    Timings,
    Tokens,
    Usage,
)
from core.registry import ServedModel
from core.tickets import Arm, Dropped, Placed
from gateway.metrics import Metrics
from gateway.relay.channel import Channel
from gateway.relay.delivery import Delivery
from gateway.relay.hold import Hold
from gateway.relay.ticket import Ticket, drop_refusal
from gateway.routes import Routes
from gateway.worker_client import (
    ConnectFailedError,
    CutError,
    FrameStream,
    WorkerClient,
    WorkerRefusedError,
)
from store.dispatch import Dispatch
from text.rules import TextRules

_log = logging.getLogger(__name__)

HTTP_SERVER_ERROR = 500
FAULT = Refusal(code=Code.INTERNAL, message="The model failed to answer. Please retry.")
DIED = Refusal(code=Code.UNAVAILABLE, message="The model's replica was lost. Please retry.")
BUSY = Refusal(code=Code.OVERLOADED, message="This model is overloaded. Please retry.")
OVERDUE = Refusal(code=Code.TIMEOUT, message="The answer was not finished by its deadline.")


class GenerationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much goes wrong before a request is given up, and how long an abort may take."""

    deaths_max: int = 3
    nacks_max: int = 64
    unsent_s: float = 15.0  # of trying replicas that cannot be reached
    pause_min_s: float = 0.05  # before such a try is repeated, doubling
    pause_max_s: float = 1.0
    abort_s: float = 1.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. An answer that is not whole is told with the refusal, if any."""

    cause: EndCause
    refusal: Refusal | None = None

    @property
    def whole(self) -> bool:
        """Whether the client has been told all there is."""
        return self.cause in {EndCause.COMPLETE, EndCause.LENGTH, EndCause.FILTERED}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be generated. `arm` asks for its first place."""

    request_id: str
    model: ServedModel
    price: Price
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    choices: int
    wants_chances: bool
    rules: TextRules
    salt: bytes
    arm: Arm


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What every generation of this gateway works with."""

    dispatch: Dispatch
    workers: WorkerClient
    routes: Routes
    metrics: Metrics
    limits: GenerationLimits


class _Setback(msgspec.Struct, frozen=True):
    kind: Literal["nack", "unsent", "death"]
    detail: str


class _Attempt(msgspec.Struct):
    """The attempt under way, and the totals it is known to have."""

    number: int
    placed: Placed
    stream: FrameStream
    usage: Usage = Usage()
    ended: bool = False


class Generation:
    """One request's. `run` may be cancelled; `stop` then ends what is under way."""

    def __init__(
        self, parts: Parts, job: Job, *, ticket: Ticket, hold: Hold, channel: Channel
    ) -> None:
        self._parts = parts
        self.job = job
        self._ticket = ticket
        self._hold = hold
        self._channel = channel
        self._clock = asyncio.get_running_loop().time
        self._attempt: _Attempt | None = None
        self._attempts = 0
        self._setbacks = {"nack": 0, "unsent": 0, "death": 0}
        self._aborting: set[asyncio.Task[bool]] = set()
        self._unreached = 0  # tries in a row, since _unreached_s
        self._unreached_s = 0.0
        self._delivery = Delivery(
            channel,
            choices=job.choices,
            rules=job.rules if job.wants_chances else None,
            metrics=parts.metrics,
        )
        self.totals: list[AttemptTotals] = []
        self.engine_timings = Timings()
        self.times = self._delivery.times

    async def run(self) -> Outcome:
        """Until the answer is whole or given up."""
        arm = self.job.arm
        self.times.armed_s = self._clock()
        while True:
            place = await self._ticket.place(arm)
            if isinstance(place, Dropped):
                return self._dropped(place)
            if not self.times.placed_s:
                self.times.placed_s = self._clock()
            if self._delivery.answer.begun and not self._can_resume(place.replica):
                return Outcome(cause=EndCause.FAILED, refusal=DIED)
            end = await self._try(place)
            if isinstance(end, Outcome):
                return end
            if not self._delivery.answer.open():
                return self._whole()  # only the engine's last word is missing
            refusal = self._count(end, place)
            if refusal is not None:
                return Outcome(cause=self._failed_cause(), refusal=refusal)
            await asyncio.sleep(self._pause_s())
            arm = self._again(arm, place)

    async def stop(self) -> None:
        """End the attempt under way, if there is one, and hear its totals out; bounded."""
        attempt = self._attempt
        if attempt is None or attempt.ended:
            return
        url, limits = attempt.placed.url, self._parts.limits
        abort = self._parts.workers.abort(url, self.job.request_id, attempt.number)
        aborting = asyncio.create_task(abort)
        try:
            async with asyncio.timeout(limits.abort_s):
                while not attempt.ended:
                    for frame in await attempt.stream.read():
                        self._hear_out(attempt, frame)
        except (TimeoutError, CutError, ConnectFailedError, WorkerRefusedError) as error:
            facts = {"request_id": self.job.request_id, "error": repr(error)}
            _log.warning("an aborted attempt did not end in time", extra={"facts": facts})
        if not attempt.ended:
            self._end(attempt, attempt.usage)
        await aborting

    @property
    def usage(self) -> Usage:
        """The answer's totals: the prompt once, the output of all attempts."""
        usages = [total.usage for total in self.totals]
        return msgspec.structs.replace(
            usages[-1] if usages else Usage(),
            prompt_tokens=len(self.job.prompt_ids),
            output_tokens=sum(usage.output_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        )

    @property
    def untold_tokens(self) -> int:
        """Tokens that no event has carried yet: they go with the last."""
        return self._delivery.untold_tokens

    def witnesses(self, now_ms: int) -> tuple[Witness, ...]:
        """Every attempt's totals so far, as a checkpoint tells them."""
        totals = list(self.totals)
        attempt = self._attempt
        if attempt is not None and not attempt.ended and attempt.usage != Usage():
            totals.append(_totals(attempt, attempt.usage))
        return tuple(
            Witness(
                request_id=self.job.request_id,
                attempt=total.attempt,
                source="checkpoint",
                usage=total.usage,
                final=False,
                replica_id=total.replica_id,
                at_ms=now_ms,
            )
            for total in totals
        )

    def timings(self, received_s: float, total_ms: float) -> RequestTimings:
        """What is known of them."""
        times, gaps = self.times, self.usage.output_tokens - 1
        first_ms = inter_ms = None
        if times.first_token_s:
            first_ms = (times.first_token_s - received_s) * 1000
            if gaps > 0:
                inter_ms = (times.last_token_s - times.first_token_s) * 1000 / gaps
        return RequestTimings(
            queue_ms=(times.placed_s - times.armed_s) * 1000 if times.placed_s else None,
            prefill_ms=self.engine_timings.prefill_ms if times.first_token_s else None,
            first_token_ms=first_ms,
            inter_token_ms=inter_ms,
            total_ms=total_ms,
        )

    # One attempt.

    async def _try(self, place: Placed) -> Outcome | _Setback:
        self._attempts += 1
        try:
            stream = await self._parts.workers.generate(place.url, self._message(place))
        except ConnectFailedError as error:
            return _Setback("unsent", str(error))
        attempt = self._attempt = _Attempt(self._attempts, place, stream)
        try:
            end = await self._follow(attempt)
        except ConnectFailedError as error:
            end = _Setback("unsent", str(error))
        except WorkerRefusedError as error:
            end = self._not_understood(error)
        except CutError as cut:
            end = _Setback("death", cut.reason)
            # It may be the way that is broken and not the worker: what we cannot read any
            # more, it need not produce.
            abort = self._parts.workers.abort(place.url, self.job.request_id, attempt.number)
            aborting = asyncio.create_task(abort)
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)
        if not attempt.ended:
            self._end(attempt, attempt.usage)
        return end

    def _message(self, place: Placed) -> Generate:
        job = self.job
        return Generate(
            request_id=job.request_id,
            attempt=self._attempts,
            version=job.model.version,
            prompt_ids=job.prompt_ids,
            choices=self._delivery.answer.to_resume(),
            sampling=job.sampling,
            tenant_salt=job.salt,
            service_class=job.arm.service_class,
            deadline_ms=job.arm.deadline_ms,
            placement=place.placement,
        )

    async def _follow(self, attempt: _Attempt) -> Outcome | _Setback:
        while True:
            for frame in await attempt.stream.read():
                end = self._take(attempt, frame)
                if end is not None:
                    return end
            produced = self._delivery.answer.output_tokens
            if produced:
                self._ticket.produced(produced)
                if await self._hold.spent(produced):
                    return await self._cut_short()
            await self._channel.room()

    def _take(self, attempt: _Attempt, frame: Frame) -> Outcome | _Setback | None:
        match frame:
            case Tokens():
                return self._take_tokens(attempt, frame)
            case Load():
                placed = attempt.placed
                self._parts.dispatch.observe(self.job.model.pool, placed.replica, frame)
            case Started():
                self._take_started(attempt, frame)
            case Prompted():
                pass
            case Nack():
                return self._refused(attempt, frame)
            case Finished():
                return self._finished(attempt, frame)
            case Failed():
                return self._failed(attempt, frame)
        return None

    def _take_started(self, attempt: _Attempt, frame: Started) -> None:
        attempt.usage = _read(frame)
        self._delivery.open(
            prompt_tokens=len(self.job.prompt_ids), cached_tokens=frame.cached_tokens
        )

    def _take_tokens(self, attempt: _Attempt, frame: Tokens) -> _Setback | None:
        if not self._delivery.take(frame):
            return _Setback("death", "tokens of a choice that is not open")
        self._count_tokens(attempt, len(frame.ids))
        return None

    def _refused(self, attempt: _Attempt, frame: Nack) -> Outcome | _Setback:
        attempt.ended = True
        if frame.fits_never:
            refusal = drop_refusal(Dropped(reason="fits_never"))
            return Outcome(cause=self._failed_cause(), refusal=refusal)
        return _Setback("nack", frame.reason)

    def _failed(self, attempt: _Attempt, frame: Failed) -> Outcome | _Setback:
        self._end(attempt, frame.usage)
        if frame.retryable:
            return _Setback("death", f"{frame.code}: {frame.message}")
        facts = {"request_id": self.job.request_id, "code": frame.code}
        _log.error(f"a worker failed: {frame.message}", extra={"facts": facts})
        return Outcome(cause=EndCause.FAILED, refusal=FAULT)

    def _not_understood(self, error: WorkerRefusedError) -> Outcome | _Setback:
        """A 4xx is our fault, and would be the same everywhere; a 5xx may be the worker's."""
        if error.status >= HTTP_SERVER_ERROR:
            return _Setback("unsent", str(error))
        facts = {"request_id": self.job.request_id, "status": error.status}
        _log.error("a worker did not take what we sent", extra={"facts": facts})
        return Outcome(cause=self._failed_cause(), refusal=FAULT)

    def _finished(self, attempt: _Attempt, frame: Finished) -> Outcome | _Setback:
        self._end(attempt, frame.usage)
        self.engine_timings = frame.timings
        match frame.cause:
            case "complete" if not self._delivery.answer.open():
                return self._whole()
            case "expired":
                return Outcome(cause=EndCause.EXPIRED, refusal=OVERDUE)
            case cause:
                return _Setback("death", f"finished ({cause}) with choices open")

    def _whole(self) -> Outcome:
        by_length = self._delivery.answer.by_length
        return Outcome(cause=EndCause.LENGTH if by_length else EndCause.COMPLETE)

    async def _cut_short(self) -> Outcome:
        """The reservation is used up and could not be raised: the answer ends here."""
        await self.stop()
        self._delivery.end_open_choices()
        return Outcome(cause=EndCause.LENGTH)

    def _hear_out(self, attempt: _Attempt, frame: Frame) -> None:
        """After an abort only totals matter."""
        match frame:
            case Tokens():
                self._count_tokens(attempt, len(frame.ids))
                self._delivery.count(len(frame.ids))
            case Started():
                attempt.usage = _read(frame)
            case Finished():
                self.engine_timings = frame.timings
                self._end(attempt, frame.usage)
            case Failed():
                self._end(attempt, frame.usage)
            case Nack():
                attempt.ended = True
            case Load() | Prompted():
                pass

    def _end(self, attempt: _Attempt, usage: Usage) -> None:
        """Close the attempt with its totals. One that did nothing has none."""
        attempt.ended = True
        attempt.stream.close()
        if not usage.is_possible:
            facts = {"request_id": self.job.request_id, "replica": attempt.placed.replica}
            _log.error(f"a worker tells impossible totals: {usage}", extra={"facts": facts})
            usage = attempt.usage  # the ledger would reject the others, and hold for ever
        if usage != Usage():
            self.totals.append(_totals(attempt, usage))

    def _count_tokens(self, attempt: _Attempt, count: int) -> None:
        output = attempt.usage.output_tokens + count
        attempt.usage = msgspec.structs.replace(attempt.usage, output_tokens=output)

    # Setbacks.

    def _count(self, setback: _Setback, place: Placed) -> Refusal | None:
        """Note a setback; a refusal when there were too many."""
        self._setbacks[setback.kind] += 1
        self._parts.metrics.setbacks.labels(setback.kind).inc()
        facts = {
            "request_id": self.job.request_id,
            "attempt": self._attempts,
            "replica": place.replica,
            "kind": setback.kind,
            "detail": setback.detail,
        }
        _log.warning("an attempt failed", extra={"facts": facts})
        if setback.kind != "unsent":
            self._unreached = 0
        elif self._unreached == 0:
            self._unreached, self._unreached_s = 1, self._clock()
        else:
            self._unreached += 1
        return self._too_many()

    def _too_many(self) -> Refusal | None:
        limits = self._parts.limits
        if self._setbacks["nack"] > limits.nacks_max:
            return BUSY
        if self._setbacks["death"] > limits.deaths_max:
            return DIED
        if self._unreached and self._clock() - self._unreached_s > limits.unsent_s:
            return DIED
        return None

    def _pause_s(self) -> float:
        """A replica that cannot be reached may be restarting; the dispatcher paces the rest."""
        if self._unreached == 0:
            return 0.0
        limits = self._parts.limits
        return min(limits.pause_max_s, limits.pause_min_s * 2.0**self._unreached)

    def _again(self, arm: Arm, place: Placed) -> Arm:
        """At the head, and elsewhere if there is an elsewhere."""
        exclude = {*arm.exclude, place.replica}
        if self._delivery.answer.begun:
            replicas = self._parts.routes.replicas(arm.pool)
            exclude |= {r.replica for r in replicas if not r.can_resume}
        return msgspec.structs.replace(arm, exclude=tuple(sorted(exclude)), at_head=True)

    def _can_resume(self, replica: str) -> bool:
        return self._parts.routes.can_resume(self.job.model.pool, replica)

    def _dropped(self, dropped: Dropped) -> Outcome:
        cause = EndCause.EXPIRED if dropped.reason == "expired" else self._failed_cause()
        return Outcome(cause=cause, refusal=drop_refusal(dropped))

    def _failed_cause(self) -> EndCause:
        return EndCause.FAILED if self.totals else EndCause.NOT_STARTED


def _totals(attempt: _Attempt, usage: Usage) -> AttemptTotals:
    return AttemptTotals(attempt=attempt.number, replica_id=attempt.placed.replica, usage=usage)


def _read(frame: Started) -> Usage:
    """What an attempt has cost as it starts: the prompt, and no more cached than there is."""
    cached = min(frame.cached_tokens, frame.prompt_tokens)
    return Usage(prompt_tokens=frame.prompt_tokens, cached_tokens=cached)
