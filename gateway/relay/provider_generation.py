"""A request's answer from an outside provider; the same face as `gateway.relay.generation`.

    let in ─► sent ─► accepted ─► events ─┬─ its last word ─────────► outcome
      │        │                          ├─ cut, an error event ───► fault
      └────────┴─ refused ─► fault        └─ we end it ─► drained or hung up on

Asked once: another try is the router's to make, at another target, and only while nothing has
been passed on (`begun`). Invariant: an answer that is not whole never ends as one that is.
"""

import asyncio
import logging
from collections.abc import Iterable

from core.metering import AttemptTotals, RequestTimings, Witness
from core.money import EndCause
from core.protocol import Usage
from gateway.conversation import ChoiceEnd, Finish, Opened, StreamEvent, told_event
from gateway.provider_client import Call, whole_body
from gateway.providers.event_stream import EventParser, EventStreamError
from gateway.providers.faults import Fault, FaultError, broken
from gateway.providers.translate import answer_reader
from gateway.relay.channel import Channel
from gateway.relay.delivery import Times
from gateway.relay.hold import Hold
from gateway.relay.job import OVERDUE, Outcome
from gateway.relay.provider_job import ProviderJob, ProviderParts, note_fault
from gateway.relay.provider_totals import ProviderTotals
from gateway.relay.ticket import Ticket

_log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
CLOSE_S = 0.25  # for a connection to be left in order after the answer's last word
CAUSES: dict[Finish, EndCause] = {"filtered": EndCause.FILTERED, "length": EndCause.LENGTH}


