"""One pool's dispatcher: every ticket in it, and what each replica holds of them.

A state machine that reads no clock and rolls no dice; `store/lua` runs the same rules
atomically, and tests drive both with the same commands.

    arm ──► placed ───────────────► finish | cancel | its gateway falls silent
       └──► queued ─► granted ─► (acknowledged) placed
              ▲          └─ unacknowledged: back to the head, placement undone

The invariant: a replica's account is the sum of the tickets placed on its present life, so
that it returns to zero with the last of them.
"""

from typing import Literal

import msgspec

from core.fair_queue import FairQueue, Head, QueueRules, Ranking, cost
from core.placement import (
    PlacementRules,
    Replica,
    announce,
    candidates,
    choose,
    hold,
    protect,
    release,
    report,
)
from core.prefix_index import PrefixIndex, PrefixRules
from core.protocol import Load, ServiceClass
from core.tickets import Arm, Dropped, Grant, Placed, Queued, Renew, Renewed, ReplicaView


class PoolRules(msgspec.Struct, frozen=True, kw_only=True):
    """Every bound of a pool. Gateways that disagree on them decide by their own."""

    lease_ms: int = 5_000  # a gateway silent for so long is gone, and its tickets with it
    ack_ms: int = 1_000
    reannounce_ms: int = 1_000  # of a new epoch, before anything is placed
    reannounce_max_ms: int = 3_000  # while a gateway still owes its tickets
    no_replica_ms: int = 10_000  # a pool without replicas keeps its queue so long
    wait_max_ms: int = 600_000  # in the queue, without a deadline
    window_ms: int = 10_000  # over which the service rate is measured
    grants_max: int = 16  # tickets placed in one call
    skips_max: int = 4  # heads that fit nowhere, passed over in one call
    steps_max: int = 64  # heads looked at in one call
    sweep_max: int = 32  # tickets of silent gateways let go in one call
    listed_max: int = 64  # grants told in one answer
    queue: QueueRules = QueueRules()
    placement: PlacementRules = PlacementRules()
    prefix: PrefixRules = PrefixRules()


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
    state: Literal["queued", "granted", "placed", "dropped"] = "queued"
    outcome: Placed | Dropped | None = None
    number: int = 0
    input_tokens: int = 0  # uncached, as far as known
    output_tokens: int = 0
    cost: int = 0  # what its tenant's counter was moved by


