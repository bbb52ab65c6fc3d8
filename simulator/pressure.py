"""A cast under a steady load of chosen tenants: who got what, and when.

Without faults and without judging every event: `world` is for that. Arrivals are open-loop, as
those of a service are: nobody waits for an answer before asking again.
"""

from collections.abc import Callable, Iterable

import msgspec

from core.money import EndCause
from core.protocol import Sampling, ServiceClass
from core.tickets import Limits
from simulator.cast import Cast
from simulator.clock import START_MS, Clock
from simulator.config import Seeded, WorldConfig
from simulator.model import VOCAB_SIZE
from simulator.orders import Order, Orders, Profile, an_order
from worker.admission import SchedulerConfig

SHED = ("batch_refused", "over_share", "too_late", "queue_full")
WARM_UP_MS = 2_000  # until the pool is open
DRAIN_MS = 60_000  # after the last order, at most
ENGINE = SchedulerConfig(
    kv_blocks=512,
    context_tokens=96,
    block_tokens=4,
    max_batched_tokens=64,
    max_sequences=8,
    host_blocks=0,
)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant asks for, `per_s` times a second. Patience 0 is for ever."""

    tenant: str
    per_s: float
    service_class: ServiceClass = "standard"
    weight: int = 1
    prompt_tokens: int = 16
    max_tokens: int = 16
    deadline_ms: int = 60_000
    patience_ms: int = 0
    is_regular: bool = False  # else at random


class Result(msgspec.Struct, frozen=True):
    """Everybody's orders. Waits are from asking for a replica to having one, in ms."""

    orders: list[Order]
    duration_ms: int
    dead_in_queue: int  # the most tickets that ever waited for clients long gone

    def of(self, tenant: str) -> list[Order]:
        """One tenant's."""
        return [order for order in self.orders if order.profile.tenant == tenant]

    def waits_ms(self, tenant: str) -> list[int]:
        """Of those that were placed, sorted."""
        return sorted(o.placed_ms - o.armed_ms for o in self.of(tenant) if o.placed_ms)

    @property
    def goodput_per_s(self) -> float:
        """Whole answers within their deadlines."""
        return sum(map(in_time, self.orders)) * 1_000 / self.duration_ms

    @property
    def accepted(self) -> list[Order]:
        """Those that were not sent away."""
        return [order for order in self.orders if not order.refusal.endswith(SHED)]

    @property
    def refusals_ms(self) -> list[int]:
        """How long those waited that were sent away, sorted."""
        return sorted(o.ended_ms - o.arrived_ms for o in self.orders if o.refusal.endswith(SHED))


def in_time(order: Order) -> bool:
    """Whether its client got a whole answer by its deadline."""
    whole = order.cause in {EndCause.COMPLETE, EndCause.LENGTH}
    return whole and order.ended_ms <= order.deadline_ms


def press(
    demands: Iterable[Demand], *, seed: int, duration_ms: int, config: WorldConfig | None = None
) -> Result:
    """Run these demands for so long, and until their last order is over."""
    clock, orders, seeded = Clock(), Orders(), Seeded(seed)
    config = config or WorldConfig(seed=seed, workers=1, engine=ENGINE)
    cast = Cast(config, clock, seeded, orders)
    started_ms = START_MS + WARM_UP_MS
    for demand in demands:
        _Source(cast, clock, seeded, demand).run(started_ms, started_ms + duration_ms)
    dead = looked_ms = 0
    try:
        while clock.now_ms < started_ms + duration_ms + DRAIN_MS:
            clock.step()
            if clock.now_ms > started_ms + duration_ms and not orders.open:
                break
            if clock.now_ms >= looked_ms + LEAVING_MS:
                looked_ms = clock.now_ms
                dead = max(dead, _dead_in_queue(cast, orders, looked_ms))
    finally:
        cast.stop()
    return Result(list(orders.all.values()), duration_ms, dead)


LEAVING_MS = 50  # for a client's leaving to reach the pool


def _dead_in_queue(cast: Cast, orders: Orders, now_ms: int) -> int:
    """Queued tickets whose client left, and had the time to be heard."""
    return sum(
        ticket.state == "queued" and _is_gone(orders.all[name], now_ms)
        for name, ticket in cast.valkey.dispatcher.pool.tickets.items()
    )


def _is_gone(order: Order, now_ms: int) -> bool:
    return order.client_left and now_ms - order.arrived_ms - order.patience_ms > LEAVING_MS


class _Source:
    """One tenant's arrivals, drawn from dice of its own."""

    def __init__(self, cast: Cast, clock: Clock, seeded: Seeded, demand: Demand) -> None:
        self._cast = cast
        self._clock = clock
        self._demand = demand
        self._dice = seeded.stream(demand.tenant)
        self._count = 0
        self._profile = Profile(
            tenant=demand.tenant,
            salt=self._dice.randbytes(16),
            limits=Limits(),
            weight=demand.weight,
            hard_cap_micro=None,
            gap_ms=0,
            service_class=demand.service_class,
        )
        cast.bank.book.open_account(demand.tenant, None)

    def run(self, from_ms: int, until_ms: int) -> None:
        """Plan them all."""
        at_ms = float(from_ms)
        while at_ms < until_ms:
            self._clock.at(int(at_ms), f"{self._demand.tenant} asks", self._ask)
            at_ms += self._gap_ms()

    def _gap_ms(self) -> float:
        if self._demand.is_regular:
            return 1_000 / self._demand.per_s
        return self._dice.expovariate(self._demand.per_s) * 1_000

    def _ask(self) -> None:
        order = self._order()
        taken = self._cast.enter(order)
        assert taken, "no gateway takes requests"
        if order.patience_ms:
            label = f"{order.request_id} client leaves"
            self._clock.after(order.patience_ms, label, self._leaver(order))

    def _leaver(self, order: Order) -> Callable[[], None]:
        def leave() -> None:
            if not order.over:
                order.client_left = True
                self._cast.leave(order)

        return leave

    def _order(self) -> Order:
        demand, dice, now_ms = self._demand, self._dice, self._clock.now_ms
        self._count += 1
        return an_order(
            f"{demand.tenant}-{self._count}",
            self._profile,
            tuple(dice.randrange(1, VOCAB_SIZE) for _ in range(demand.prompt_tokens)),
            Sampling(seed=1, max_tokens=demand.max_tokens, temperature=0.0),
            choices=1,
            context_tokens=ENGINE.context_tokens,
            deadline_ms=now_ms + demand.deadline_ms,
            patience_ms=demand.patience_ms,
            arrived_ms=now_ms,
        )
