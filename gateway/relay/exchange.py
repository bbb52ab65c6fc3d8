"""One request as a task: routed, then prepared, admitted and generated at a target, and ended.

A target that fails before the client was told anything gives back all it held, and the next of
the plan is tried: no answer is ever of two models. The response reads `channel` and says what
it wrote; a client that left is a call of `cancel`. Invariant: `run` ends with exactly one
outcome, whatever is cancelled, and what follows from it (letting go at the dispatcher,
settling) is nobody's to cancel.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from core.errors import Code, Refusal, RefusedError, refuse
from core.metering import Witness
from core.money import EndCause
from core.safety.policy import Judge
from core.tickets import Headroom
from gateway.conversation import Broke, Done
from gateway.fallback import cause_of
from gateway.relay import judging
from gateway.relay.cached_run import CachedRun
from gateway.relay.call import Call
from gateway.relay.channel import Channel
from gateway.relay.course import Course
from gateway.relay.job import FAULT, Outcome
from gateway.relay.preparation import Preparation
from gateway.relay.shared import Shared
from gateway.relay.targets import NoPlaceError, Run
from gateway.relay.trial import Trial
from gateway.relay.watchdog import Watchdog
from gateway.route_plan import Step

_log = logging.getLogger(__name__)

STALE_TRIES = 2
CHANGING = refuse(Code.UNAVAILABLE, "Your account is being changed. Please retry.").refusal


class Exchange:
    """One request. `task` runs it."""

    def __init__(self, shared: Shared, call: Call) -> None:
        self._shared = shared
        self._asked = call
        self._call = call  # as its safety policy leaves it
        self._identity = call.identity
        self._clock = asyncio.get_running_loop().time
        self._stop: Outcome | None = None
        self._running = False
        self._ending = False
        self._course: Course | None = None
        self._trial: Trial | None = None
        self._delivered_tokens = 0
        self._read_out = asyncio.Event()
        self.request_id = shared.new_request_id()
        self.channel = Channel(shared.limits.events_max)
        self.writing_since_s = 0.0  # 0 while the response is not stuck in a write
        self.cut_connection: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None

    # What the response calls.

    @property
    def headroom(self) -> Headroom | None:
        """The tenant's limits as of its admission."""
        return self._trial.ticket.headroom if self._trial is not None else None

    @property
    def route_headers(self) -> dict[str, str]:
        """The public name that answers, and how many targets were given up for another."""
        course = self._course
        if course is None:
            return {}
        cached = self._trial.cache_headers if self._trial is not None else {}
        return {
            "x-headworks-model": course.name,
            "x-headworks-fallbacks": str(course.fallbacks),
            **cached,
        }

    def cancel(self, cause: EndCause, refusal: Refusal | None = None) -> None:
        """End it now, unless it is ending already. The first caller's cause counts."""
        if self._stop is not None or self._ending:
            return
        self._stop = Outcome(cause=cause, refusal=refusal)
        if self._running and self.task is not None:
            self.task.cancel()

    def delivered(self, tokens: int) -> None:
        """Tokens were written to the client."""
        self._delivered_tokens += tokens

    def cut(self) -> None:
        """The client takes nothing any more: end it, and its connection."""
        self.cancel(EndCause.CLIENT_CANCELLED)
        if self.cut_connection is not None:
            self.cut_connection()

    def abandon(self) -> None:
        """The response reads no more. One that ends so before the exchange has failed it."""
        self.cancel(EndCause.FAILED, FAULT)
        self._read_out.set()

    # What the watchdog looks at.

    @property
    def last_token_s(self) -> float:
        """When the engine produced last, on the loop's clock; 0 before it did."""
        return self._generation.times.last_token_s if self._generation is not None else 0.0

    @property
    def is_written_to(self) -> bool:
        """Whether the client is at the moment taking what there is."""
        return self.writing_since_s > 0

    # The task.

    async def run(self) -> None:
        """From routing to the last event; settlement follows on its own."""
        self._running = True
        timer = asyncio.get_running_loop().call_later(self._overdue_s(), self._overdue)
        watchdog = Watchdog(self, self._call.patience, self._call.received_s)
        try:
            outcome = self._stop or await self._serve()
            if outcome.whole:
                await self.channel.settle(final=True)
        except asyncio.CancelledError:
            outcome = self._stop or Outcome(cause=EndCause.FAILED, refusal=FAULT)
        except RefusedError as error:
            outcome = Outcome(cause=EndCause.NOT_STARTED, refusal=error.refusal)
        except Exception:  # noqa: BLE001 - whatever it is, the request must end and be settled
            facts = {"request_id": self.request_id}
            _log.exception("a request failed by a fault of ours", extra={"facts": facts})
            outcome = Outcome(cause=EndCause.FAILED, refusal=FAULT)
        if self.channel.cut or (self.channel.filtered and outcome.whole):
            outcome = Outcome(cause=EndCause.FILTERED)
        self._ending = True
        timer.cancel()
        watchdog.stop()
        if self._generation is not None:
            await self._generation.stop()
        self._tell_end(outcome)
        if self._trial is not None:
            self._trial.end(
                outcome, read_out=self._read_out, delivered=lambda: self._delivered_tokens
            )

    async def _serve(self) -> Outcome:
        for _ in range(STALE_TRIES):
            await self._screen()
            preparation = Preparation(self._shared, self._call, self._identity)
            course = self._course = Course(await preparation.plan())
            outcome = await self._follow(preparation, course)
            if outcome is not None:
                return outcome
            await self._start_over()
        raise RefusedError(CHANGING)

    async def _follow(self, preparation: Preparation, course: Course) -> Outcome | None:
        """To an answer, or the end of the course. None: it was decided from stale rows."""
        while (step := course.step) is not None:
            outcome = await self._try(preparation, course, step)
            if outcome is None or course.step is step:
                return outcome
            if course.step is None:
                return msgspec.structs.replace(outcome, refusal=course.told)
            await self._go_on(course, course.step)
        raise RefusedError(course.told)

    async def _try(self, preparation: Preparation, course: Course, step: Step) -> Outcome | None:
        """At one target. A failure that another may make good is noted in the course."""
        try:
            prepared = await preparation.prepare(step.option, self.request_id)
        except RefusedError as error:
            cause = error.cause if isinstance(error, NoPlaceError) else cause_of(error.refusal)
            course.skip(error.refusal, cause, is_late=self._is_late)
            return Outcome(cause=EndCause.NOT_STARTED, refusal=error.refusal)
        trial = Trial(self._shared, self._call, self._identity, prepared, self.channel)
        self._trial = trial
        try:
            if not await trial.accept():
                return None
        except RefusedError as error:
            # The tenant's own limits and money are the same everywhere; room is not.
            full = error.refusal.code is Code.OVERLOADED
            course.fail(error.refusal, "capacity" if full else None, is_late=self._is_late)
            return Outcome(cause=EndCause.NOT_STARTED, refusal=error.refusal)
        outcome = await trial.generate(course.first_token_ms, head_waits=course.may_go_on)
        if not outcome.whole and not self.channel.begun:
            refusal = outcome.refusal or FAULT
            cause = outcome.fallback or cause_of(refusal, outcome.cause)
            course.fail(refusal, cause, is_late=self._is_late)
        return outcome

    async def _go_on(self, course: Course, step: Step) -> None:
        """Leave a target for the next, under a new name: the old one is spent."""
        failure = course.failures[-1]
        facts = {
            "request_id": self.request_id,
            "target": failure.target,
            "refusal": failure.refusal.code,
            "cause": step.reason,
            "next": step.option.name,
        }
        _log.warning("a target failed, another is tried", extra={"facts": facts})
        self._shared.metrics.fallbacks.labels(step.reason).inc()
        await self._abandon_trial()

    async def _screen(self) -> None:
        """Hold the request, and its answer, to the tenant's safety policy if it has one."""
        if self._asked.endpoint == judging.ENDPOINT:
            return
        guard = await self._shared.guards.of(self._identity.tenant, self.request_id)
        if guard is not None:
            conversation = await guard.input(self._asked.conversation, self._ask_judge)
            self._call = msgspec.structs.replace(self._asked, conversation=conversation)
            self.channel.screen = guard.output(conversation, self._ask_judge)

    async def _ask_judge(self, judge: Judge, text: str) -> bool:
        asker = msgspec.structs.replace(self._asked, identity=self._identity)
        return await judging.ask(lambda call: Exchange(self._shared, call), asker, judge, text)

    async def _start_over(self) -> None:
        """Undo, read what we had cached again, and go on."""
        await self._abandon_trial()
        self._identity = await self._call.renew_identity()
        await self._shared.renew_routes()

    async def _abandon_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            await trial.abandon()
            self.request_id = self._shared.new_request_id()

    @property
    def _is_late(self) -> bool:
        return self._shared.now_ms() >= self._call.deadline_ms

    @property
    def _generation(self) -> Run | None:
        return self._trial.generation if self._trial is not None else None

    # The end.

    def _overdue_s(self) -> float:
        left_ms = self._call.deadline_ms - self._shared.now_ms()
        return left_ms / 1000 + self._shared.limits.overdue_grace_s

    def _overdue(self) -> None:
        """The engine and the dispatcher end what is overdue; this is for when they cannot."""
        refusal = Refusal(code=Code.TIMEOUT, message="The request was not done by its deadline.")
        self.cancel(EndCause.EXPIRED, refusal)

    def _tell_end(self, outcome: Outcome) -> None:
        generation = self._generation
        if outcome.whole and generation is not None:
            bill = self._trial.bill(outcome.cause) if self._trial is not None else None
            self.channel.end(Done(usage=generation.usage, bill=bill), generation.untold_tokens)
        else:
            self.channel.end(Broke(refusal=outcome.refusal or FAULT))
        self._count(outcome)

    def witnesses(self) -> tuple[Witness, ...]:
        """What a checkpoint says of it while it runs."""
        if self._ending or self._generation is None:
            return ()
        return self._generation.witnesses(self._shared.now_ms())

    @property
    def age_s(self) -> float:
        """Since it was received."""
        return self._clock() - self._call.received_s

    def _count(self, outcome: Outcome) -> None:
        metrics = self._shared.metrics
        metrics.requests.labels(self._call.endpoint, outcome.cause).inc()
        metrics.request_s.observe(self.age_s)
        generation = self._generation
        if generation is None or isinstance(generation, CachedRun):
            return  # what a repeat tells of was counted when it was produced
        usage = generation.usage
        metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        metrics.tokens.labels("cached").inc(usage.cached_tokens)
        metrics.tokens.labels("output").inc(usage.output_tokens)
        times = generation.times
        if times.placed_s:
            metrics.queue_s.observe(times.placed_s - times.armed_s)
        if times.first_token_s:
            metrics.first_token_s.observe(times.first_token_s - self._call.received_s)
