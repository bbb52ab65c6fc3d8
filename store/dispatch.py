"""A gateway's side of dispatch: one ticket's way, from its admission to its end.

Valkey decides for everyone; while it is away this process decides alone, and when it is back
everything in flight is announced to it (`store.decider`, `store.telling`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Generator, Mapping
from typing import Any

import msgspec

from core.protocol import Load, ServiceClass
from core.tickets import (
    Admit,
    Admitted,
    Arm,
    Dropped,
    LimitRefused,
    Placed,
    Queued,
    ReplicaView,
    Scope,
    Seen,
    Stale,
)
from store.dispatch_audit import DispatchAudit, audit
from store.dispatch_backend import ArmReply, Backend, PoolReply
from store.dispatch_rules import DispatchRules, now_ms
from store.flights import Flight, PoolSide
from store.telling import Telling, second

__all__ = ["Dispatch", "DispatchAudit", "DispatchRules", "audit"]

_log = logging.getLogger(__name__)


class _Release:
    """Something that is done whether it is awaited or not, and whoever stops waiting for it."""

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, None]:
        """Until it is done."""
        return asyncio.shield(self._task).__await__()


class Dispatch:
    """One for each gateway incarnation; `gateway` is its id, and holds no bar and no tilde."""

    def __init__(self, redis_url: str, gateway: str, rules: DispatchRules | None = None) -> None:
        assert not set("|~") & set(gateway)
        self._rules = rules or DispatchRules()
        self._telling = Telling(redis_url, gateway, self._rules)
        self._decider = self._telling.decider
        self._flights = self._telling.flights

    @property
    def degraded(self) -> bool:
        """Whether Valkey is away, so that this process decides alone."""
        return self._decider.degraded

    async def start(self) -> None:
        """Connect; when that takes longer than a call may, begin without Valkey."""
        await self._telling.start()

    async def close(self) -> None:
        """Stop; releases under way get a moment to leave. What is in flight ends by its lease."""
        await self._telling.close()

    # A request's way.

    async def admit(self, a: Admit) -> Admitted | LimitRefused | Stale:
        """Charge the tenant's limits and hold the ticket, or charge nothing."""
        try:
            answer = await self._decider.ask(lambda backend: backend.admit(a))
        except BaseException:
            # The call may have got through, or may yet.
            self._telling.release(self._telling.cancel(a.ticket, a.tenant, None))
            raise
        if isinstance(answer, Admitted):
            names = tuple(scope.name for scope in a.scopes)
            flight = self._flights.setdefault(a.ticket, Flight(a.ticket, a.tenant, names))
            flight.admitted = True
        if not isinstance(answer, Stale):
            self._decider.remember(a.tenant, a.all_scopes, answer.rooms)
        return answer

    async def look(self, tenant: str, scopes: tuple[Scope, ...]) -> tuple[Seen, ...]:
        """What a request in these scopes would find left. Charges nothing."""
        return await self._decider.ask(lambda backend: backend.look(tenant, scopes))

    async def place(self, arm: Arm) -> Placed | Dropped:
        """Wait for a replica, at most until the deadline. Cancelling leaves the queue."""
        pool = self._telling.pool(arm.pool)
        flight = self._flights.setdefault(arm.ticket, Flight(arm.ticket, arm.tenant))
        waiter = pool.enter(flight, arm)
        try:
            async with asyncio.timeout(self._patience_s(arm)):
                outcome = await self._arm_and_wait(pool, arm, waiter)
        except TimeoutError:
            self._leave(pool, flight)
            return Dropped(reason="expired")
        except BaseException:
            self._leave(pool, flight)
            raise
        if isinstance(outcome, Placed):
            pool.settle(flight, outcome)
        else:
            self._forget(pool, flight)
        return outcome

    async def requeue(self, arm: Arm) -> Placed | Dropped:
        """Place again, before others: after the replica declined, or died."""
        flight = self._flights.get(arm.ticket)
        exclude = arm.exclude
        if flight is not None and flight.placed is not None:
            exclude = tuple(dict.fromkeys((*exclude, flight.placed.replica)))
        return await self.place(msgspec.structs.replace(arm, exclude=exclude, at_head=True))

    def charge_output(self, *, tenant: str, ticket: str, tokens: int) -> None:
        """Tell how many output tokens the ticket has produced so far, all attempts together."""
        flight = self._flights.get(ticket)
        if flight is not None and tokens > flight.output_tokens:
            assert flight.tenant == tenant
            flight.output_tokens = tokens
            self._telling.produced.add(ticket)

    def finish(
        self,
        *,
        ticket: str,
        pool: str | None,
        tenant: str,
        replica: str,
        actual_input_tokens: int,
        prefix_hashes: tuple[str, ...],
    ) -> Awaitable[None]:
        """The engine's last word: everything held is free, whoever waits for that or does not.

        Without a pool nobody of ours did it, and only the tenant's limits hear of it.
        """
        flight = self._let_go(ticket)
        produced = flight.output_tokens if flight is not None else 0
        _log.debug("finished", extra={"facts": {"ticket": ticket, "replica": replica}})

        def tell_tenant(backend: Backend) -> Awaitable[None]:
            return backend.finish_tenant(
                tenant, ticket, input_tokens=actual_input_tokens, output_total=produced
            )

        telling = self._telling
        if pool is None:
            return _Release(telling.release(telling.tenant_left(tell_tenant)))

        def tell(backend: Backend) -> Awaitable[PoolReply]:
            tenant_told = tell_tenant(backend)
            pool_told = backend.finish_pool(
                pool,
                self._decider.name,
                ticket,
                input_tokens=actual_input_tokens,
                output_tokens=produced,
                prefix_hashes=prefix_hashes,
            )
            return second(tenant_told, pool_told)

        return _Release(telling.release(telling.pool_left(telling.pool(pool), tell)))

    def cancel(self, *, ticket: str, pool: str | None, tenant: str) -> Awaitable[None]:
        """Give everything back, whoever waits for that or does not. Idempotent."""
        self._let_go(ticket)
        telling = self._telling
        return _Release(telling.release(telling.cancel(ticket, tenant, pool)))

    # What the gateway knows.

    def observe(self, pool: str, replica: str, load: Load) -> None:
        """Pass on a replica's report."""
        side = self._telling.pool(pool)
        side.observe(replica, load)
        if side.is_waiting:
            side.wake_within(self._rules.report_ms / 1000)

    def congestion_ms(self, pool: str) -> int:
        """How long a newcomer would wait there, batch aside; as of the last renewal."""
        side = self._telling.pools.get(pool)
        return 0 if side is None else side.congestion_ms

    def waiting(self) -> dict[str, dict[ServiceClass, int]]:
        """How many requests of this gateway wait for a replica, by pool and class."""
        return {name: side.waiting for name, side in self._telling.pools.items()}

    def set_replicas(self, pool: str, replicas: tuple[ReplicaView, ...]) -> None:
        """The pool's replicas as the registry has them now."""
        side = self._telling.pool(pool)
        if side.replicas != replicas:
            side.replicas = replicas
            side.wake.set()

    async def push_versions(
        self,
        *,
        tenants: Mapping[str, int] | None = None,
        keys: Mapping[tuple[str, str], int] | None = None,
        routes: Mapping[str, int] | None = None,
    ) -> None:
        """Make older versions STALE everywhere. Raises RedisAwayError: polls tell it too."""
        await self._decider.push_versions(tenants=tenants, keys=keys, routes=routes)

    # Waiting for a replica.

    async def _arm_and_wait(
        self, pool: PoolSide, arm: Arm, waiter: "asyncio.Future[Placed | Dropped]"
    ) -> Placed | Dropped:
        def call(backend: Backend) -> Awaitable[ArmReply]:
            return backend.arm(msgspec.structs.replace(arm, gateway=self._decider.name))

        reply = await self._decider.ask(call)
        self._telling.hear(pool, reply.pool)
        # A grant, in answer to a renew, may have been faster.
        if waiter.done() or isinstance(reply.outcome, Queued):
            return await waiter
        return reply.outcome

    def _patience_s(self, arm: Arm) -> float:
        most_ms = self._rules.pool.wait_max_ms
        left_ms = arm.deadline_ms - now_ms() if arm.deadline_ms else most_ms
        # A little longer, so that it is the dispatcher that says so.
        return (max(0, min(most_ms, left_ms)) + self._rules.call_timeout_ms) / 1000

    def _leave(self, pool: PoolSide, flight: Flight) -> None:
        self._forget(pool, flight)
        self._telling.release(self._telling.cancel_pool(pool, flight.ticket))

    def _forget(self, pool: PoolSide, flight: Flight) -> None:
        """Not in the pool any more; what the tenant holds, if anything, stays."""
        pool.leave(flight)
        if not flight.admitted:
            self._let_go(flight.ticket)

    def _let_go(self, ticket: str) -> Flight | None:
        flight = self._flights.pop(ticket, None)
        self._telling.produced.discard(ticket)
        if flight is not None and flight.arm is not None:
            self._telling.pool(flight.arm.pool).leave(flight)
        return flight
