"""A request's attempts on workers, from its place in the queue to the engine's last word.

    place ─► attempt ─┬─ finished ──────────► outcome
      ▲               ├─ refused (NACK) ──┐
      └── at the head ┴─ unsent, died ────┘   elsewhere if it can be; resumed if begun

Each setback costs one retry or resume, and both are bounded: by this request (`setbacks`), by
the fleet's budget, and by what replicas die of (`suspicion`). Invariant: the channel gets the
grammar of `gateway.conversation`, one answer of one version whatever number of attempts made it.
"""

import asyncio
import logging

import msgspec

from core.errors import Refusal
from core.metering import AttemptTotals, RequestTimings, Witness
from core.money import EndCause
from core.protocol import Usage
from core.tickets import Arm, Dropped, Placed
from gateway.overload import told
from gateway.relay.attempt import Attempt, Verdict, message, whole
from gateway.relay.channel import Channel
from gateway.relay.delivery import Delivery
from gateway.relay.hold import Hold
from gateway.relay.job import DIED, FAULT, Job, Outcome, Parts
from gateway.relay.prompt import prompt_of
from gateway.relay.setbacks import FAULTS, REPEATED, Setback, Setbacks
from gateway.relay.suspicion import Suspicion
from gateway.relay.ticket import Ticket
from gateway.relay.totals import Totals
from gateway.replica_health import Watch
from gateway.worker_client import ConnectFailedError, CutError, WorkerRefusedError

