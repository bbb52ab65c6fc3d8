"""One request at its gateway, from admission to settlement.

`gateway.relay.exchange` in virtual time, over the real sizing. Invariant: it ends with exactly
one cause, is let go of by the dispatcher, and is settled, unless its gateway dies.
"""

import msgspec

from core.metering import RequestTimings, Reserve, Settle, Witness
from core.money import EndCause
from core.tickets import Admit, Arm, CacheVersions, LimitRefused
from gateway.routing import Size, kv_blocks
from simulator.bank import PRICE
from simulator.books import Books
from simulator.dispatch_link import DispatchLink
from simulator.generation import Generation, Outcome, Workers
from simulator.hold import Hold
from simulator.orders import Order, Orders
from simulator.prefixes import coarse_hashes
from simulator.tasks import Process, Task
from simulator.worker import POOL, VERSION

OVERDUE_GRACE_MS = 1_000


class Cancelled(Exception):  # noqa: N818 -- what happened, not what went wrong
    """The request is to end now."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.cause)
        self.outcome = outcome


class ExchangeParts(msgspec.Struct, frozen=True, kw_only=True):
    """What every request of one gateway works with."""

    gateway: Process
    gateway_id: str
    link: DispatchLink
    books: Books
    workers: Workers
    orders: Orders
    block_tokens: int


class Exchange:
    """One request."""

    def __init__(self, parts: ExchangeParts, order: Order) -> None:
        self.order = order
        self._parts = parts
        self._clock = parts.gateway.clock
        self._size = Size(
            prompt_tokens=len(order.prompt),
            max_tokens=order.sampling.max_tokens,
            choices=order.choices,
        )
        self._hold = Hold(
            parts.gateway,
            parts.books,
            self._reserve(),
            self._size,
            hard_capped=order.profile.hard_cap_micro is not None,
        )
        self._generation = Generation(parts.gateway, parts.link, parts.workers, order, self._hold)
        self._ending = False
        overdue_ms = max(0, order.deadline_ms + OVERDUE_GRACE_MS - self._clock.now_ms)
        self._timer = self._clock.after(overdue_ms, f"{order.request_id} overdue", self._overdue)
        self._task: Task[None] = parts.gateway.spawn(self._run())

    def client_leaves(self) -> None:
        """Nobody reads the answer any more."""
        self._cancel(Outcome(EndCause.CLIENT_CANCELLED))

    def die(self) -> None:
        """The gateway was killed."""
        self._generation.die()

    def witness(self) -> Witness | None:
        """What a checkpoint says of it."""
        return None if self._ending else self._generation.witness()

    # The task.

    async def _run(self) -> None:
        try:
            outcome = await self._serve()
        except Cancelled as cancelled:
            outcome = cancelled.outcome
        self._ending = True
        self._timer.cancel()
        await self._generation.stop()
        order = self.order
        self._parts.orders.end(order, outcome.cause, outcome.refusal, self._clock.now_ms)
        self._let_go()
        await self._hold.close(self._settlement(outcome.cause))

    async def _serve(self) -> Outcome:
        admitted = await self._parts.link.admit(self._admit())
        if isinstance(admitted, LimitRefused):
            return Outcome(EndCause.NOT_STARTED, f"limit: {admitted.reason}")
        refused = await self._hold.held()
        if refused is not None:
            return Outcome(EndCause.NOT_STARTED, f"ledger: {refused.reason}")
        return await self._generation.run(self._arm())

    def _let_go(self) -> None:
        link, request_id = self._parts.link, self.order.request_id
        tenant, totals = self.order.profile.tenant, self._generation.totals
        if not totals:
            link.cancel(request_id, tenant)
            return
        read = totals[-1].usage
        link.finish(
            request_id,
            tenant,
            input_tokens=read.prompt_tokens - read.cached_tokens,
            prefix_hashes=coarse_hashes(self.order.prompt, self.order.profile.salt),
        )

    def _cancel(self, outcome: Outcome) -> None:
        if not self._ending and self._parts.gateway.alive:
            self._ending = True
            self._task.interrupt(Cancelled(outcome))

    def _overdue(self) -> None:
        self._cancel(Outcome(EndCause.EXPIRED, "not done by its deadline"))

    # The messages.

    def _arm(self) -> Arm:
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
            choices=order.choices,
            created_ms=order.arrived_ms,
        )

    def _settlement(self, cause: EndCause) -> Settle:
        order = self.order
        return Settle(
            request_id=order.request_id,
            tenant_id=order.profile.tenant,
            cause=cause,
            attempts=tuple(self._generation.totals),
            delivered_tokens=order.delivered,
            timings=RequestTimings(total_ms=float(self._clock.now_ms - order.arrived_ms)),
            ended_ms=self._clock.now_ms,
        )