class ProviderGeneration:
    """One request's. `run` may be cancelled; `stop` then ends what is under way."""

    def __init__(
        self,
        parts: ProviderParts,
        job: ProviderJob,
        *,
        ticket: Ticket,
        hold: Hold,
        channel: Channel,
    ) -> None:
        self._parts = parts
        self.job = job
        self._ticket = ticket
        self._hold = hold
        self._channel = channel
        self._clock = asyncio.get_running_loop().time
        self._answer = answer_reader(
            job.provider.dialect, job.conversation, prompt_tokens=job.wanted.prompt_tokens
        )
        self._events = EventParser()
        self._totals = ProviderTotals(
            job.request_id, job.provider.name, prompt_tokens=job.wanted.prompt_tokens
        )
        self._place = job.place or parts.place(job.provider, job.request_id)
        self._call: Call | None = None
        self._told_tokens = 0
        self._over = False  # failed or too late: nothing more is worth waiting for
        self._finishes: set[Finish] = set()
        self.begun = False  # something was passed on: no other target may go on with it
        self.fault: Fault | None = None  # why it failed, for a router to act on
        self.times = Times()

    async def run(self) -> Outcome:
        """Until the answer is whole or given up."""
        self.times.armed_s = self._clock()
        left_s = (self.job.deadline_ms - self._parts.now_ms()) / 1000
        try:
            async with asyncio.timeout(left_s):
                return await self._run()
        except TimeoutError:
            self._over = True
            return Outcome(cause=EndCause.EXPIRED, refusal=OVERDUE)
        except FaultError as error:
            return self._failed(error.fault)

    async def stop(self) -> None:
        """End what is under way: drained, where that is wanted, within its bound."""
        call, settings = self._call, self.job.provider.settings
        if call is not None and not self._totals.ended:
            if self._totals.begun and settings.cut_usage == "drain" and not self._over:
                await self._drain(call, settings.drain_ms / 1000)
            await call.close()
        self._totals.ended = True
        self._place.leave("answered" if self._totals.begun else "unknown")

    @property
    def totals(self) -> list[AttemptTotals]:
        """Of the one attempt, if the provider accepted it and it has ended."""
        return self._totals.all

    @property
    def usage(self) -> Usage:
        """The answer's totals, told or estimated."""
        return self._totals.usage

    @property
    def untold_tokens(self) -> int:
        """Tokens that no event has carried yet: they go with the last."""
        return max(0, self._totals.usage.output_tokens - self._told_tokens)

    def witnesses(self, now_ms: int) -> tuple[Witness, ...]:
        """Its totals so far, as a checkpoint tells them."""
        return self._totals.witnesses(now_ms)

    def timings(self, received_s: float, total_ms: float) -> RequestTimings:
        """What is known of them."""
        return self._totals.timings(self.times, received_s=received_s, total_ms=total_ms)

    # The attempt.

    async def _run(self) -> Outcome:
        fault = await self._place.enter()
        if fault is not None:
            raise FaultError(fault)
        self.times.placed_s = self._clock()
        call = self._call = self._parts.providers.call(self.job.provider, self.job.body)
        self._place.sent = True
        kind = await call.accepted()
        self._totals.begun = True
        if kind.partition(";")[0].strip().lower() != EVENT_STREAM:
            # Some answer as a whole though a stream was asked for.
            return await self._follow_whole(call)
        return await self._follow(call)

    async def _follow_whole(self, call: Call) -> Outcome:
        cut = await self._pass_on(self._answer.whole(await whole_body(call)))
        return await self._finish(call, cut=cut)

    async def _follow(self, call: Call) -> Outcome:
        while piece := await call.read():
            if await self._pass_on(self._parsed(piece)):
                return await self._finish(call, cut=True)
            if self._answer.over:
                break  # some leave the connection open after their last word
        if not self._answer.over:
            await self._pass_on(self._answer.finish())
        return await self._finish(call, cut=False)

    def _parsed(self, piece: bytes) -> Iterable[StreamEvent]:
        """Lazily: what came before a fault is passed on before it is raised."""
        try:
            for event in self._events.feed(piece):
                yield from self._answer.take(event)
        except EventStreamError as error:
            raise broken(f"it is no event stream: {error}") from error

    async def _pass_on(self, events: Iterable[StreamEvent]) -> bool:
        """Whether the answer has to end here: it cannot be paid further, or was cut off."""
        for event in events:
            self._push(event)
        self._hear_usage()
        output = self._totals.output_tokens
        if output:
            self._ticket.produced(output)
            spent = await self._hold.spent(output) or self._channel.cut
            if spent and self._answer.open_choices:
                return True
        await self._channel.room()
        return False

    def _push(self, event: StreamEvent) -> None:
        if isinstance(event, ChoiceEnd):
            self._finishes.add(event.finish)
        elif not isinstance(event, Opened):
            self._totals.take(event)
            self.times.last_token_s = self._clock()
            self.times.first_token_s = self.times.first_token_s or self.times.last_token_s
        heard = told_event(event, self.job.conversation)
        if heard is None:
            return  # it is counted, and goes with what is told next
        self.begun = True
        tokens = self._totals.output_tokens - self._told_tokens
        self._told_tokens += tokens
        self._channel.push(heard, tokens)

    async def _finish(self, call: Call, *, cut: bool) -> Outcome:
        if cut:
            await self.stop()
            for event in self._answer.cut_short():
                self._push(event)
            return Outcome(cause=EndCause.LENGTH)
        await call.close(grace_s=CLOSE_S)
        self._hear_usage()
        self._totals.is_final = self._totals.told is not None
        self._ticket.produced(self._totals.usage.output_tokens)
        self._totals.ended = True
        self._place.leave("answered")
        return Outcome(cause=self._cause())

    def _cause(self) -> EndCause:
        for finish, cause in CAUSES.items():
            if finish in self._finishes:
                return cause
        return EndCause.COMPLETE

    # Its end.

    def _hear_usage(self) -> None:
        if self._answer.usage is not None:
            self._totals.told = self._answer.usage

    async def _drain(self, call: Call, within_s: float) -> None:
        """Read on for the usage at the end. What it says is passed on to nobody."""
        try:
            async with asyncio.timeout(within_s):
                while piece := await call.read():
                    for event in self._parsed(piece):
                        self._totals.take(event)
                self._hear_usage()
                self._totals.is_final = self._answer.over and self._totals.told is not None
                self._totals.drained = self._totals.is_final
        except (TimeoutError, FaultError) as error:
            facts = {"request_id": self.job.request_id, "error": repr(error)}
            _log.info(
                "a provider did not tell the usage of an ended stream", extra={"facts": facts}
            )

    def _failed(self, fault: Fault) -> Outcome:
        self.fault, self._over = fault, True
        note_fault(self._parts.metrics, self.job.provider.name, self.job.request_id, fault)
        self._place.leave(fault)
        cause = EndCause.FAILED if self._totals.begun else EndCause.NOT_STARTED
        fallback = None if fault.kind == "refused" else fault.kind
        return Outcome(cause=cause, refusal=fault.refusal, fallback=fallback)
