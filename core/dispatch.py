"""One pool's dispatcher: every ticket in it, and what each replica holds of them.

A state machine that reads no clock and rolls no dice; `store/lua` runs the same rules
atomically, and tests drive both with the same commands.

    arm ──► placed ───────────────► finish | cancel | its gateway falls silent
       └──► queued ─► granted ─► (acknowledged) placed
              ▲          └─ unacknowledged: back to the head, placement undone

The invariant: a replica's account is the sum of the tickets placed on its present life, so
that it returns to zero with the last of them.
"""

from typing import Literal, NamedTuple

from core.attendance import Attendance
from core.fair_queue import FairQueue, Head, cost
from core.placement import Replica
from core.pool_rules import PoolRules
from core.pool_tickets import Ticket, Tickets, grant_of
from core.prefix_index import PrefixIndex
from core.replicas import Replicas, Wanted, Where
from core.shed import Prospect, ServiceTime, shed
from core.tickets import Arm, Dropped, Grant, Placed, Queued, Renew, Renewed

__all__ = ["Pool", "PoolRules"]


class Pool:
    """The pure twin of the functions `arm`, `renew`, `finish_pool` and `cancel_pool`."""

    def __init__(self, rules: PoolRules | None = None) -> None:
        self.rules = rules or PoolRules()
        self.attendance = Attendance(self.rules)
        self.fleet = Replicas(self.rules.placement)
        self.replicas = self.fleet.all
        self.book = Tickets()
        self.tickets = self.book.all
        self.queue = FairQueue(self.rules.queue)
        self.open_by_tenant: dict[str, int] = {}  # tickets on accounts
        self.service = ServiceTime()
        self.prefixes = PrefixIndex(self.rules.prefix)

    @property
    def epoch(self) -> str:
        """Which memory this is; "" before anybody has spoken."""
        return self.attendance.epoch

    @property
    def now_ms(self) -> int:
        """The time of the last call, clamped."""
        return self.attendance.now_ms

    def arm(self, arm: Arm, now_ms: int) -> Placed | Queued | Dropped:
        """Place the ticket, queue it or drop it; the same ticket again gets the same answer.

        A ticket that excludes the replica it is placed on comes back from there: its
        placement is undone, the replica pauses, and the ticket goes to the head.
        """
        self._begin(now_ms)
        if not self._heard(arm.gateway):
            self.attendance.owing.add(arm.gateway)
        known = self.tickets.get(arm.ticket)
        if known is not None:
            answer = self._rearm(known, arm)
            if answer is not None:
                return answer
        refused = self._refusal(arm)
        if refused is not None:
            return Dropped(reason=refused, expected_wait_ms=self._wait_ms(arm, joined=False))
        ticket = self._take(arm, arm.gateway)
        if len(self.queue) == 0 and self.attendance.is_open():
            self.queue.enter(ticket.service_class, ticket.tenant)
            self.queue.leave(ticket.service_class, ticket.tenant)
            spot = self._find(ticket)
            if spot is not None:
                return self._place(ticket, spot, "placed")
        is_back = arm.at_head or known is not None
        self._queue(ticket, at_head=is_back)
        self._dispatch(own=arm.ticket)
        if not is_back:
            self._shed(ticket, arm)
        return self._answer(ticket)

    def renew(self, renew: Renew, now_ms: int) -> Renewed:
        """Hear a gateway out, place what can be placed, and tell it its grants."""
        self._begin(now_ms)
        behind = self.attendance.is_behind(renew, known=self._heard(renew.gateway))
        self.fleet.announce(renew.replicas, self.now_ms)
        for arm, placed in renew.held:
            self._adopt(renew.gateway, arm, placed)
        confirmed = tuple(
            grant for name in renew.acks for grant in self._acknowledge(renew.gateway, name)
        )
        for name, tokens in renew.outputs:
            self._charge_output(name, tokens)
        for replica, load in renew.loads:
            self.fleet.report(replica, load)
        self._dispatch(own="")
        return Renewed(
            epoch=self.epoch,
            grants=self.grants_for(renew.gateway),
            reannounce=behind,
            confirmed=confirmed,
            congestion_ms=self._congestion_ms(),
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
                self._measure(known)
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
        return self.book.told(gateway, self.rules.listed_max)

    # What each call does first.

    def _begin(self, now_ms: int) -> None:
        """Move the clock, and let go of what was waited for in vain."""
        self.attendance.advance(now_ms)
        for due_ms, name in self.book.unacked.first(self.rules.sweep_max):
            if due_ms <= self.now_ms:
                self._return_to_head(self.tickets[name])
        lapsed = self.attendance.lapsed()
        if lapsed is not None:
            names = sorted(self.book.owned.get(lapsed, ()))
            for name in names[: self.rules.sweep_max]:
                self._forget(self.tickets[name])
            self.attendance.let_go(lapsed, all_of_it=len(names) <= self.rules.sweep_max)

    def _heard(self, gateway: str) -> bool:
        if not self.epoch:
            self.fleet.empty_since_ms = self.now_ms
        return self.attendance.heard(gateway)

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
        replica = self._replica_of(known)
        if replica is not None:
            self.fleet.pause(replica, self.now_ms)
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
        return self.fleet.hopeless(
            blocks, now_ms=self.now_ms, no_replica_ms=self.rules.no_replica_ms
        )

    def _take(self, arm: Arm, gateway: str) -> Ticket:
        return self.book.add(arm, gateway, arm.deadline_ms or self.now_ms + self.rules.wait_max_ms)

    def _answer(self, ticket: Ticket) -> Placed | Queued | Dropped:
        if ticket.outcome is None:
            place = self.queue.place(ticket.service_class, ticket.tenant, joined=True)
            return Queued(position=place, expected_wait_ms=self._wait_ms(ticket, joined=True))
        if isinstance(ticket.outcome, Dropped):
            self._forget(ticket)
        return ticket.outcome

    def _queue(self, ticket: Ticket, *, at_head: bool) -> None:
        ticket.state = "queued"
        self.queue.push(ticket.service_class, ticket.tenant, ticket.ticket, at_head=at_head)

    def _place(self, ticket: Ticket, spot: "_Spot", state: Literal["granted", "placed"]) -> Placed:
        replica = spot.replica
        matched = self.prefixes.matched(ticket.prefix_hashes).get(replica.number, 0)
        placement = max(replica.placed + 1, self.now_ms)
        placed = Placed(
            replica=replica.replica,
            boot_id=replica.boot_id,
            url=replica.url,
            placement=placement,
            prefix_matched=matched,
        )
        ticket.state, ticket.outcome, ticket.in_lane = state, placed, spot.in_lane
        self._hold(ticket, replica, placement)
        hashes = len(ticket.prefix_hashes)
        cached = ticket.prompt_tokens * matched // hashes if hashes else 0
        self._charge(
            ticket,
            input_tokens=ticket.prompt_tokens - cached,
            output_tokens=ticket.output_tokens,
        )
        self.prefixes.record(ticket.prefix_hashes, replica.number)
        return placed

    def _hold(self, ticket: Ticket, replica: Replica, placement: int) -> None:
        self.fleet.hold(replica, ticket.ticket, placement, ticket.kv_blocks, in_lane=ticket.in_lane)
        ticket.number = replica.number
        open_before = self.open_by_tenant.get(ticket.tenant, 0)
        self.open_by_tenant[ticket.tenant] = open_before + 1

    def _release(self, ticket: Ticket) -> None:
        replica = self._replica_of(ticket)
        if replica is not None:
            self.fleet.release(replica, ticket.ticket, ticket.kv_blocks, in_lane=ticket.in_lane)
        if ticket.number:
            self.open_by_tenant[ticket.tenant] -= 1
            if self.open_by_tenant[ticket.tenant] == 0:
                del self.open_by_tenant[ticket.tenant]
        ticket.number, ticket.in_lane = 0, False

    def _replica_of(self, ticket: Ticket) -> Replica | None:
        """The replica whose account holds the ticket, if that life still goes on."""
        if not isinstance(ticket.outcome, Placed) or ticket.number == 0:
            return None
        replica = self.replicas.get(ticket.outcome.replica)
        return replica if replica is not None and replica.number == ticket.number else None

    def _forget(self, ticket: Ticket) -> None:
        """Leave the pool from whatever state; the counter stays as it is."""
        if ticket.state == "queued":
            self.queue.remove(ticket.service_class, ticket.tenant, ticket.ticket)
        self._release(ticket)
        self.book.remove(ticket)

    def _return_to_head(self, ticket: Ticket) -> None:
        self._refund(ticket)
        self._release(ticket)
        self.book.untell(ticket)
        ticket.outcome = None
        self._queue(ticket, at_head=True)

    def _acknowledge(self, gateway: str, name: str) -> tuple[Grant, ...]:
        """The outcome that now stands, if there still is one for this gateway."""
        ticket = self.tickets.get(name)
        if ticket is None or ticket.gateway != gateway or ticket.outcome is None:
            return ()
        grant = grant_of(ticket)
        self.book.untell(ticket)
        if ticket.state == "granted":
            ticket.state = "placed"
        if ticket.state == "dropped":
            self._forget(ticket)
        return (grant,)

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

    def _dispatch(self, own: str) -> None:
        """Place waiting tickets, next first; `own` is the caller's, which hears at once.

        The first head that fits nowhere keeps one replica for itself while others pass; when it
        is only the lane that it does not get, the lane stays open.
        """
        if not self.attendance.is_open():
            return
        kept, lane_is_kept, grants = 0, False, 0
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
            spot = self._find(ticket, owed=head.owed, kept=kept, lane_is_kept=lane_is_kept)
            if spot is not None:
                self._serve(ticket, spot, head, own=own)
                grants += 1
                continue
            if not skipped:
                wanted = self._wanted(ticket)
                kept = self.fleet.protect(wanted, self.now_ms)
                lane_is_kept = self._choose(wanted, "anywhere", protected=0) is None
            skipped.add((head.service_class, head.tenant))
            if len(skipped) > self.rules.skips_max:
                break

    def _find(
        self, ticket: Ticket, *, owed: bool = False, kept: int = 0, lane_is_kept: bool = False
    ) -> "_Spot | None":
        """Where it goes now, if anywhere; `kept` is a replica that waits for another ticket.

        The lane is for tenants that have nothing open, batch aside. What is owed to a class
        goes anywhere, or a crowd of such tenants could keep it waiting for ever.
        """
        wanted = self._wanted(ticket)
        where: Where = "anywhere" if owed else "beside the lane"
        replica = self._choose(wanted, where, protected=kept)
        if replica is not None:
            return _Spot(replica, in_lane=False)
        if owed or ticket.service_class == "batch" or ticket.tenant in self.open_by_tenant:
            return None
        replica = self._choose(wanted, "in the lane", protected=kept if lane_is_kept else 0)
        return None if replica is None else _Spot(replica, in_lane=True)

    def _choose(self, wanted: Wanted, where: Where, *, protected: int) -> Replica | None:
        return self.fleet.choose(wanted, where, protected=protected, now_ms=self.now_ms)

    def _wanted(self, ticket: Ticket) -> Wanted:
        return Wanted(
            blocks=ticket.kv_blocks,
            exclude=ticket.exclude,
            matched=self.prefixes.matched(ticket.prefix_hashes),
            hash_count=len(ticket.prefix_hashes),
        )

    def _overdue(self, ticket: Ticket) -> str | None:
        """Why a head is dropped: past its deadline, or so near that it would only waste work."""
        least_ms = self.service.least_ms(self.rules.shed)
        if ticket.deadline_ms - least_ms <= self.now_ms:
            return "expired"
        return self._hopeless(ticket.kv_blocks)

    def _drop(self, ticket: Ticket, reason: str, *, own: str) -> None:
        self._measure_wait(ticket)
        self.queue.remove(ticket.service_class, ticket.tenant, ticket.ticket)
        ticket.state, ticket.outcome = "dropped", Dropped(reason=reason)
        if ticket.ticket != own:
            self._tell(ticket)

    def _serve(self, ticket: Ticket, spot: "_Spot", head: Head, *, own: str) -> None:
        self._measure_wait(ticket)
        self.queue.served(ticket.service_class, ticket.kv_blocks, owed=head.owed)
        self.queue.remove(ticket.service_class, ticket.tenant, ticket.ticket)
        is_own = ticket.ticket == own
        self._place(ticket, spot, "placed" if is_own else "granted")
        if not is_own:
            self._tell(ticket)

    def _tell(self, ticket: Ticket) -> None:
        self.book.tell(ticket, self.now_ms + self.rules.ack_ms)

    # Overload.

    def _shed(self, ticket: Ticket, arm: Arm) -> None:
        """Send a newcomer away that would wait in vain, or in the way of others."""
        if ticket.state != "queued":
            return
        wait_ms = self._wait_ms(ticket, joined=True)
        prospect = Prospect(
            service_class=ticket.service_class,
            waiting=self.queue.counts[ticket.service_class],
            own=len(self.queue.tickets[ticket.service_class, ticket.tenant]),
            tenants=len(self.queue.waiting[ticket.service_class]),
            congestion_ms=self._congestion_ms(),
            wait_ms=wait_ms,
            stay_ms=self.service.stay_us // 1_000,
            left_ms=arm.deadline_ms and arm.deadline_ms - self.now_ms,
            samples=self.service.samples,
        )
        reason = shed(prospect, self.rules.shed, self.rules.queue.queue_max)
        if reason is None:
            ticket.queued_ms = self.now_ms
            ticket.promised_ms = self._promise_ms(ticket, joined=True)
        else:
            self._drop(ticket, reason, own=ticket.ticket)
            ticket.outcome = Dropped(reason=reason, expected_wait_ms=wait_ms)

    def _wait_ms(self, asked: Arm | Ticket, *, joined: bool) -> int:
        promised_ms = self._promise_ms(asked, joined=joined)
        wait_ms = self.service.stretched_ms(asked.service_class, promised_ms)
        return min(self.rules.wait_max_ms, wait_ms)

    def _promise_ms(self, asked: Arm | Ticket, *, joined: bool) -> int:
        place = self.queue.place(asked.service_class, asked.tenant, joined=joined)
        return min(self.rules.wait_max_ms, self.service.wait_ms(place, self.fleet.open))

    def _measure_wait(self, ticket: Ticket) -> None:
        waited_ms = self.now_ms - ticket.queued_ms
        self.service.waited(ticket.service_class, waited_ms, ticket.promised_ms)
        ticket.promised_ms = 0

    def _congestion_ms(self) -> int:
        ahead = self.queue.position("standard")
        return min(self.rules.wait_max_ms, self.service.wait_ms(ahead, self.fleet.open))

    def _measure(self, ticket: Ticket) -> None:
        assert isinstance(ticket.outcome, Placed)
        self.service.measure(max(0, self.now_ms - ticket.outcome.placement))

    # What gateways tell of.

    def _adopt(self, gateway: str, arm: Arm, placed: Placed | None) -> None:
        """Take a ticket as its gateway has it, which is how things really are."""
        known = self.tickets.get(arm.ticket)
        if known is not None and _same(known.outcome, placed):
            self.book.take_over(known, gateway)
            if known.state == "granted":
                known.state = "placed"
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
            self._hold(ticket, replica, placed.placement)
        self._charge(ticket, input_tokens=ticket.prompt_tokens, output_tokens=0)


class _Spot(NamedTuple):
    """Where a ticket goes."""

    replica: Replica
    in_lane: bool


def _same(known: Placed | Dropped | None, told: Placed | None) -> bool:
    if isinstance(known, Placed) and told is not None:
        return (known.replica, known.placement) == (told.replica, told.placement)
    return known is None and told is None
