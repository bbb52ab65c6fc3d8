"""One request at its gateway, from admission to settlement, with all its attempts.

`gateway.relay` in virtual time, over the real sizing and the real `AnswerSoFar`. Invariant:
it ends with exactly one cause, is let go of by the dispatcher, and is settled, unless its
gateway dies.
"""

from typing import Literal, Protocol

import msgspec

from core.metering import AttemptTotals, RequestTimings, Reserve, Settle, Witness
from core.money import EndCause
from core.protocol import (
    Failed,
    Finished,
    Frame,
    Generate,
    Load,
    Nack,
    Started,
    Tokens,
    Usage,
)
from core.tickets import Admit, Arm, CacheVersions, Dropped, LimitRefused, Placed
from gateway.relay.answer import AnswerSoFar
from gateway.routing import Size, kv_blocks
from simulator.bank import PRICE
from simulator.books import Books
from simulator.dispatch_link import DispatchLink
from simulator.hold import Hold
from simulator.network import Stream
from simulator.orders import Order, Orders
from simulator.prefixes import coarse_hashes
from simulator.tasks import Process, Promise, Task, within
from simulator.worker import POOL, VERSION

OVERDUE_GRACE_MS = 1_000
ABORT_MS = 1_000
SILENT_MS = 3_000  # a stream without a frame for so long is dead
DEATHS_MAX = 3
NACKS_MAX = 64


class Outcome(msgspec.Struct, frozen=True):
    """How it ended, and what its client is told when that is not a whole answer."""

    cause: EndCause
    refusal: str = ""


