"""A gateway's tickets in flight, and what it has yet to tell each pool about them.

Bookkeeping only: it sends nothing. What `renewals` hands out counts as told; when a telling
is lost, so is Valkey, and then everything is announced again.
"""

import asyncio
from collections.abc import Iterator

import msgspec

from core.fair_queue import CLASSES
from core.protocol import Load, ServiceClass
from core.tickets import Arm, Dropped, Placed, Renew, ReplicaView


class Flight:
    """One ticket. `arm` is set while it is in a pool, `waiter` while somebody waits for it.

    `scopes` are those, besides the tenant's, in which it counts.
    """

    def __init__(self, ticket: str, tenant: str, scopes: tuple[str, ...] = ()) -> None:
        self.ticket = ticket
        self.tenant = tenant
        self.scopes = scopes
        self.admitted = False
        self.arm: Arm | None = None
        self.placed: Placed | None = None
        self.waiter: asyncio.Future[Placed | Dropped] | None = None
        self.output_tokens = 0  # all attempts together
        self.told_tokens = 0  # to the pool


class PoolSide:
    """This gateway's side of one pool. `owes` until the pool knows every flight in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = ""
        self.owes = True
        self.replicas: tuple[ReplicaView, ...] = ()
        self.flights: dict[str, Flight] = {}
        self.acks: dict[str, None] = {}
        self.congestion_ms = 0  # as last told
        self.wake = asyncio.Event()
        self._loads: dict[str, Load] = {}
        self._waiting: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing here to tell of, and nothing to hear."""
        return not self.replicas and not self.flights

    @property
    def is_waiting(self) -> bool:
        """Whether any flight waits for a replica."""
        return bool(self._waiting)

    @property
    def waiting(self) -> dict[ServiceClass, int]:
        """How many of this gateway's wait for a replica, by class."""
        counts = dict.fromkeys(CLASSES, 0)
        for ticket in self._waiting:
            arm = self.flights[ticket].arm
            assert arm is not None, "it waits for what it asked for"
            counts[arm.service_class] += 1
        return counts

    def enter(self, flight: Flight, arm: Arm) -> "asyncio.Future[Placed | Dropped]":
        """The flight asks for a replica; the future is for what it is granted."""
        flight.arm, flight.placed = arm, None
        flight.waiter = asyncio.get_running_loop().create_future()
        self.flights[flight.ticket] = flight
        self._waiting.add(flight.ticket)
        return flight.waiter

    def settle(self, flight: Flight, placed: Placed) -> None:
        """The flight has its replica, and waits no more."""
        flight.placed, flight.waiter = placed, None
        self._waiting.discard(flight.ticket)

    def leave(self, flight: Flight) -> None:
        """The flight is out of this pool; who still waits for it need not."""
        if flight.waiter is not None and not flight.waiter.done():
            flight.waiter.set_result(Dropped(reason="expired"))
        flight.arm = flight.placed = flight.waiter = None
        self.flights.pop(flight.ticket, None)
        self._waiting.discard(flight.ticket)
        self.acks.pop(flight.ticket, None)

    def observe(self, replica: str, load: Load) -> None:
        """Keep the newest report of each replica."""
        known = self._loads.get(replica)
        if known is None or known.boot_id != load.boot_id or known.seq < load.seq:
            self._loads[replica] = load

    def wake_within(self, delay_s: float) -> None:
        """Renew by then, however often this is asked for."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def renewals(self, gateway: str, batch_max: int) -> Iterator[Renew]:
        """What there is to tell: one message, or as many as an announcement takes."""
        held = self._held(gateway) if self.owes else ()
        outputs = self._new_outputs()
        announces, self.owes = self.owes, False
        base = Renew(gateway=gateway, pool=self.name, epoch=self.epoch, replicas=self.replicas)
        total = max(len(held), len(outputs))
        for start in range(0, total - batch_max, batch_max):
            end = start + batch_max
            yield msgspec.structs.replace(base, held=held[start:end], outputs=outputs[start:end])
        last = max(0, (total - 1) // batch_max * batch_max)
        yield msgspec.structs.replace(
            base,
            held=held[last:],
            outputs=outputs[last:],
            announces=announces,
            loads=self._take_loads(),
            acks=self._take_acks(batch_max),
        )

    def _held(self, gateway: str) -> tuple[tuple[Arm, Placed | None], ...]:
        for flight in self.flights.values():
            flight.told_tokens = 0
        return tuple(
            (msgspec.structs.replace(flight.arm, gateway=gateway), flight.placed)
            for flight in self.flights.values()
            if flight.arm is not None
        )

    def _new_outputs(self) -> tuple[tuple[str, int], ...]:
        grown = [f for f in self.flights.values() if f.output_tokens > f.told_tokens]
        for flight in grown:
            flight.told_tokens = flight.output_tokens
        return tuple((flight.ticket, flight.output_tokens) for flight in grown)

    def _take_loads(self) -> tuple[tuple[str, Load], ...]:
        loads, self._loads = tuple(self._loads.items()), {}
        return loads

    def _take_acks(self, count: int) -> tuple[str, ...]:
        acks = tuple(self.acks)[:count]
        for ticket in acks:
            del self.acks[ticket]
        if self.acks:
            self.wake.set()
        return acks

    def _fire(self) -> None:
        self._timer = None
        self.wake.set()