_log = logging.getLogger(__name__)


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
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._setbacks = Setbacks(parts.limits, self._clock)
        self._suspicion = Suspicion(parts, job)
        self._tried: set[str] = set()  # replicas that came to nothing
        self._delivery = Delivery(
            channel,
            choices=job.choices,
            rules=job.rules if job.wants_chances else None,
            tools=job.tools,
            metrics=parts.metrics,
            prompt=prompt_of(job),
            echo=job.echo,
        )
        self._totals = Totals(job.request_id, prompt_tokens=len(job.prompt_ids))
        self.times = self._delivery.times

    async def run(self) -> Outcome:
        """Until the answer is whole or given up."""
        self._parts.failures.began()
        refusal = self._suspicion.refusal()
        if refusal is not None:
            return Outcome(cause=EndCause.NOT_STARTED, refusal=refusal)
        self.times.armed_s = self._clock()
        while True:
            place = await self._ticket.place(self._arm())
            if isinstance(place, Dropped):
                return self._dropped(place)
            if not self.times.placed_s:
                self.times.placed_s = self._clock()
            if self._delivery.answer.begun and not self._can_resume(place.replica):
                return Outcome(cause=EndCause.FAILED, refusal=DIED)
            verdict = await self._try(place)
            if isinstance(verdict, Outcome):
                return verdict
            if not self._delivery.answer.open():
                return whole(self._delivery)  # only the engine's last word is missing
            refusal = self._count(verdict, place) or await self._ask_for_another(verdict)
            if refusal is not None:
                return Outcome(cause=self._totals.failed_cause, refusal=refusal)
            await asyncio.sleep(self._setbacks.pause_s())

    async def stop(self) -> None:
        """End the attempt under way, if there is one, and hear its totals out; bounded."""
        attempt = self._attempt
        if attempt is not None and not attempt.ended:
            await attempt.stop()

    @property
    def totals(self) -> list[AttemptTotals]:
        """Those of the attempts that have ended and did anything."""
        return self._totals.ended

    @property
    def usage(self) -> Usage:
        """The answer's totals: the prompt once, the output of all attempts."""
        return self._totals.usage

    @property
    def untold_tokens(self) -> int:
        """Tokens that no event has carried yet: they go with the last."""
        return self._delivery.untold_tokens

    def witnesses(self, now_ms: int) -> tuple[Witness, ...]:
        """Every attempt's totals so far, as a checkpoint tells them."""
        running = self._attempt.running if self._attempt is not None else None
        return self._totals.witnesses(running, now_ms)

    def timings(self, received_s: float, total_ms: float) -> RequestTimings:
        """What is known of them."""
        return self._totals.timings(self.times, received_s=received_s, total_ms=total_ms)

    # One attempt.

    async def _try(self, place: Placed) -> Verdict:
        self._attempts += 1
        self._tried.add(place.replica)
        watch = self._parts.health.watch(place.boot_id)
        verdict = await self._send(place, watch)
        if isinstance(verdict, Setback) and verdict.kind in FAULTS:
            watch.failed()
        return verdict

    async def _send(self, place: Placed, watch: Watch) -> Verdict:
        asked = message(self.job, self._delivery, number=self._attempts, placed=place)
        try:
            stream = await self._parts.workers.generate(place.url, asked)
        except ConnectFailedError as error:
            return Setback("unsent", str(error))
        attempt = self._attempt = Attempt(
            self._parts,
            self.job,
            number=self._attempts,
            placed=place,
            stream=stream,
            delivery=self._delivery,
            totals=self._totals,
        )
        try:
            verdict = await self._follow(attempt, watch)
        except WorkerRefusedError as error:
            verdict = attempt.not_understood(error)
        except (ConnectFailedError, CutError) as error:
            # One that was sent on a kept connection and can be sent nowhere now is no less cut.
            verdict = Setback("death", str(error))
        else:
            self._hear(verdict, watch)
        if isinstance(verdict, Setback) and verdict.kind == "death":
            self._suspicion.died(place, self._attempts, told=attempt.ended)
        attempt.close()
        return verdict

    def _hear(self, verdict: Verdict, watch: Watch) -> None:
        """The engine's own last word on an attempt."""
        if isinstance(verdict, Setback):
            return
        if verdict.refusal is FAULT:
            watch.failed()
        else:
            watch.finished()
            self._suspicion.answered()

    async def _follow(self, attempt: Attempt, watch: Watch) -> Verdict:
        while True:
            verdict = await attempt.read()
            if verdict is not None:
                return verdict
            produced = self._delivery.answer.output_tokens
            if attempt.produced:
                watch.got_on()
            if produced:
                self._ticket.produced(produced)
                if await self._hold.spent(produced) or self._channel.cut:
                    return await self._cut_short(attempt)
            await self._channel.room()

    async def _cut_short(self, attempt: Attempt) -> Outcome:
        """The reservation is used up and could not be raised, or the answer was cut off."""
        await attempt.stop()
        self._delivery.end_open_choices()
        return Outcome(cause=EndCause.LENGTH)

    # Between attempts.

    def _count(self, setback: Setback, place: Placed) -> Refusal | None:
        """Note a setback; a refusal when there were too many."""
        self._parts.metrics.setbacks.labels(setback.kind).inc()
        facts = {
            "request_id": self.job.request_id,
            "attempt": self._attempts,
            "replica": place.replica,
            "kind": setback.kind,
            "detail": setback.detail,
        }
        _log.warning("an attempt failed", extra={"facts": facts})
        return self._setbacks.count(setback)

    async def _ask_for_another(self, setback: Setback) -> Refusal | None:
        """A retry or resume for this setback, or why there is none."""
        if setback.kind not in REPEATED:
            return None
        refusal = await self._suspicion.verdict()
        if refusal is None and not await self._parts.failures.may_retry():
            self._parts.metrics.retries_refused.inc()
            refusal = DIED
        return refusal

    def _arm(self) -> Arm:
        """Past replicas that fail; after a setback at the head, and elsewhere if that can be."""
        arm = self.job.arm
        replicas = self._parts.routes.replicas(arm.pool)
        exclude = self._parts.health.shunned(replicas)
        if self._delivery.answer.begun:
            exclude |= {r.replica for r in replicas if not r.can_resume}
        if not self._tried:
            return msgspec.structs.replace(arm, exclude=tuple(sorted(exclude))) if exclude else arm
        exclude |= self._tried
        return msgspec.structs.replace(arm, exclude=tuple(sorted(exclude)), at_head=True)

    def _can_resume(self, replica: str) -> bool:
        return self._parts.routes.can_resume(self.job.model.pool, replica)

    def _dropped(self, dropped: Dropped) -> Outcome:
        cause = EndCause.EXPIRED if dropped.reason == "expired" else self._totals.failed_cause
        arm = self.job.arm
        self._parts.shortage.saw(arm, dropped)
        self._parts.metrics.refusals.labels("pool", dropped.reason).inc()
        refusal = told(dropped, arm.ticket, service_class=arm.service_class)
        return Outcome(cause=cause, refusal=refusal)