class Cancelled(Exception):  # noqa: N818 -- what happened, not what went wrong
    """The request is to end now."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.cause)
        self.outcome = outcome


class Workers(Protocol):
    """The way to replicas."""

    def connect(self, gateway: Process, replica: str, request: Generate) -> Promise[Stream | None]:
        """None: nobody took it, as far as known."""

    def abort(self, gateway: Process, replica: str, request_id: str, attempt: int) -> None:
        """Ask for an early end."""


class ExchangeParts(msgspec.Struct, frozen=True, kw_only=True):
    """What every request of one gateway works with."""

    gateway: Process
    gateway_id: str
    link: DispatchLink
    books: Books
    workers: Workers
    orders: Orders
    block_tokens: int


class _Setback(msgspec.Struct, frozen=True):
    kind: Literal["nack", "death"]


class _Attempt(msgspec.Struct, eq=False):
    number: int
    placed: Placed
    stream: Stream
    usage: Usage = Usage()
    ended: bool = False


class Exchange:
    """One request."""

    def __init__(self, parts: ExchangeParts, order: Order) -> None:
        self.order = order
        self._parts = parts
        self._clock = parts.gateway.clock
        self._answer = AnswerSoFar(order.choices)
        self._size = Size(
            prompt_tokens=len(order.prompt),
            max_tokens=order.sampling.max_tokens,
            choices=order.choices,
        )
        self._arm = self._first_arm()
        self._attempt: _Attempt | None = None
        self._attempts = 0
        self._setbacks = {"nack": 0, "death": 0}
        self._totals: list[AttemptTotals] = []
        self._hold: Hold | None = None
        self._ending = False
        overdue_ms = max(0, order.deadline_ms + OVERDUE_GRACE_MS - self._clock.now_ms)
        self._timer = self._clock.after(overdue_ms, f"{order.request_id} overdue", self._overdue)
        self._task: Task[None] = parts.gateway.spawn(self._run())

    def client_leaves(self) -> None:
        """Nobody reads the answer any more."""
        self._cancel(Outcome(EndCause.CLIENT_CANCELLED))

    def die(self) -> None:
        """The gateway was killed: the kernel closes its connections."""
        if self._attempt is not None:
            self._attempt.stream.close()

    def witness(self) -> Witness | None:
        """What a checkpoint says of the attempt under way."""
        attempt = self._attempt
        if self._ending or attempt is None or attempt.ended or attempt.usage == Usage():
            return None
        return Witness(
            request_id=self.order.request_id,
            attempt=attempt.number,
            source="checkpoint",
            usage=attempt.usage,
            final=False,
            replica_id=attempt.placed.replica,
            at_ms=self._clock.now_ms,
        )

    # The task.

    async def _run(self) -> None:
        try:
            outcome = await self._serve()
        except Cancelled as cancelled:
            outcome = cancelled.outcome
        self._ending = True
        self._timer.cancel()
        await self._stop_attempt()
        order = self.order
        self._parts.orders.end(order, outcome.cause, outcome.refusal, self._clock.now_ms)
        self._let_go()
        if self._hold is not None:
            await self._hold.close(self._settlement(outcome.cause))

    async def _serve(self) -> Outcome:
        order, parts = self.order, self._parts
        self._hold = Hold(
            parts.gateway,
            parts.books,
            self._reserve(),
            self._size,
            hard_capped=order.profile.hard_cap_micro is not None,
        )
        admitted = await parts.link.admit(self._admit())
        if isinstance(admitted, LimitRefused):
            return Outcome(EndCause.NOT_STARTED, f"limit: {admitted.reason}")
        refused = await self._hold.held()
        if refused is not None:
            return Outcome(EndCause.NOT_STARTED, f"ledger: {refused.reason}")
        return await self._generate()

    async def _generate(self) -> Outcome:
        arm = self._arm
        while True:
            place = await self._parts.link.place(arm)
            if isinstance(place, Dropped):
                return self._dropped(place)
            end = await self._try(place)
            if isinstance(end, Outcome):
                return end
            self._setbacks[end.kind] += 1
            if self._setbacks["nack"] > NACKS_MAX or self._setbacks["death"] > DEATHS_MAX:
                return Outcome(self._failed_cause(), f"too many times: {end.kind}")
            exclude = tuple(sorted({*arm.exclude, place.replica}))
            arm = msgspec.structs.replace(arm, exclude=exclude, at_head=True)

    async def _try(self, place: Placed) -> Outcome | _Setback:
        self._attempts += 1
        stream = await self._connect(place)
        if stream is None:
            return _Setback("death")
        attempt = self._attempt = _Attempt(self._attempts, place, stream)
        end: Outcome | _Setback | None = None
        while end is None:
            frames = await within(
                self._clock, stream.read(), SILENT_MS, f"{self.order.request_id} read"
            )
            end = await self._take_all(attempt, frames)
        self._end_attempt(attempt, attempt.usage)
        return end

    async def _connect(self, place: Placed) -> Stream | None:
        gateway, workers = self._parts.gateway, self._parts.workers
        connecting = workers.connect(gateway, place.replica, self._message(place))
        try:
            return await connecting
        except Cancelled:
            connecting.then(lambda: _close(connecting.value))
            raise

    async def _take_all(
        self, attempt: _Attempt, frames: list[Frame] | None
    ) -> Outcome | _Setback | None:
        if frames is None:
            return _Setback("death")
        for frame in frames:
            end = self._take(attempt, frame)
            if end is not None:
                return end
        produced = self._answer.output_tokens
        if produced:
            self._parts.link.produced(self.order.request_id, produced)
            if self._hold is not None and self._hold.spent(produced):
                await self._stop_attempt()
                return Outcome(EndCause.LENGTH)
        return None

    def _take(self, attempt: _Attempt, frame: Frame) -> Outcome | _Setback | None:
        match frame:
            case Tokens():
                return self._take_tokens(attempt, frame)
            case Load():
                self._parts.link.observe(attempt.placed.replica, frame)
            case Started():
                attempt.usage = _usage_of(frame)
            case Nack():
                self._end_attempt(attempt, Usage())
                if frame.fits_never:
                    return Outcome(self._failed_cause(), "fits_never")
                return _Setback("nack")
            case Finished():
                self._end_attempt(attempt, frame.usage)
                return self._finished(frame)
            case Failed():
                self._end_attempt(attempt, frame.usage)
                return _Setback("death")
        return None

    def _take_tokens(self, attempt: _Attempt, frame: Tokens) -> _Setback | None:
        if not self._answer.take(frame):
            return _Setback("death")
        attempt.usage = _more(attempt.usage, len(frame.ids))
        order = self.order
        order.got[frame.choice] += frame.ids
        order.got_text[frame.choice] += frame.text
        if not order.client_left:
            order.delivered += len(frame.ids)
        return None

    def _finished(self, frame: Finished) -> Outcome | _Setback:
        if frame.cause == "expired":
            return Outcome(EndCause.EXPIRED, "not finished by its deadline")
        if frame.cause == "aborted" or self._answer.open():
            return _Setback("death")
        return Outcome(EndCause.LENGTH if self._answer.by_length else EndCause.COMPLETE)

    # The end.

    async def _stop_attempt(self) -> None:
        """End the attempt under way, if there is one, and hear its totals out; bounded."""
        attempt = self._attempt
        if attempt is None or attempt.ended:
            return
        request_id, replica = self.order.request_id, attempt.placed.replica
        self._parts.workers.abort(self._parts.gateway, replica, request_id, attempt.number)
        hearing = self._parts.gateway.spawn(self._hear_out(attempt))
        await within(self._clock, hearing.result, ABORT_MS, f"{request_id} aborting")
        hearing.stop()
        self._end_attempt(attempt, attempt.usage)

    async def _hear_out(self, attempt: _Attempt) -> None:
        """After an abort only totals matter."""
        while (frames := await attempt.stream.read()) is not None:
            for frame in frames:
                match frame:
                    case Tokens():
                        attempt.usage = _more(attempt.usage, len(frame.ids))
                    case Started():
                        attempt.usage = _usage_of(frame)
                    case Finished() | Failed():
                        self._end_attempt(attempt, frame.usage)
                    case Nack():
                        self._end_attempt(attempt, Usage())
                    case Load():
                        pass

    def _end_attempt(self, attempt: _Attempt, usage: Usage) -> None:
        if attempt.ended:
            return
        attempt.ended = True
        attempt.stream.close()
        if usage != Usage():
            self._totals.append(
                AttemptTotals(
                    attempt=attempt.number, replica_id=attempt.placed.replica, usage=usage
                )
            )

    def _let_go(self) -> None:
        link, request_id = self._parts.link, self.order.request_id
        tenant = self.order.profile.tenant
        if not self._totals:
            link.cancel(request_id, tenant)
            return
        read = self._totals[-1].usage
        link.finish(
            request_id,
            tenant,
            input_tokens=read.prompt_tokens - read.cached_tokens,
            prefix_hashes=self._arm.prefix_hashes,
        )

    def _cancel(self, outcome: Outcome) -> None:
        if not self._ending and self._parts.gateway.alive:
            self._ending = True
            self._task.interrupt(Cancelled(outcome))

    def _overdue(self) -> None:
        self._cancel(Outcome(EndCause.EXPIRED, "not done by its deadline"))

    def _dropped(self, dropped: Dropped) -> Outcome:
        cause = EndCause.EXPIRED if dropped.reason == "expired" else self._failed_cause()
        return Outcome(cause, f"dropped: {dropped.reason}")

    def _failed_cause(self) -> EndCause:
        return EndCause.FAILED if self._totals else EndCause.NOT_STARTED

    # The messages.

    def _first_arm(self) -> Arm:
        order, profile = self.order, self.order.profile
        return Arm(
            ticket=order.request_id,
            gateway=self._parts.gateway_id,
            pool=POOL,
            tenant=profile.tenant,
            weight=profile.weight,
            service_class=profile.service_class,
            deadline_ms=order.deadline_ms,
            kv_blocks=kv_blocks(self._size, self._parts.block_tokens),
            prompt_tokens=len(order.prompt),
            prefix_hashes=coarse_hashes(order.prompt, profile.salt),
        )

    def _admit(self) -> Admit:
        order, profile = self.order, self.order.profile
        return Admit(
            ticket=order.request_id,
            gateway=self._parts.gateway_id,
            tenant=profile.tenant,
            key="key",
            model="smol",
            versions=CacheVersions(key=1, tenant=1, route=1),
            limits=profile.limits,
            input_tokens=len(order.prompt),
        )

    def _reserve(self) -> Reserve:
        order, profile = self.order, self.order.profile
        return Reserve(
            request_id=order.request_id,
            gateway_id=self._parts.gateway_id,
            tenant_id=profile.tenant,
            key_id="key",
            amount_micro=0,
            price_id=PRICE.id,
            model="smol",
            version=VERSION,
            region="local",
            service_class=profile.service_class,
            dialect="openai",
            endpoint="/v1/chat/completions",
            stream=True,
            prompt_tokens=len(order.prompt),
            max_tokens=order.sampling.max_tokens,
            created_ms=order.arrived_ms,
        )

    def _message(self, place: Placed) -> Generate:
        order = self.order
        return Generate(
            request_id=order.request_id,
            attempt=self._attempts,
            version=VERSION,
            prompt_ids=order.prompt,
            choices=self._answer.to_resume(),
            sampling=order.sampling,
            tenant_salt=order.profile.salt,
            service_class=order.profile.service_class,
            deadline_ms=order.deadline_ms,
            placement=place.placement,
        )

    def _settlement(self, cause: EndCause) -> Settle:
        order = self.order
        return Settle(
            request_id=order.request_id,
            tenant_id=order.profile.tenant,
            cause=cause,
            attempts=tuple(self._totals),
            delivered_tokens=order.delivered,
            timings=RequestTimings(total_ms=float(self._clock.now_ms - order.arrived_ms)),
            ended_ms=self._clock.now_ms,
        )


def _close(stream: Stream | None) -> None:
    if stream is not None:
        stream.close()


def _usage_of(started: Started) -> Usage:
    return Usage(prompt_tokens=started.prompt_tokens, cached_tokens=started.cached_tokens)


def _more(usage: Usage, tokens: int) -> Usage:
    return msgspec.structs.replace(usage, output_tokens=usage.output_tokens + tokens)
