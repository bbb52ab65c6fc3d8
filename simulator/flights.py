"""A gateway's tickets in flight, and what it has yet to tell the pool: `store.flights`, in short.

What `renewal` hands out counts as told; when a telling is lost, so is the dispatcher, and then
everything is announced again.
"""

import msgspec

from core.protocol import Load
from core.tickets import Arm, Dropped, Placed, Renew, ReplicaView
from simulator.clock import Clock
from simulator.tasks import Promise
from simulator.worker import POOL


class Flight(msgspec.Struct, eq=False):
    """One ticket. `arm` is set while it is in the pool, `waiter` while somebody waits for it."""

    ticket: str
    tenant: str
    admitted: bool = False
    arm: Arm | None = None
    placed: Placed | None = None
    waiter: Promise[Placed | Dropped] | None = None
    output_tokens: int = 0  # all attempts together
    told_tokens: int = 0  # to the pool


class PoolSide:
    """This gateway's side of the pool. `owes` until the pool knows every flight in it."""

    def __init__(self, clock: Clock) -> None:
        self.epoch = ""
        self.owes = True
        self.replicas: tuple[ReplicaView, ...] = ()
        self.flights: dict[str, Flight] = {}
        self.acks: dict[str, None] = {}
        self._clock = clock
        self._loads: dict[str, Load] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any flight waits for a replica."""
        return any(flight.waiter is not None for flight in self.flights.values())

    def enter(self, flight: Flight, arm: Arm) -> Promise[Placed | Dropped]:
        """The flight asks for a replica."""
        flight.arm, flight.placed = arm, None
        flight.waiter = waiter = Promise[Placed | Dropped](self._clock)
        self.flights[flight.ticket] = flight
        return waiter

    def settle(self, flight: Flight, placed: Placed) -> None:
        """The flight has its replica, and waits no more."""
        flight.placed, flight.waiter = placed, None

    def leave(self, flight: Flight) -> None:
        """The flight is out of the pool."""
        flight.arm = flight.placed = flight.waiter = None
        self.flights.pop(flight.ticket, None)
        self.acks.pop(flight.ticket, None)

    def observe(self, replica: str, load: Load) -> None:
        """Keep the newest report of each replica."""
        known = self._loads.get(replica)
        if known is None or known.boot_id != load.boot_id or known.seq < load.seq:
            self._loads[replica] = load

    def renewal(self, gateway: str) -> Renew:
        """What there is to tell."""
        held = self._held(gateway) if self.owes else ()
        outputs = self._new_outputs()
        announces, self.owes = self.owes, False
        loads, self._loads = tuple(self._loads.items()), {}
        acks, self.acks = tuple(self.acks), {}
        return Renew(
            gateway=gateway,
            pool=POOL,
            epoch=self.epoch,
            replicas=self.replicas,
            loads=loads,
            acks=acks,
            held=held,
            announces=announces,
            outputs=outputs,
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
