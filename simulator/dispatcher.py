"""The dispatch twin as a server: the real rules of `core.limits` and `core.dispatch`, with state.

Valkey is one of these that can lose its memory; a gateway that cannot reach it has one of its
own. Invariant: each method is one script, run whole.
"""

import copy
from collections.abc import Iterable
from typing import Protocol

import msgspec

from core.dispatch import Pool, PoolRules
from core.limits import Buckets, LimitRules, admit, cancel, charge, finish
from core.tickets import (
    Admit,
    Admitted,
    Arm,
    Dropped,
    Grant,
    LimitRefused,
    Output,
    Placed,
    Queued,
    Renew,
    Renewed,
)
from simulator.clock import Clock
from simulator.tasks import Process

PoolType = type[Pool]
Memory = tuple[Pool, dict[str, Buckets]]

Outputs = dict[str, tuple[Output, ...]]  # by tenant


class PoolReply(msgspec.Struct, frozen=True):
    """What every call to the pool brings along."""

    epoch: str
    grants: tuple[Grant, ...]


class ArmReply(msgspec.Struct, frozen=True):
    """`arm`'s outcome, and what every call brings along."""

    outcome: Placed | Queued | Dropped
    pool: PoolReply


class TicketWatch(Protocol):
    """Who judges the limits, and hears of each call as it is executed."""

    def admitted(self, asked: Admit) -> None:
        """A ticket that was not held is, from now on for a lease."""

    def touched(self, tenant: str, tickets: Iterable[str]) -> None:
        """These are held for another lease; what was not is so on its gateway's word."""


class Dispatcher:
    """One pool and every tenant's buckets. `watch` is set on the shared one."""

    def __init__(self, clock: Clock, pool_type: PoolType, rules: PoolRules | None = None) -> None:
        self._clock = clock
        self._pool_type = pool_type
        self.rules = rules or PoolRules()
        self.limit_rules = LimitRules()
        self._skew_ms = 0
        self.touched = True  # since an invariant last looked
        self.life = 0  # rises when tickets may have been forgotten
        self.life_since_ms = clock.now_ms
        self.watch: TicketWatch | None = None
        self.pool = pool_type(self.rules)
        self.buckets: dict[str, Buckets] = {}

    @property
    def now_ms(self) -> int:
        """By the server's own clock."""
        return self._clock.now_ms + self._skew_ms

    def jump(self, skew_ms: int) -> None:
        """Be so far off from now on. What a lease is worth then, nobody knows."""
        self._skew_ms = skew_ms
        self._begin_life()

    def wipe(self) -> None:
        """Lose everything."""
        self._begin_life()
        self.pool = self._pool_type(self.rules)
        self.buckets = {}
        self.touched = True

    def copy(self) -> Memory:
        """As it is now."""
        return copy.deepcopy((self.pool, self.buckets))

    def restore(self, memory: Memory) -> None:
        """Forget all that came since."""
        self._begin_life()
        self.pool, self.buckets = memory
        self.touched = True

    def admit(self, asked: Admit) -> Admitted | LimitRefused:
        """See `core.limits.admit`."""
        self.touched = True
        state = self._buckets(asked.tenant)
        before = state.held.get(asked.ticket)
        answer = admit(state, asked, self.now_ms, self.limit_rules)
        if self.watch is not None and isinstance(answer, Admitted):
            # One that lapsed was forgotten, and is another now.
            if state.held[asked.ticket] is before:
                self.watch.touched(asked.tenant, (asked.ticket,))
            else:
                self.watch.admitted(asked)
        return answer

    def charge(self, outputs: Outputs) -> bool:
        """Charge output of many tickets, and keep them held."""
        self.touched = True
        for tenant, totals in outputs.items():
            charge(self._buckets(tenant), totals, self.now_ms, self.limit_rules)
            if self.watch is not None:
                self.watch.touched(tenant, (output.ticket for output in totals))
        return True

    def arm(self, arm: Arm) -> ArmReply:
        """See `core.dispatch.Pool.arm`."""
        self.touched = True
        outcome = self.pool.arm(arm, self.now_ms)
        return ArmReply(outcome, self._reply(arm.gateway))

    def renew(self, renew: Renew) -> Renewed:
        """See `core.dispatch.Pool.renew`."""
        self.touched = True
        return self.pool.renew(renew, self.now_ms)

    def finish_tenant(
        self, tenant: str, ticket: str, *, input_tokens: int, output_total: int
    ) -> bool:
        """See `core.limits.finish`."""
        finish(
            self._buckets(tenant),
            ticket,
            input_tokens=input_tokens,
            output_total=output_total,
            now_ms=self.now_ms,
            rules=self.limit_rules,
        )
        return True

    def cancel_tenant(self, tenant: str, ticket: str) -> bool:
        """See `core.limits.cancel`."""
        cancel(self._buckets(tenant), ticket, self.now_ms, self.limit_rules)
        return True

    def finish_pool(
        self,
        gateway: str,
        ticket: str,
        *,
        input_tokens: int,
        output_tokens: int,
        prefix_hashes: tuple[str, ...],
    ) -> PoolReply:
        """See `core.dispatch.Pool.finish`."""
        self.touched = True
        self.pool.finish(
            ticket,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prefix_hashes=prefix_hashes,
            now_ms=self.now_ms,
        )
        return self._reply(gateway)

    def cancel_pool(self, gateway: str, ticket: str) -> PoolReply:
        """See `core.dispatch.Pool.cancel`."""
        self.touched = True
        self.pool.cancel(ticket, self.now_ms)
        return self._reply(gateway)

    def let_lapse(self) -> None:
        """Drop tickets whose lease has passed, as the next call about each tenant would."""
        for state in self.buckets.values():
            charge(state, (), self.now_ms, self.limit_rules)

    def held(self, tenant: str) -> int:
        """Tickets that count against the tenant's concurrency."""
        return len(self._buckets(tenant).held)

    def _begin_life(self) -> None:
        self.life += 1
        self.life_since_ms = self._clock.now_ms

    def _reply(self, gateway: str) -> PoolReply:
        return PoolReply(self.pool.epoch, self.pool.grants_for(gateway))

    def _buckets(self, tenant: str) -> Buckets:
        return self.buckets.setdefault(tenant, Buckets())


class Valkey(Process):
    """The shared one, as a service that can be away. A connection does not outlive a boot."""

    def __init__(self, clock: Clock, pool_type: PoolType) -> None:
        super().__init__(clock, "valkey")
        self.dispatcher = Dispatcher(clock, pool_type)
        self.boots = 1

    def restart(self) -> None:
        """Come back without memory, as it keeps none on disk."""
        self.boots += 1
        self.dispatcher.wipe()
        self.alive = True

    def fail_over(self, memory: Memory) -> None:
        """A copy that is behind takes over at once."""
        self.boots += 1
        self.dispatcher.restore(memory)
