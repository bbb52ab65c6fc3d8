"""One request's attempts on workers, from its place in the queue to the engine's last word.

`gateway.relay.generation` in virtual time, over the real `AnswerSoFar`: a setback costs one
retry, or a resume once tokens were accepted, and both are bounded. Invariant: whatever number
of attempts made it, what the client got is one answer.
"""

from typing import Literal, Protocol

import msgspec

from core.metering import AttemptTotals, Witness
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
from core.tickets import Arm, Dropped, Placed
from gateway.relay.answer import AnswerSoFar
from simulator.dispatch_link import DispatchLink
from simulator.hold import Hold
from simulator.network import Stream
from simulator.orders import Order
from simulator.tasks import Process, Promise, sleep, within
from simulator.worker import VERSION

ABORT_MS = 1_000
SILENT_MS = 3_000  # a stream without a frame for so long is dead
DEATHS_MAX = 3
NACKS_MAX = 64
UNSENT_MS = 5_000  # of trying replicas that cannot be reached
PAUSE_MS = 50  # before such a try is repeated, doubling
PAUSE_MAX_MS = 1_000


class Outcome(msgspec.Struct, frozen=True):
    """How it ended, and what its client is told when that is not a whole answer."""

    cause: EndCause
    refusal: str = ""


class Workers(Protocol):
    """The way to replicas."""

    def connect(self, gateway: Process, replica: str, request: Generate) -> Promise[Stream | None]:
        """None: nobody took it, as far as known."""

    def abort(self, gateway: Process, replica: str, request_id: str, attempt: int) -> None:
        """Ask for an early end."""


class _Setback(msgspec.Struct, frozen=True):
    kind: Literal["nack", "unsent", "death"]


class _Attempt(msgspec.Struct, eq=False):
    number: int
    placed: Placed
    stream: Stream
    usage: Usage = Usage()
    ended: bool = False


