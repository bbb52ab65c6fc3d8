"""The tickets of one pool: whose they are, where they stand, and what is yet to be told.

Bookkeeping without rules. Invariant: a ticket with an untold outcome is listed for its
gateway until that is acknowledged, and a granted one is watched until then.
"""

from typing import Literal

import msgspec

from core.protocol import ServiceClass
from core.ranking import Ranking
from core.tickets import Arm, Dropped, Grant, Placed

State = Literal["queued", "granted", "placed", "dropped"]


class Ticket(msgspec.Struct, kw_only=True):
    """A request in the pool. `number` is its replica's life, 0 where it holds no account."""

    ticket: str
    gateway: str
    tenant: str
    weight: int
    service_class: ServiceClass
    deadline_ms: int
    kv_blocks: int
    prompt_tokens: int
    prefix_hashes: tuple[str, ...]
    exclude: tuple[str, ...]
    state: State = "queued"
    queued_ms: int = 0  # when it began to wait
    promised_ms: int = 0  # how long, by its place; 0 where nobody asked
    outcome: Placed | Dropped | None = None
    number: int = 0
    in_lane: bool = False  # of its replica
    input_tokens: int = 0  # uncached, as far as known
    output_tokens: int = 0
    cost: int = 0  # what its tenant's counter was moved by


class Tickets:
    """All of a pool's, by name and by gateway."""

    def __init__(self) -> None:
        self.all: dict[str, Ticket] = {}
        self.owned: dict[str, set[str]] = {}  # gateway: its tickets
        self.granted: dict[str, set[str]] = {}  # gateway: tickets with an untold outcome
        self.unacked = Ranking()  # granted tickets by the end of their patience

    def add(self, arm: Arm, gateway: str, deadline_ms: int) -> Ticket:
        """A new one, queued nowhere yet."""
        ticket = Ticket(
            ticket=arm.ticket,
            gateway=gateway,
            tenant=arm.tenant,
            weight=arm.weight,
            service_class=arm.service_class,
            deadline_ms=deadline_ms,
            kv_blocks=arm.kv_blocks,
            prompt_tokens=arm.prompt_tokens,
            prefix_hashes=arm.prefix_hashes,
            exclude=arm.exclude,
        )
        self.all[ticket.ticket] = ticket
        self._own(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Gone, whatever was still to be told of it."""
        self.untell(ticket)
        self._disown(ticket)
        del self.all[ticket.ticket]

    def take_over(self, ticket: Ticket, gateway: str) -> None:
        """The same ticket, under its gateway's present name; nothing is left to be told."""
        self.untell(ticket)
        self._disown(ticket)
        ticket.gateway = gateway
        self._own(ticket)

    def tell(self, ticket: Ticket, until_ms: int) -> None:
        """Its outcome is for its gateway to hear; a grant stands open until then."""
        self.granted.setdefault(ticket.gateway, set()).add(ticket.ticket)
        if ticket.state == "granted":
            self.unacked.put(ticket.ticket, until_ms)

    def untell(self, ticket: Ticket) -> None:
        """It was heard, or is void."""
        told = self.granted.get(ticket.gateway, set())
        told.discard(ticket.ticket)
        if not told:
            self.granted.pop(ticket.gateway, None)
        self.unacked.drop(ticket.ticket)

    def told(self, gateway: str, count: int) -> tuple[Grant, ...]:
        """Outcomes this gateway has not acknowledged, in the order of their names."""
        names = sorted(self.granted.get(gateway, ()))[:count]
        return tuple(grant_of(self.all[name]) for name in names)

    def _own(self, ticket: Ticket) -> None:
        self.owned.setdefault(ticket.gateway, set()).add(ticket.ticket)

    def _disown(self, ticket: Ticket) -> None:
        owned = self.owned[ticket.gateway]
        owned.discard(ticket.ticket)
        if not owned:
            del self.owned[ticket.gateway]


def grant_of(ticket: Ticket) -> Grant:
    """Its outcome, as told."""
    assert ticket.outcome is not None
    return Grant(ticket=ticket.ticket, outcome=ticket.outcome)
