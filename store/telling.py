"""What a gateway tells whoever decides: renewals of its pools, charges, and what it lets go of.

Nothing here waits for a replica (`store.dispatch`). Invariant: what a ticket holds is either
known to whoever decides, or on its way there, or will run out with a lease.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import NamedTuple, TypeVar

from core.tickets import Grant, Output, Placed, Renewed
from store.decider import Decider
from store.dispatch_backend import Backend, PoolReply
from store.dispatch_rules import DispatchRules, now_ms
from store.flights import Flight, PoolSide
from store.redis_client import RedisAwayError, RedisReplyError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Telling:
    """One gateway's. `flights` are its tickets, `pools` its sides of the pools they are in."""

    def __init__(self, redis_url: str, gateway: str, rules: DispatchRules) -> None:
        self._rules = rules
        self.decider = Decider(
            redis_url, gateway, rules, on_wake=self._wake, on_change=self._start_afresh
        )
        self.flights: dict[str, Flight] = {}
        self.pools: dict[str, PoolSide] = {}
        self.produced: set[str] = set()  # tickets with output not yet charged
        self._touched_ms = 0
        self._loops: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._strays: set[tuple[str, str]] = set()  # pool and ticket, being cancelled

    async def start(self) -> None:
        """Find out who decides, and keep it told."""
        await self.decider.start()
        self._run(self._keep_charging())

    async def close(self) -> None:
        """Stop; releases under way get a moment to leave. What is in flight ends by its lease."""
        await self.decider.settle()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._releases:
            await asyncio.wait(self._releases, timeout=self._rules.close_ms / 1000)
        await self.decider.close()

    def pool(self, name: str) -> PoolSide:
        """This gateway's side of it, which is renewed from now on."""
        side = self.pools.get(name)
        if side is None:
            side = self.pools[name] = PoolSide(name)
            self._run(self._keep_renewing(side))
        return side

    # What is let go of.

    async def pool_left(
        self, pool: PoolSide, call: Callable[[Backend], Awaitable[PoolReply]]
    ) -> None:
        """Tell the pool so, and hear what its answer brings along."""
        self.hear(pool, await self.decider.ask(call))

    async def tenant_left(self, call: Callable[[Backend], Awaitable[None]]) -> None:
        """Tell the tenant's limits so; no pool of ours was asked."""
        await self.decider.ask(call)

    async def cancel_pool(self, pool: PoolSide, ticket: str) -> None:
        """The pool is to forget the ticket; what the tenant holds stays."""
        await self.pool_left(pool, lambda b: b.cancel_pool(pool.name, self.decider.name, ticket))

    async def cancel(self, ticket: str, tenant: str, pool: str | None) -> None:
        """Everyone is to forget the ticket."""
        if pool is None:
            await self.decider.ask(lambda backend: backend.cancel_tenant(tenant, ticket))
            return

        def tell(backend: Backend) -> Awaitable[PoolReply]:
            return second(
                backend.cancel_tenant(tenant, ticket),
                backend.cancel_pool(pool, self.decider.name, ticket),
            )

        await self.pool_left(self.pool(pool), tell)

    def release(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Work that the cancellation of its caller must not stop."""
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._released)
        return task

    def _released(self, task: "asyncio.Task[None]") -> None:
        self._releases.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a release failed", exc_info=task.exception())

    # The loops.

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._loops.add(task)
        task.add_done_callback(self._loops.discard)

    async def _keep_renewing(self, pool: PoolSide) -> None:
        while True:
            try:
                async with asyncio.timeout(self._rules.renew_ms / 1000):
                    await pool.wake.wait()
            except TimeoutError:
                pass
            pool.wake.clear()
            if not pool.is_idle:
                await self._tell((), [pool])

    async def _keep_charging(self) -> None:
        while True:
            await asyncio.sleep(self._rules.charge_ms / 1000)
            names: Iterable[str] = self.produced
            if now_ms() - self._touched_ms >= self._rules.limits.lease_ms // 3:
                # Often enough that no ticket in flight is taken for abandoned.
                names = self.flights
                self._touched_ms = now_ms()
            await self._tell(names, [])

    async def _tell(self, names: Iterable[str], pools: Iterable[PoolSide]) -> None:
        """Tell what there is to tell of these tickets and pools, and take the answers."""
        try:
            charges = self._send_charges(names)
            renewals = [self._send_renewal(pool) for pool in pools]
        except RedisAwayError:
            self.decider.lost()
        else:
            await self._hear_out(charges, renewals)

    def _send_charges(self, names: Iterable[str]) -> list[Awaitable[None]]:
        tenants: dict[str, list[Output]] = {}
        for flight in (self.flights[name] for name in names):
            if flight.admitted:
                output = Output(flight.ticket, flight.output_tokens, flight.scopes)
                tenants.setdefault(flight.tenant, []).append(output)
        self.produced.clear()
        return [
            self.decider.backend.charge(tenant, tuple(batch))
            for tenant, outputs in tenants.items()
            for batch in _batches(outputs, self._rules.batch_max)
        ]

    def _send_renewal(self, pool: PoolSide) -> "_Renewal":
        announces = pool.owes
        messages = pool.renewals(self.decider.name, self._rules.batch_max)
        answers = [self.decider.backend.renew(message) for message in messages]
        return _Renewal(pool, self.decider.life, announces, answers)

    # The answers.

    async def _hear_out(
        self, charges: Iterable[Awaitable[None]], renewals: "Iterable[_Renewal]"
    ) -> None:
        """An answer that does not come is Valkey gone."""
        try:
            for charge in charges:
                await charge
            for renewal in renewals:
                self._take_renewal(renewal, [await answer for answer in renewal.answers])
        except RedisAwayError:
            self.decider.lost()
        except RedisReplyError:
            _log.exception("valkey refused a call")

    def _take_renewal(self, renewal: "_Renewal", replies: list[Renewed]) -> None:
        pool = renewal.pool
        if renewal.life != self.decider.life:
            return
        if renewal.announces:
            pool.epoch = replies[0].epoch
        for renewed in replies:
            for grant in renewed.confirmed:
                _obey(pool, grant)
            self.hear(pool, PoolReply(renewed.epoch, renewed.grants))
        pool.congestion_ms = replies[-1].congestion_ms
        if replies[-1].reannounce:
            self._announce(pool)

    def hear(self, pool: PoolSide, reply: PoolReply) -> None:
        """Acknowledge grants: only a confirmed one is acted on."""
        for grant in reply.grants:
            if grant.ticket in pool.flights:
                pool.acks[grant.ticket] = None
                pool.wake.set()
            else:
                self._cancel_stray(pool, grant.ticket)
        if reply.epoch != pool.epoch:
            self._announce(pool)

    def _cancel_stray(self, pool: PoolSide, ticket: str) -> None:
        """Once, however many replies list it; those over the bound will be listed again."""
        stray = (pool.name, ticket)
        if stray in self._strays or len(self._strays) >= self._rules.strays_max:
            return
        self._strays.add(stray)
        task = self.release(self.cancel_pool(pool, ticket))
        task.add_done_callback(lambda _: self._strays.discard(stray))

    def _announce(self, pool: PoolSide) -> None:
        """Whoever decides has lost its memory, perhaps of the tenants' tickets too."""
        pool.owes = True
        pool.wake.set()
        self._touched_ms = 0

    def _wake(self, message: bytes) -> None:
        """Another gateway's call made a grant for a ticket of ours."""
        side = self.pools.get(message.decode())
        if side is not None:
            side.wake.set()

    def _start_afresh(self) -> None:
        """Announce everything in flight to whoever decides from now on, before anything else."""
        charges = self._send_charges(self.flights)
        renewals = []
        for pool in self.pools.values():
            pool.acks.clear()
            pool.epoch, pool.owes = "", True
            if not pool.is_idle:
                renewals.append(self._send_renewal(pool))
        self.release(self._hear_out(charges, renewals))


class _Renewal(NamedTuple):
    """A renewal on its way: the messages of one moment, to whoever decided then."""

    pool: PoolSide
    life: int
    announces: bool
    answers: list[Awaitable[Renewed]]


def _obey(pool: PoolSide, grant: Grant) -> None:
    flight = pool.flights.get(grant.ticket)
    if flight is not None and flight.waiter is not None and not flight.waiter.done():
        flight.placed = grant.outcome if isinstance(grant.outcome, Placed) else None
        flight.waiter.set_result(grant.outcome)


async def second(one: Awaitable[None], other: Awaitable[T]) -> T:
    """Both calls, made already, in the order they were made; the answer of the second."""
    await one
    return await other


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