class Generation:
    """One request's. `run` may be interrupted; `stop` then ends what is under way."""

    def __init__(
        self, gateway: Process, link: DispatchLink, workers: Workers, order: Order, hold: Hold
    ) -> None:
        self.totals: list[AttemptTotals] = []
        self._gateway = gateway
        self._clock = gateway.clock
        self._link = link
        self._workers = workers
        self._order = order
        self._hold = hold
        self._answer = AnswerSoFar(order.choices)
        self._attempt: _Attempt | None = None
        self._attempts = 0
        self._setbacks = {"nack": 0, "death": 0}
        self._unsent = 0  # tries in a row
        self._unsent_since_ms = 0

    async def run(self, arm: Arm) -> Outcome:
        """Until the answer is whole or given up."""
        self._order.armed_ms = self._clock.now_ms
        while True:
            place = await self._link.place(arm)
            if isinstance(place, Dropped):
                cause = EndCause.EXPIRED if place.reason == "expired" else self._failed_cause()
                return Outcome(cause, f"dropped: {place.reason}")
            self._order.placed_ms = self._order.placed_ms or self._clock.now_ms
            end = await self._try(place)
            if isinstance(end, Outcome):
                return end
            if not self._answer.open():  # only the engine's last word is missing
                return self._whole()
            if self._is_too_many(end):
                return Outcome(self._failed_cause(), f"too many times: {end.kind}")
            await self._pause()
            exclude = tuple(sorted({*arm.exclude, place.replica}))
            arm = msgspec.structs.replace(arm, exclude=exclude, at_head=True)

    async def stop(self) -> None:
        """End the attempt under way, if there is one, and hear its totals out; bounded."""
        attempt = self._attempt
        if attempt is None or attempt.ended:
            return
        request_id, replica = self._order.request_id, attempt.placed.replica
        self._workers.abort(self._gateway, replica, request_id, attempt.number)
        hearing = self._gateway.spawn(self._hear_out(attempt))
        await within(self._clock, hearing.result, ABORT_MS, f"{request_id} aborting")
        hearing.stop()
        self._end(attempt, attempt.usage)

    def die(self) -> None:
        """The gateway was killed: the kernel closes its connections."""
        if self._attempt is not None:
            self._attempt.stream.close()

    def witness(self) -> Witness | None:
        """What a checkpoint says of the attempt under way."""
        attempt = self._attempt
        if attempt is None or attempt.ended or attempt.usage == Usage():
            return None
        return Witness(
            request_id=self._order.request_id,
            attempt=attempt.number,
            source="checkpoint",
            usage=attempt.usage,
            final=False,
            replica_id=attempt.placed.replica,
            at_ms=self._clock.now_ms,
        )

    # One attempt.

    async def _try(self, place: Placed) -> Outcome | _Setback:
        self._attempts += 1
        stream = await self._connect(place)
        if stream is None:
            return _Setback("unsent")
        attempt = self._attempt = _Attempt(self._attempts, place, stream)
        end: Outcome | _Setback | None = None
        while end is None:
            label = f"{self._order.request_id} read"
            frames = await within(self._clock, stream.read(), SILENT_MS, label)
            end = await self._take_all(attempt, frames)
        self._end(attempt, attempt.usage)
        return end

    async def _connect(self, place: Placed) -> Stream | None:
        message = self._message(place)
        connecting = self._workers.connect(self._gateway, place.replica, message)
        try:
            return await connecting
        except Exception:
            connecting.then(lambda: _close(connecting.value))
            raise

    def _message(self, place: Placed) -> Generate:
        order = self._order
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
            self._link.produced(self._order.request_id, produced)
            if self._hold.spent(produced):
                await self.stop()
                return Outcome(EndCause.LENGTH)
        return None

    def _take(self, attempt: _Attempt, frame: Frame) -> Outcome | _Setback | None:
        match frame:
            case Tokens():
                return self._take_tokens(attempt, frame)
            case Load():
                self._link.observe(attempt.placed.replica, frame)
            case Prompted():
                pass
            case Started():
                attempt.usage = _usage_of(frame)
            case Nack():
                self._end(attempt, Usage())
                if frame.fits_never:
                    return Outcome(self._failed_cause(), "fits_never")
                return _Setback("nack")
            case Finished():
                self._end(attempt, frame.usage)
                return self._finished(frame)
            case Failed():
                self._end(attempt, frame.usage)
                return _Setback("death")
        return None

    def _take_tokens(self, attempt: _Attempt, frame: Tokens) -> _Setback | None:
        if not self._answer.take(frame):
            return _Setback("death")
        attempt.usage = _more(attempt.usage, len(frame.ids))
        order = self._order
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
        return self._whole()

    def _whole(self) -> Outcome:
        return Outcome(EndCause.LENGTH if self._answer.by_length else EndCause.COMPLETE)

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
                        self._end(attempt, frame.usage)
                    case Nack():
                        self._end(attempt, Usage())
                    case Load() | Prompted():
                        pass

    def _end(self, attempt: _Attempt, usage: Usage) -> None:
        """Close the attempt with its totals. One that did nothing has none."""
        if attempt.ended:
            return
        attempt.ended = True
        attempt.stream.close()
        if usage != Usage():
            replica = attempt.placed.replica
            total = AttemptTotals(attempt=attempt.number, replica_id=replica, usage=usage)
            self.totals.append(total)

    # Setbacks.

    def _is_too_many(self, setback: _Setback) -> bool:
        if setback.kind == "unsent":
            if self._unsent == 0:
                self._unsent_since_ms = self._clock.now_ms
            self._unsent += 1
            return self._clock.now_ms - self._unsent_since_ms > UNSENT_MS
        self._unsent = 0
        self._setbacks[setback.kind] += 1
        return self._setbacks["nack"] > NACKS_MAX or self._setbacks["death"] > DEATHS_MAX

    async def _pause(self) -> None:
        """A replica that cannot be reached may be restarting; the dispatcher paces the rest."""
        if self._unsent:
            pause_ms = min(PAUSE_MAX_MS, PAUSE_MS << self._unsent)
            await sleep(self._clock, pause_ms, f"{self._order.request_id} pause")

    def _failed_cause(self) -> EndCause:
        return EndCause.FAILED if self.totals else EndCause.NOT_STARTED


def _close(stream: Stream | None) -> None:
    if stream is not None:
        stream.close()


def _usage_of(started: Started) -> Usage:
    return Usage(prompt_tokens=started.prompt_tokens, cached_tokens=started.cached_tokens)


def _more(usage: Usage, tokens: int) -> Usage:
    return msgspec.structs.replace(usage, output_tokens=usage.output_tokens + tokens)