class Pool:
    """The pure twin of the functions `arm`, `renew`, `finish_pool` and `cancel_pool`."""

    def __init__(self, rules: PoolRules | None = None) -> None:
        self.rules = rules or PoolRules()
        self.now_ms = 0
        self.epoch = ""
        self.started_ms = 0
        self.empty_since_ms = 0  # without replicas; 0 while there are some
        self.numbers = 0  # replica lives numbered so far
        self.window_start_ms = 0
        self.window_count = 0
        self.window_before = 0
        self.replicas: dict[str, Replica] = {}
        self.tickets: dict[str, Ticket] = {}
        self.owned: dict[str, set[str]] = {}  # gateway: its tickets
        self.gateways = Ranking()  # by the end of their lease
        self.owing: set[str] = set()  # gateways whose tickets are not all known
        self.granted: dict[str, set[str]] = {}  # gateway: tickets with an untold outcome
        self.unacked = Ranking()  # granted tickets by the end of their patience
        self.queue = FairQueue(self.rules.queue)
        self.prefixes = PrefixIndex(self.rules.prefix)

    def arm(self, arm: Arm, now_ms: int) -> Placed | Queued | Dropped:
        """Place the ticket, queue it or drop it; the same ticket again gets the same answer.

        A ticket that excludes the replica it is placed on comes back from there: its
        placement is undone, the replica pauses, and the ticket goes to the head.
        """
        self._begin(now_ms)
        if not self._heard(arm.gateway):
            self.owing.add(arm.gateway)
        known = self.tickets.get(arm.ticket)
        if known is not None:
            answer = self._rearm(known, arm)
            if answer is not None:
                return answer
        refused = self._refusal(arm)
        if refused is not None:
            return Dropped(reason=refused)
        ticket = self._take(arm)
        if len(self.queue) == 0 and self._is_open():
            self.queue.enter(ticket.service_class, ticket.tenant)
            self.queue.leave(ticket.service_class, ticket.tenant)
            replica = self._choose(ticket, protected=0)
            if replica is not None:
                return self._place(ticket, replica, "placed")
        self._queue(ticket, at_head=arm.at_head or known is not None)
        self._dispatch(own=arm.ticket)
        return self._answer(ticket)

    def renew(self, renew: Renew, now_ms: int) -> Renewed:
        """Hear a gateway out, place what can be placed, and tell it its grants."""
        self._begin(now_ms)
        behind = self._is_behind(renew)
        self._announce(renew.replicas)
        for arm, placed in renew.held:
            self._adopt(renew.gateway, arm, placed)
        confirmed = tuple(
            grant for name in renew.acks for grant in self._acknowledge(renew.gateway, name)
        )
        for name, tokens in renew.outputs:
            self._charge_output(name, tokens)
        for replica, load in renew.loads:
            self._report(replica, load)
        self._dispatch(own="")
        return Renewed(
            epoch=self.epoch,
            grants=self.grants_for(renew.gateway),
            reannounce=behind,
            confirmed=confirmed,
        )

    def finish(
        self,
        ticket: str,
        *,
        input_tokens: int,
        output_tokens: int,
        prefix_hashes: tuple[str, ...],
        now_ms: int,
    ) -> None:
        """The engine's last word: free the account, true up the counter, place the next."""
        self._begin(now_ms)
        known = self.tickets.get(ticket)
        if known is not None:
            if known.number:
                self.prefixes.record(prefix_hashes, known.number)
            self._charge(known, input_tokens=input_tokens, output_tokens=output_tokens)
            self._forget(known)
        self._dispatch(own="")

    def cancel(self, ticket: str, now_ms: int) -> None:
        """Forget the ticket as if it had never been. Repeating it is harmless."""
        self._begin(now_ms)
        known = self.tickets.get(ticket)
        if known is not None:
            self._refund(known)
            self._forget(known)
        self._dispatch(own="")

    def grants_for(self, gateway: str) -> tuple[Grant, ...]:
        """Outcomes this gateway has not acknowledged, in the order of their names."""
        names = sorted(self.granted.get(gateway, ()))[: self.rules.listed_max]
        return tuple(self._grant(self.tickets[name]) for name in names)

    # What each call does first.

    def _begin(self, now_ms: int) -> None:
        """Move the clock, which never goes back, and let go of what was waited for in vain."""
        self.now_ms = max(self.now_ms, now_ms) if self.epoch else now_ms
        for due_ms, name in self.unacked.first(self.rules.sweep_max):
            if due_ms <= self.now_ms:
                self._return_to_head(self.tickets[name])
        for lease_ms, gateway in self.gateways.first(1):
            if lease_ms <= self.now_ms:
                self._sweep(gateway)

    def _sweep(self, gateway: str) -> None:
        names = sorted(self.owned.get(gateway, ()))
        for name in names[: self.rules.sweep_max]:
            self._forget(self.tickets[name])
        if len(names) <= self.rules.sweep_max:
            self.gateways.drop(gateway)
            self.owing.discard(gateway)
        else:
            self.owing.add(gateway)  # one that comes back before the rest are gone

    def _heard(self, gateway: str) -> bool:
        """Extend the gateway's lease; false when it had none."""
        if not self.epoch:
            self.epoch = f"{self.now_ms}-{gateway}"
            self.started_ms = self.now_ms
            self.empty_since_ms = self.now_ms
        known = gateway in self.gateways
        self.gateways.put(gateway, self.now_ms + self.rules.lease_ms)
        return known

    def _is_behind(self, renew: Renew) -> bool:
        """Whether the gateway must announce what it holds, because that was lost or let go."""
        known = self._heard(renew.gateway)
        if renew.announces:
            self.owing.discard(renew.gateway)
            return False
        if not known or renew.epoch != self.epoch:
            self.owing.add(renew.gateway)
        return renew.gateway in self.owing

    def _is_open(self) -> bool:
        """Whether tickets may be placed: not before a new epoch knows what is running."""
        age_ms = self.now_ms - self.started_ms
        if age_ms < self.rules.reannounce_ms or not self.epoch:
            return False
        return not self.owing or age_ms >= self.rules.reannounce_max_ms

    # Tickets.

    def _rearm(self, known: Ticket, arm: Arm) -> Placed | Queued | Dropped | None:
        """The answer to a ticket already here, or None when it starts again."""
        if known.outcome is None:
            self._dispatch(own=arm.ticket)
            return self._answer(known)
        if isinstance(known.outcome, Dropped):
            return self._answer(known)
        if known.outcome.replica not in arm.exclude:
            self._acknowledge(known.gateway, known.ticket)
            return known.outcome
        self._pause(known)
        self._refund(known)
        self._forget(known)
        return None

    def _refusal(self, arm: Arm) -> str | None:
        if arm.deadline_ms and arm.deadline_ms <= self.now_ms:
            return "expired"
        hopeless = self._hopeless(arm.kv_blocks)
        if hopeless is not None:
            return hopeless
        if self.queue.is_full(arm.service_class) and not arm.at_head:
            return "queue_full"
        return None

    def _hopeless(self, blocks: int) -> str | None:
        if not self.replicas:
            empty_ms = self.now_ms - self.empty_since_ms
            return "no_replica" if empty_ms >= self.rules.no_replica_ms else None
        if blocks > max(replica.total for replica in self.replicas.values()):
            return "fits_never"
        return None

    def _take(self, arm: Arm, gateway: str = "") -> Ticket:
        ticket = Ticket(
            ticket=arm.ticket,
            gateway=gateway or arm.gateway,
            tenant=arm.tenant,
            weight=arm.weight,
            service_class=arm.service_class,
            deadline_ms=arm.deadline_ms or self.now_ms + self.rules.wait_max_ms,
            kv_blocks=arm.kv_blocks,
            prompt_tokens=arm.prompt_tokens,
            prefix_hashes=arm.prefix_hashes,
            exclude=arm.exclude,
        )
        self.tickets[ticket.ticket] = ticket
        self.owned.setdefault(ticket.gateway, set()).add(ticket.ticket)
        return ticket

    def _answer(self, ticket: Ticket) -> Placed | Queued | Dropped:
        if ticket.outcome is None:
            position = self.queue.position(ticket.service_class)
            return Queued(position=position, expected_wait_ms=self._expected_wait_ms(position))
        if isinstance(ticket.outcome, Dropped):
            self._forget(ticket)
        return ticket.outcome

    def _queue(self, ticket: Ticket, *, at_head: bool) -> None:
        ticket.state = "queued"
        self.queue.push(ticket.service_class, ticket.tenant, ticket.ticket, at_head=at_head)

    def _place(
        self, ticket: Ticket, replica: Replica, state: Literal["granted", "placed"]
    ) -> Placed:
        matched = self.prefixes.matched(ticket.prefix_hashes).get(replica.number, 0)
        placement = max(replica.placed + 1, self.now_ms)
        hold(replica, ticket.ticket, placement, ticket.kv_blocks)
        placed = Placed(
            replica=replica.replica,
            boot_id=replica.boot_id,
            url=replica.url,
            placement=placement,
            prefix_matched=matched,
        )
        ticket.state, ticket.outcome, ticket.number = state, placed, replica.number
        hashes = len(ticket.prefix_hashes)
        cached = ticket.prompt_tokens * matched // hashes if hashes else 0
        self._charge(
            ticket,
            input_tokens=ticket.prompt_tokens - cached,
            output_tokens=ticket.output_tokens,
        )
        self.prefixes.record(ticket.prefix_hashes, replica.number)
        self._count_placement()
        return placed

    def _forget(self, ticket: Ticket) -> None:
        """Leave the pool from whatever state; the counter stays as it is."""
        if ticket.state == "queued":
            self.queue.remove(ticket.service_class, ticket.tenant, ticket.ticket)
        self._release(ticket)
        self._untell(ticket)
        self._disown(ticket)
        del self.tickets[ticket.ticket]

    def _disown(self, ticket: Ticket) -> None:
        owned = self.owned[ticket.gateway]
        owned.discard(ticket.ticket)
        if not owned:
            del self.owned[ticket.gateway]

    def _return_to_head(self, ticket: Ticket) -> None:
        self._refund(ticket)
        self._release(ticket)
        self._untell(ticket)
        ticket.outcome = None
        self._queue(ticket, at_head=True)

    def _replica_of(self, ticket: Ticket) -> Replica | None:
        """The replica whose account holds the ticket, if that life still goes on."""
        if not isinstance(ticket.outcome, Placed) or ticket.number == 0:
            return None
        replica = self.replicas.get(ticket.outcome.replica)
        return replica if replica is not None and replica.number == ticket.number else None

    def _release(self, ticket: Ticket) -> None:
        replica = self._replica_of(ticket)
        if replica is not None:
            release(replica, ticket.ticket, ticket.kv_blocks)
        ticket.number = 0

    def _pause(self, ticket: Ticket) -> None:
        """Leave a replica that declined, or died, alone for a moment."""
        replica = self._replica_of(ticket)
        if replica is not None:
            replica.paused_until_ms = self.now_ms + self.rules.placement.decline_pause_ms

    # Grants.

    def _tell(self, ticket: Ticket) -> None:
        self.granted.setdefault(ticket.gateway, set()).add(ticket.ticket)
        if ticket.state == "granted":
            self.unacked.put(ticket.ticket, self.now_ms + self.rules.ack_ms)

    def _untell(self, ticket: Ticket) -> None:
        told = self.granted.get(ticket.gateway, set())
        told.discard(ticket.ticket)
        if not told:
            self.granted.pop(ticket.gateway, None)
        self.unacked.drop(ticket.ticket)

    def _acknowledge(self, gateway: str, name: str) -> tuple[Grant, ...]:
        """The outcome that now stands, if there still is one for this gateway."""
        ticket = self.tickets.get(name)
        if ticket is None or ticket.gateway != gateway or ticket.outcome is None:
            return ()
        grant = self._grant(ticket)
        self._untell(ticket)
        if ticket.state == "granted":
            ticket.state = "placed"
        if ticket.state == "dropped":
            self._forget(ticket)
        return (grant,)

    def _grant(self, ticket: Ticket) -> Grant:
        assert ticket.outcome is not None
        return Grant(ticket=ticket.ticket, outcome=ticket.outcome)

    # Counters.

    def _charge(self, ticket: Ticket, *, input_tokens: int, output_tokens: int) -> None:
        """Move the tenant's counter to what this ticket costs, whatever it had cost so far."""
        ticket.input_tokens, ticket.output_tokens = input_tokens, output_tokens
        owed = cost(input_tokens=input_tokens, output_tokens=output_tokens, weight=ticket.weight)
        self.queue.charge(ticket.tenant, owed - ticket.cost)
        ticket.cost = owed

    def _refund(self, ticket: Ticket) -> None:
        self.queue.charge(ticket.tenant, -ticket.cost)
        ticket.cost = 0

    def _charge_output(self, name: str, tokens: int) -> None:
        ticket = self.tickets.get(name)
        if ticket is not None and ticket.state == "placed" and tokens > ticket.output_tokens:
            self._charge(ticket, input_tokens=ticket.input_tokens, output_tokens=tokens)

    # Placing.

    def _choose(self, ticket: Ticket, *, protected: int) -> Replica | None:
        rules = self.rules.placement
        able = candidates(
            self.replicas.values(), ticket.kv_blocks, ticket.exclude, self.now_ms, rules
        )
        return choose(
            able,
            blocks=ticket.kv_blocks,
            matched=self.prefixes.matched(ticket.prefix_hashes),
            hash_count=len(ticket.prefix_hashes),
            protected=protected,
            rules=rules,
        )

    def _dispatch(self, own: str) -> None:
        """Place waiting tickets, next first; `own` is the caller's, which hears at once.

        The first head that fits nowhere keeps one replica for itself while others pass.
        """
        if not self._is_open():
            return
        protected, grants = 0, 0
        skipped: set[tuple[str, str]] = set()
        for _ in range(self.rules.steps_max):
            head = self.queue.head(skipped)
            if head is None or grants >= self.rules.grants_max:
                break
            ticket = self.tickets[head.ticket]
            reason = self._overdue(ticket)
            if reason is not None:
                self._drop(ticket, reason, own=own)
                continue
            replica = self._choose(ticket, protected=protected)
            if replica is not None:
                self._serve(ticket, replica, head, own=own)
                grants += 1
                continue
            protected = protected or self._protect(ticket)
            skipped.add((head.service_class, head.tenant))
            if len(skipped) > self.rules.skips_max:
                break

    def _overdue(self, ticket: Ticket) -> str | None:
        if ticket.deadline_ms <= self.now_ms:
            return "expired"
        return self._hopeless(ticket.kv_blocks)

    def _drop(self, ticket: Ticket, reason: str, *, own: str) -> None:
        self.queue.remove(ticket.service_class, ticket.tenant, ticket.ticket)
        ticket.state, ticket.outcome = "dropped", Dropped(reason=reason)
        if ticket.ticket != own:
            self._tell(ticket)

    def _serve(self, ticket: Ticket, replica: Replica, head: Head, *, own: str) -> None:
        self.queue.served(ticket.service_class, ticket.kv_blocks, owed=head.owed)
        self.queue.remove(ticket.service_class, ticket.tenant, ticket.ticket)
        is_own = ticket.ticket == own
        self._place(ticket, replica, "placed" if is_own else "granted")
        if not is_own:
            self._tell(ticket)

    def _protect(self, ticket: Ticket) -> int:
        rules = self.rules.placement
        return protect(
            candidates(self.replicas.values(), ticket.kv_blocks, ticket.exclude, self.now_ms, rules)
        )

    def _count_placement(self) -> None:
        self._roll_window()
        self.window_count += 1

    def _roll_window(self) -> None:
        window_ms = self.rules.window_ms
        elapsed = (self.now_ms - self.window_start_ms) // window_ms
        if elapsed > 0:
            self.window_before = self.window_count if elapsed == 1 else 0
            self.window_count = 0
            self.window_start_ms += elapsed * window_ms

    def _expected_wait_ms(self, position: int) -> int:
        """By the rate of placements over the last window; 0 while none was measured."""
        self._roll_window()
        window_ms = self.rules.window_ms
        left_ms = window_ms - (self.now_ms - self.window_start_ms)
        served = self.window_count + self.window_before * left_ms // window_ms
        if served == 0:
            return 0
        return min(self.rules.wait_max_ms, position * window_ms // served)

    # What gateways tell of.

    def _announce(self, views: tuple[ReplicaView, ...]) -> None:
        for view in views:
            known = self.replicas.get(view.replica)
            replica = announce(known, view, self.numbers + 1, self.now_ms)
            self.numbers = max(self.numbers, replica.number)
            self.replicas[view.replica] = replica
        silent_ms = self.rules.placement.replica_silent_ms
        for name, replica in list(self.replicas.items()):
            if replica.open == 0 and self.now_ms - replica.seen_ms > silent_ms:
                del self.replicas[name]
        if self.replicas:
            self.empty_since_ms = 0
        elif self.empty_since_ms == 0:
            self.empty_since_ms = self.now_ms

    def _report(self, name: str, load: Load) -> None:
        replica = self.replicas.get(name)
        if replica is not None:
            report(replica, load)

    def _adopt(self, gateway: str, arm: Arm, placed: Placed | None) -> None:
        """Take a ticket as its gateway has it, which is how things really are."""
        known = self.tickets.get(arm.ticket)
        if known is not None and _same(known.outcome, placed):
            self._take_over(known, gateway)
            return
        if known is not None:
            self._refund(known)
            self._forget(known)
        ticket = self._take(arm, gateway)
        if placed is None:
            self._queue(ticket, at_head=arm.at_head or known is not None)
            return
        ticket.state, ticket.outcome = "placed", placed
        replica = self.replicas.get(placed.replica)
        if replica is not None and replica.boot_id == placed.boot_id:
            hold(replica, ticket.ticket, placed.placement, ticket.kv_blocks)
            ticket.number = replica.number
        self._charge(ticket, input_tokens=ticket.prompt_tokens, output_tokens=0)

    def _take_over(self, ticket: Ticket, gateway: str) -> None:
        """The same ticket in the same state, under its gateway's present name."""
        self._untell(ticket)
        self._disown(ticket)
        ticket.gateway = gateway
        self.owned.setdefault(gateway, set()).add(ticket.ticket)
        if ticket.state == "granted":
            ticket.state = "placed"


def _same(known: Placed | Dropped | None, told: Placed | None) -> bool:
    if isinstance(known, Placed) and told is not None:
        return (known.replica, known.placement) == (told.replica, told.placement)
    return known is None and told is None
