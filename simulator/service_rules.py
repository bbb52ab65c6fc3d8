"""What must hold of tenants' requests in service, as far as the shared dispatcher decides.

    told        the shared dispatcher heard of it in this life of its memory, within a lease
    untold      it did not, or forgot it, and its gateway is about to say so

The rules: nothing is admitted while the told ones, it included, are over their tenant's
concurrency; and where the shared dispatcher decides, nothing stays untold for over `TELL_MS`.
So a limit is exceeded by at most the untold: what was running when memory was lost or a clock
jumped, for so long, and what gateways that decide alone have admitted.
"""

from collections.abc import Callable, Iterable

import msgspec

from core.tickets import Admit
from simulator.clock import Clock
from simulator.contact import CALL_MS
from simulator.dispatch_link import CHARGE_MS, TOUCH_MS
from simulator.dispatcher import Dispatcher
from simulator.orders import Orders

# A round of charging that tells everything is due within TOUCH_MS and starts when the round
# before it has been answered; then it takes a call. A call without an answer ends the contact.
TELL_MS = TOUCH_MS + CALL_MS + CHARGE_MS + CALL_MS


class InFlight(msgspec.Struct, frozen=True):
    """A gateway's ticket while the shared dispatcher decides for it, without a break."""

    ticket: str
    since_ms: int


class ServiceRules:
    """Implements `TicketWatch`: hears of what the shared dispatcher does when it does it.

    When the gateway gets to know is too late: memory may be lost in between.
    """

    def __init__(
        self,
        clock: Clock,
        orders: Orders,
        dispatcher: Dispatcher,
        in_flight: Callable[[], Iterable[InFlight]],
    ) -> None:
        self._clock = clock
        self._orders = orders
        self._dispatcher = dispatcher
        self._in_flight = in_flight
        self._life = dispatcher.life
        self._life_since_ms = clock.now_ms
        self._told: dict[str, tuple[str, int]] = {}  # ticket: its tenant, when last told
        self._found: list[str] = []

    def admitted(self, asked: Admit) -> None:
        """See `TicketWatch`."""
        self.touched(asked.tenant, (asked.ticket,))
        told, limit = self._told_of(asked.tenant) | {asked.ticket}, asked.limits.concurrency
        if 0 < limit < len(told):
            self._found.append(
                f"{asked.tenant} has {len(told)} requests in service, {limit} are allowed"
            )

    def touched(self, tenant: str, tickets: Iterable[str]) -> None:
        """See `TicketWatch`."""
        self._follow()
        self._told.update(dict.fromkeys(tickets, (tenant, self._clock.now_ms)))

    def problems(self) -> list[str]:
        """All that was wrong since this was last asked."""
        self._follow()
        found, self._found = [*self._found, *self._kept_back()], []
        return found

    def _follow(self) -> None:
        """Forget what the dispatcher forgot. Only `TicketWatch` may tell of it anew."""
        if self._life != self._dispatcher.life:
            self._life, self._life_since_ms = self._dispatcher.life, self._dispatcher.life_since_ms
            self._told.clear()

    def _is_told(self, ticket: str) -> bool:
        told = self._told.get(ticket)
        alive_ms = self._clock.now_ms - self._dispatcher.limit_rules.lease_ms
        return told is not None and told[1] > alive_ms

    def _told_of(self, tenant: str) -> set[str]:
        return {
            ticket
            for ticket, (whose, _) in self._told.items()
            if whose == tenant and ticket in self._orders.open and self._is_told(ticket)
        }

    def _kept_back(self) -> Iterable[str]:
        for flight in self._in_flight():
            untold_ms = self._clock.now_ms - max(flight.since_ms, self._life_since_ms)
            if untold_ms > TELL_MS and not self._is_told(flight.ticket):
                yield f"{flight.ticket} is in service, and untold for {untold_ms} ms"
