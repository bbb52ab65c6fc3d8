"""The dispatcher in this process, for while Valkey is away: the pure twins themselves.

It knows this gateway's tickets and nobody else's, so N gateways apart admit up to N times a
tenant's limits, and learn what the others placed only from the replicas' reports. It never
waits and never fails.
"""

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import msgspec

from core.dispatch import Pool, PoolRules
from core.limits import Buckets, LimitRules, admit, cancel, charge, finish, look, restore
from core.tickets import (
    Admit,
    Admitted,
    Arm,
    Headroom,
    LimitRefused,
    Output,
    Renew,
    Renewed,
    Scope,
    Seen,
)
from store.dispatch_backend import ArmReply, PoolReply

T = TypeVar("T")


class Ready(Generic[T]):
    """An awaitable whose answer is there already."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, T]:
        """Never suspends."""
        yield from ()
        return self._value


class LocalDispatch:
    """A `Backend`. `now_ms` is the wall clock; the twins clamp it."""

    def __init__(
        self, pool_rules: PoolRules, limit_rules: LimitRules, now_ms: Callable[[], int]
    ) -> None:
        # Nobody else will announce anything here, so there is nothing to wait for.
        self._pool_rules = msgspec.structs.replace(pool_rules, reannounce_ms=0)
        self._limit_rules = limit_rules
        self._now_ms = now_ms
        self._tenants: dict[str, Buckets] = {}
        self._pools: dict[str, Pool] = {}

    def remember(self, tenant: str, scope: Scope, room: Headroom, at_ms: int) -> None:
        """Start a scope's buckets from where Valkey last had them; the oldest come first."""
        restore(self._tenant(tenant), scope, room, at_ms, self._limit_rules)

    def admit(self, asked: Admit) -> Ready[Admitted | LimitRefused]:
        """Versions are not compared: pushes do not get here either."""
        answer = admit(self._tenant(asked.tenant), asked, self._now_ms(), self._limit_rules)
        if isinstance(answer, Admitted):
            answer = msgspec.structs.replace(answer, degraded=True)
        return Ready(answer)

    def look(self, tenant: str, scopes: tuple[Scope, ...]) -> Ready[tuple[Seen, ...]]:
        """See `Backend`."""
        return Ready(look(self._tenant(tenant), scopes, self._now_ms(), self._limit_rules))

    def charge(self, tenant: str, outputs: tuple[Output, ...]) -> Ready[None]:
        """See `Backend`."""
        charge(self._tenant(tenant), outputs, self._now_ms(), self._limit_rules)
        return Ready(None)

    def finish_tenant(
        self, tenant: str, ticket: str, *, input_tokens: int, output_total: int
    ) -> Ready[None]:
        """See `Backend`."""
        finish(
            self._tenant(tenant),
            ticket,
            input_tokens=input_tokens,
            output_total=output_total,
            now_ms=self._now_ms(),
            rules=self._limit_rules,
        )
        return Ready(None)

    def cancel_tenant(self, tenant: str, ticket: str) -> Ready[None]:
        """See `Backend`."""
        cancel(self._tenant(tenant), ticket, self._now_ms(), self._limit_rules)
        return Ready(None)

    def arm(self, arm: Arm) -> Ready[ArmReply]:
        """See `Backend`."""
        pool = self._pool(arm.pool)
        outcome = pool.arm(arm, self._now_ms())
        return Ready(ArmReply(outcome, self._reply(pool, arm.gateway)))

    def renew(self, renew: Renew) -> Ready[Renewed]:
        """See `Backend`."""
        return Ready(self._pool(renew.pool).renew(renew, self._now_ms()))

    def finish_pool(
        self,
        pool: str,
        gateway: str,
        ticket: str,
        *,
        input_tokens: int,
        output_tokens: int,
        prefix_hashes: tuple[str, ...],
    ) -> Ready[PoolReply]:
        """See `Backend`."""
        state = self._pool(pool)
        state.finish(
            ticket,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prefix_hashes=prefix_hashes,
            now_ms=self._now_ms(),
        )
        return Ready(self._reply(state, gateway))

    def cancel_pool(self, pool: str, gateway: str, ticket: str) -> Ready[PoolReply]:
        """See `Backend`."""
        state = self._pool(pool)
        state.cancel(ticket, self._now_ms())
        return Ready(self._reply(state, gateway))

    def _tenant(self, tenant: str) -> Buckets:
        return self._tenants.setdefault(tenant, Buckets())

    def _pool(self, pool: str) -> Pool:
        if pool not in self._pools:
            self._pools[pool] = Pool(self._pool_rules)
        return self._pools[pool]

    def _reply(self, pool: Pool, gateway: str) -> PoolReply:
        return PoolReply(pool.epoch, pool.grants_for(gateway))
