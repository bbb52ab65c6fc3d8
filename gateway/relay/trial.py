"""One target's try of a request: what it holds, what runs for it, and how it lets go.

Invariant: whatever becomes of it, its ticket and its hold are closed exactly once, by `end` or
by `abandon`; only one that ends tells the client anything of how it ended.
"""

import asyncio
from collections.abc import Awaitable, Callable

from core.errors import Code, RefusedError, refuse
from core.metering import AttemptTotals, RequestTimings
from core.money import EndCause, billable, billed_micro
from gateway.auth import Identity
from gateway.bill import Bill
from gateway.relay.admission import Admission
from gateway.relay.cached_run import CachedRun
from gateway.relay.caching import Caching
from gateway.relay.call import Call
from gateway.relay.channel import Channel
from gateway.relay.generation import Generation
from gateway.relay.job import Job, Outcome
from gateway.relay.shared import Shared
from gateway.relay.targets import Prepared, Run

SLOW = refuse(Code.TIMEOUT, "The model did not answer in time. Please retry.").refusal
ABANDON_S = 2.0  # for what an abandoned try held to be free again: it follows in any case


class Trial:
    """Asks for its money and limits at once; `accept` waits for them."""

    def __init__(
        self,
        shared: Shared,
        call: Call,
        identity: Identity,
        prepared: Prepared,
        channel: Channel,
    ) -> None:
        self._shared = shared
        self._call = call
        self._prepared = prepared
        self._channel = channel
        self._clock = asyncio.get_running_loop().time
        self._admission = Admission(shared, call, identity, prepared)
        self.ticket = self._admission.ticket
        self.generation: Run | None = None
        self._caching = Caching(shared.answers, call, prepared.job)

    async def accept(self) -> bool:
        """False when it was decided from stale rows. Raises RefusedError."""
        return await self._admission.accept()

    async def generate(self, first_token_ms: int, *, head_waits: bool) -> Outcome:
        """Until the answer is whole, given up, or not begun for so long; 0 is any time.

        `head_waits`: there is somebody else to ask, as long as nothing was told.
        """
        self._channel.head_waits = head_waits
        generation = self.generation = await self._cached() or self._make_generation()
        bound = asyncio.timeout(first_token_ms / 1000 if first_token_ms else None)

        def begun() -> None:
            if not bound.expired():
                bound.reschedule(None)

        self._channel.on_first = begun
        try:
            async with bound:
                return await generation.run()
        except TimeoutError:
            if not bound.expired():
                raise
            return Outcome(cause=EndCause.FAILED, refusal=SLOW)
        except RefusedError as error:
            return Outcome(cause=EndCause.NOT_STARTED, refusal=error.refusal)
        finally:
            self._channel.on_first = None

    def end(
        self, outcome: Outcome, *, read_out: asyncio.Event, delivered: Callable[[], int]
    ) -> None:
        """Let go, and settle when the response has been read. Both follow on their own."""
        endings = self._shared.endings
        self._let_go()
        if self._caching.has(outcome):
            endings.start(self._caching.keep())

        async def settle() -> None:
            await read_out.wait()
            await self._settle(outcome.cause, delivered())

        endings.start(settle())

    async def abandon(self) -> None:
        """Another target is tried instead: give everything back, and wait for it a while.

        What was produced is metered and nobody's to pay. Who is cancelled here undoes nothing.
        """
        task = self._shared.endings.start(self._give_back())
        await asyncio.wait([task], timeout=ABANDON_S)

    def bill(self, cause: EndCause) -> Bill | None:
        """What the ledger will post for it, or more than that where a hard limit cuts it."""
        if self.generation is None:
            return None
        price, usage = self._prepared.job.price, self.generation.usage
        if isinstance(self.generation, CachedRun):
            usage = self.generation.charged
        due = billable(
            cause,
            usage,
            accepted_tokens=usage.output_tokens,
            max_tokens=self._prepared.wanted.output_tokens,
        )
        return Bill(micro=billed_micro(cause, price, due), currency=price.currency)

    def timings(self) -> RequestTimings:
        """What is known of them."""
        total_ms = (self._clock() - self._call.received_s) * 1000
        if self.generation is None:
            return RequestTimings(total_ms=total_ms)
        return self.generation.timings(self._call.received_s, total_ms)

    @property
    def cache_headers(self) -> dict[str, str]:
        """Whether its answer was given before; nothing where nobody asked."""
        return self._caching.headers

    async def _cached(self) -> Run | None:
        return await self._caching.find(self._channel)

    def _make_generation(self) -> Run:
        ticket, hold = self._admission.ticket, self._admission.hold
        job = self._prepared.job
        if isinstance(job, Job):
            return Generation(
                self._shared.generation, job, ticket=ticket, hold=hold, channel=self._channel
            )
        assert self._shared.outside is not None, "it made the job"
        return self._shared.outside.generation(job, ticket=ticket, hold=hold, channel=self._channel)

    async def _give_back(self) -> None:
        self._channel.forget_head()
        if self.generation is not None:
            await self.generation.stop()
        cause = EndCause.FAILED if self._totals else EndCause.NOT_STARTED
        await asyncio.gather(self._let_go(), self._settle(cause, 0))

    @property
    def _totals(self) -> tuple[AttemptTotals, ...]:
        return tuple(self.generation.totals) if self.generation is not None else ()

    def _let_go(self) -> Awaitable[None]:
        """Free what the dispatcher holds for it. Follows on its own."""
        if self._shared.outside is not None and not isinstance(self._prepared.job, Job):
            self._shared.outside.leave(self._prepared.job)
        totals = self._totals
        if not totals:
            return self.ticket.cancel()
        read = totals[-1].usage
        hashes = self._prepared.prefix_hashes
        self._shared.prefixes.remember(hashes)
        return self.ticket.finish(
            input_tokens=read.prompt_tokens - read.cached_tokens, prefix_hashes=hashes
        )

    async def _settle(self, cause: EndCause, delivered_tokens: int) -> None:
        if not isinstance(self._prepared.job, Job):
            # By estimate as it came; a provider's own count, which comes last, may be lower.
            counted = sum(total.usage.output_tokens for total in self._totals)
            delivered_tokens = min(delivered_tokens, counted)
        await self._admission.hold.close(
            cause=cause,
            attempts=self._totals,
            delivered_tokens=delivered_tokens,
            timings=self.timings(),
            ended_ms=self._shared.now_ms(),
        )
        self._shared.metrics.tokens.labels("delivered").inc(delivered_tokens)
