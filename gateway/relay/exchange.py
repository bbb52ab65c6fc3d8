"""One request as a task: routed, counted, admitted and reserved, generated, ended, settled.

The response reads `channel` and says what it wrote; a client that left is a call of `cancel`.
Invariant: `run` ends with exactly one outcome, whatever is cancelled, and what follows from
it (letting go at the dispatcher, settling) is nobody's to cancel.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from core.errors import Code, Refusal, RefusedError, refuse
from core.metering import RequestTimings, Witness
from core.money import EndCause
from core.tickets import Headroom
from gateway.conversation import Broke, Done
from gateway.relay.admission import Admission
from gateway.relay.call import Call
from gateway.relay.channel import Channel
from gateway.relay.generation import Generation
from gateway.relay.hold import Hold
from gateway.relay.job import FAULT, Job, Outcome
from gateway.relay.preparation import Preparation
from gateway.relay.shared import Shared
from gateway.relay.ticket import Ticket
from gateway.relay.watchdog import Watchdog

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
        self._admission: Admission | None = None
        self._generation: Generation | None = None
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
        return self._admission.ticket.headroom if self._admission is not None else None

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
        if self._admission is not None:
            self._shared.endings.start(self._let_go(self._admission.ticket, self._generation))
            self._shared.endings.start(self._settle(self._admission.hold, outcome))

    async def _serve(self) -> Outcome:
        for _ in range(STALE_TRIES):
            await self._screen()
            preparation = Preparation(self._shared, self._call, self._identity, self.request_id)
            prepared = await preparation.prepare()
            self._admission = Admission(self._shared, self._call, self._identity, prepared)
            if await self._admission.accept():
                return await self._generate(prepared.job, self._admission)
            await self._start_over(self._admission)
        raise RefusedError(CHANGING)

    async def _screen(self) -> None:
        """Hold the request, and its answer, to the tenant's safety policy if it has one."""
        guard = await self._shared.guards.of(self._identity.tenant, self.request_id)
        if guard is not None:
            conversation = await guard.input(self._asked.conversation)
            self._call = msgspec.structs.replace(self._asked, conversation=conversation)
            self.channel.screen = guard.output(conversation)

    async def _start_over(self, admission: Admission) -> None:
        """Undo, read what we had cached again, and go on under a new name.

        The old name is spent: its reservation was made from the old rows.
        """
        admission.undo()
        self._admission = None
        self._identity = await self._call.renew_identity()
        await self._shared.renew_routes()
        self.request_id = self._shared.new_request_id()

    async def _generate(self, job: Job, admission: Admission) -> Outcome:
        self._generation = Generation(
            self._shared.generation,
            job,
            ticket=admission.ticket,
            hold=admission.hold,
            channel=self.channel,
        )
        return await self._generation.run()

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
            self.channel.end(Done(usage=generation.usage), generation.untold_tokens)
        else:
            self.channel.end(Broke(refusal=outcome.refusal or FAULT))
        self._count(outcome)

    async def _let_go(self, ticket: Ticket, generation: Generation | None) -> None:
        if generation is None or not generation.totals:
            await ticket.cancel()
            return
        read = generation.totals[-1].usage
        hashes = generation.job.arm.prefix_hashes
        self._shared.prefixes.remember(hashes)
        await ticket.finish(
            input_tokens=read.prompt_tokens - read.cached_tokens, prefix_hashes=hashes
        )

    async def _settle(self, hold: Hold, outcome: Outcome) -> None:
        generation = self._generation
        await self._read_out.wait()
        await hold.close(
            cause=outcome.cause,
            attempts=tuple(generation.totals) if generation is not None else (),
            delivered_tokens=self._delivered_tokens,
            timings=self._timings(),
            ended_ms=self._shared.now_ms(),
        )
        self._shared.metrics.tokens.labels("delivered").inc(self._delivered_tokens)

    def witnesses(self) -> tuple[Witness, ...]:
        """What a checkpoint says of it while it runs."""
        if self._ending or self._generation is None:
            return ()
        return self._generation.witnesses(self._shared.now_ms())

    @property
    def age_s(self) -> float:
        """Since it was received."""
        return self._clock() - self._call.received_s

    def _timings(self) -> RequestTimings:
        generation = self._generation
        total_ms = self.age_s * 1000
        if generation is None:
            return RequestTimings(total_ms=total_ms)
        return generation.timings(self._call.received_s, total_ms)

    def _count(self, outcome: Outcome) -> None:
        metrics = self._shared.metrics
        metrics.requests.labels(self._call.endpoint, outcome.cause).inc()
        metrics.request_s.observe(self.age_s)
        generation = self._generation
        if generation is None:
            return
        usage = generation.usage
        metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        metrics.tokens.labels("cached").inc(usage.cached_tokens)
        metrics.tokens.labels("output").inc(usage.output_tokens)
        times = generation.times
        if times.placed_s:
            metrics.queue_s.observe(times.placed_s - times.armed_s)
        if times.first_token_s:
            metrics.first_token_s.observe(times.first_token_s - self._call.received_s)
