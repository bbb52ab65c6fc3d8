"""A gateway's side of dispatch: its tickets in flight, and the word it keeps with Valkey.

`RemoteDispatch` decides for everyone. While Valkey is away `LocalDispatch` decides for this
process, and when it is back everything in flight is announced to it under a new name: the
old name's lease runs out, and with it all that ended in between.

The invariant: what a ticket holds is either known to whoever decides, or on its way there,
or will run out with a lease.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from core.dispatch import PoolRules
from core.limits import LimitRules
from core.protocol import Load
from core.tickets import (
    Admit,
    Admitted,
    Arm,
    Dropped,
    Grant,
    Headroom,
    LimitRefused,
    Limits,
    Placed,
    Queued,
    Renewed,
    ReplicaView,
    Stale,
)
from store.dispatch_audit import DispatchAudit, audit
from store.dispatch_backend import ArmReply, Backend, PoolReply
from store.flights import Flight, PoolSide
from store.keys import wake_channel
from store.local_dispatch import LocalDispatch
from store.redis_client import RedisAwayError, RedisClient, RedisReplyError
from store.remote_dispatch import RemoteDispatch
from store.scripts import dispatch_functions
from store.versions import push_versions

__all__ = ["Dispatch", "DispatchAudit", "DispatchRules", "audit"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class DispatchRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one gateway's side, and the rules that decisions go by."""

    renew_ms: int = 500
    charge_ms: int = 100
    report_ms: int = 50  # how soon a replica's report is passed on while tickets wait
    call_timeout_ms: int = 1_000
    in_flight_max: int = 16_384  # calls unanswered
    batch_max: int = 256  # tickets told of in one call
    strays_max: int = 64  # cancels under way of tickets nobody here knows
    tenants_remembered_max: int = 10_000  # whose headroom is kept for when Valkey is away
    close_ms: int = 2_000
    alone_ms: int = 250  # at least, once Valkey failed: one that comes and goes is no help
    pool: PoolRules = PoolRules()
    limits: LimitRules = LimitRules()


class Dispatch:
    """One for each gateway incarnation; `gateway` is its id, and holds no bar and no tilde."""

    def __init__(self, redis_url: str, gateway: str, rules: DispatchRules | None = None) -> None:
        assert not set("|~") & set(gateway)
        self._rules = rules or DispatchRules()
        self._gateway = gateway
        self._lives = 1
        functions = dispatch_functions(self._rules.pool, self._rules.limits)
        self._client = RedisClient(
            redis_url,
            libraries=[functions.library],
            timeout_ms=self._rules.call_timeout_ms,
            in_flight_max=self._rules.in_flight_max,
            channels=lambda: (wake_channel(self._name),),
            on_message=self._wake,
            on_lost=self._go_local,
        )
        self._remote = RemoteDispatch(self._client, functions)
        self._local: LocalDispatch | None = None
        self._closing = False
        self._flights: dict[str, Flight] = {}
        self._pools: dict[str, PoolSide] = {}
        self._produced: set[str] = set()  # tickets with output not yet charged
        self._headrooms: OrderedDict[str, _Remembered] = OrderedDict()
        self._touched_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._strays: set[tuple[str, str]] = set()  # pool and ticket, being cancelled

    @property
    def degraded(self) -> bool:
        """Whether Valkey is away, so that this process decides alone."""
        return self._local is not None

    async def start(self) -> None:
        """Connect; when that takes longer than a call may, begin without Valkey."""
        self._client.start()
        try:
            async with asyncio.timeout(self._rules.call_timeout_ms / 1000):
                await self._client.connected.wait()
        except TimeoutError:
            self._go_local()
        self._run(self._keep_charging())

    async def close(self) -> None:
        """Stop; releases under way get a moment to leave. What is in flight ends by its lease."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._releases:
            await asyncio.wait(self._releases, timeout=self._rules.close_ms / 1000)
        await self._client.close()

    # A request's way.

    async def admit(self, a: Admit) -> Admitted | LimitRefused | Stale:
        """Charge the tenant's limits and hold the ticket, or charge nothing."""
        try:
            answer = await self._ask(lambda backend: backend.admit(a))
        except BaseException:
            # The call may have got through, or may yet.
            self._release(self._tell_cancel(a.ticket, a.tenant, None))
            raise
        if isinstance(answer, Admitted):
            flight = self._flights.setdefault(a.ticket, Flight(a.ticket, a.tenant))
            flight.admitted = True
        if not isinstance(answer, Stale):
            self._remember(a.tenant, a.limits, answer.headroom)
        return answer

    async def place(self, arm: Arm) -> Placed | Dropped:
        """Wait for a replica, at most until the deadline. Cancelling leaves the queue."""
        pool = self._pool(arm.pool)
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
            self._produced.add(ticket)

    async def finish(
        self,
        *,
        ticket: str,
        pool: str,
        tenant: str,
        replica: str,
        actual_input_tokens: int,
        prefix_hashes: tuple[str, ...],
    ) -> None:
        """The engine's last word: everything held is free. Cancelling does not undo it."""
        flight = self._let_go(ticket)
        produced = flight.output_tokens if flight is not None else 0
        _log.debug("finished", extra={"facts": {"ticket": ticket, "replica": replica}})

        def tell(backend: Backend) -> Awaitable[PoolReply]:
            tenant_told = backend.finish_tenant(
                tenant, ticket, input_tokens=actual_input_tokens, output_total=produced
            )
            pool_told = backend.finish_pool(
                pool,
                self._name,
                ticket,
                input_tokens=actual_input_tokens,
                output_tokens=produced,
                prefix_hashes=prefix_hashes,
            )
            return _second(tenant_told, pool_told)

        await asyncio.shield(self._release(self._tell_pool(self._pool(pool), tell)))

    async def cancel(self, *, ticket: str, pool: str | None, tenant: str) -> None:
        """Give everything back. Idempotent; cancelling this call does not undo it."""
        self._let_go(ticket)
        await asyncio.shield(self._release(self._tell_cancel(ticket, tenant, pool)))

    # What the gateway knows.

    def observe(self, pool: str, replica: str, load: Load) -> None:
        """Pass on a replica's report."""
        side = self._pool(pool)
        side.observe(replica, load)
        if side.is_waiting:
            side.wake_within(self._rules.report_ms / 1000)

    def set_replicas(self, pool: str, replicas: tuple[ReplicaView, ...]) -> None:
        """The pool's replicas as the registry has them now."""
        side = self._pool(pool)
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
        await push_versions(self._client, tenants=tenants, keys=keys, routes=routes)

    # Waiting for a replica.

    async def _arm_and_wait(
        self, pool: PoolSide, arm: Arm, waiter: "asyncio.Future[Placed | Dropped]"
    ) -> Placed | Dropped:
        def call(backend: Backend) -> Awaitable[ArmReply]:
            return backend.arm(msgspec.structs.replace(arm, gateway=self._name))

        reply = await self._ask(call)
        self._hear(pool, reply.pool)
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
        self._release(self._tell_cancel_pool(pool, flight.ticket))

    def _forget(self, pool: PoolSide, flight: Flight) -> None:
        """Not in the pool any more; what the tenant holds, if anything, stays."""
        pool.leave(flight)
        if not flight.admitted:
            self._let_go(flight.ticket)

    def _let_go(self, ticket: str) -> Flight | None:
        flight = self._flights.pop(ticket, None)
        self._produced.discard(ticket)
        if flight is not None and flight.arm is not None:
            self._pool(flight.arm.pool).leave(flight)
        return flight

    # Telling whoever decides.

    @property
    def _name(self) -> str:
        """This gateway's name in its present life: another after each time without Valkey."""
        return self._gateway if self._lives == 1 else f"{self._gateway}~{self._lives}"

    @property
    def _backend(self) -> Backend:
        return self._local if self._local is not None else self._remote

    async def _ask(self, call: Callable[[Backend], Awaitable[T]]) -> T:
        """The answer of whoever decides; when Valkey fails, of this process."""
        if self._local is None:
            try:
                return await call(self._remote)
            except RedisAwayError:
                self._go_local()
        return await call(self._backend)

    async def _tell_pool(
        self, pool: PoolSide, call: Callable[[Backend], Awaitable[PoolReply]]
    ) -> None:
        self._hear(pool, await self._ask(call))

    async def _tell_cancel_pool(self, pool: PoolSide, ticket: str) -> None:
        await self._tell_pool(pool, lambda b: b.cancel_pool(pool.name, self._name, ticket))

    async def _tell_cancel(self, ticket: str, tenant: str, pool: str | None) -> None:
        if pool is None:
            await self._ask(lambda backend: backend.cancel_tenant(tenant, ticket))
            return

        def tell(backend: Backend) -> Awaitable[PoolReply]:
            return _second(
                backend.cancel_tenant(tenant, ticket),
                backend.cancel_pool(pool, self._name, ticket),
            )

        await self._tell_pool(self._pool(pool), tell)

    def _release(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
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
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pool(self, name: str) -> PoolSide:
        side = self._pools.get(name)
        if side is None:
            side = self._pools[name] = PoolSide(name)
            self._run(self._keep_renewing(side))
        return side

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
            names: Iterable[str] = self._produced
            if now_ms() - self._touched_ms >= self._rules.limits.lease_ms // 3:
                # Often enough that no ticket in flight is taken for abandoned.
                names = self._flights
                self._touched_ms = now_ms()
            await self._tell(names, [])

    async def _tell(self, names: Iterable[str], pools: Iterable[PoolSide]) -> None:
        """Tell what there is to tell of these tickets and pools, and take the answers."""
        try:
            charges = self._send_charges(names)
            renewals = [self._send_renewal(pool) for pool in pools]
        except RedisAwayError:
            self._go_local()
        else:
            await self._hear_out(charges, renewals)

    def _send_charges(self, names: Iterable[str]) -> list[Awaitable[None]]:
        tenants: dict[str, list[tuple[str, int]]] = {}
        for flight in (self._flights[name] for name in names):
            if flight.admitted:
                tenants.setdefault(flight.tenant, []).append((flight.ticket, flight.output_tokens))
        self._produced = set()
        return [
            self._backend.charge(tenant, tuple(batch))
            for tenant, outputs in tenants.items()
            for batch in _batches(outputs, self._rules.batch_max)
        ]

    def _send_renewal(self, pool: PoolSide) -> "_Renewal":
        announces = pool.owes
        messages = pool.renewals(self._name, self._rules.batch_max)
        answers = [self._backend.renew(message) for message in messages]
        return _Renewal(pool, self._lives, announces, answers)

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
            self._go_local()
        except RedisReplyError:
            _log.exception("valkey refused a call")

    def _take_renewal(self, renewal: "_Renewal", replies: list[Renewed]) -> None:
        pool = renewal.pool
        if renewal.life != self._lives:
            return
        if renewal.announces:
            pool.epoch = replies[0].epoch
        for renewed in replies:
            for grant in renewed.confirmed:
                self._obey(pool, grant)
            self._hear(pool, PoolReply(renewed.epoch, renewed.grants))
        if replies[-1].reannounce:
            self._announce(pool)

    def _hear(self, pool: PoolSide, reply: PoolReply) -> None:
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
        task = self._release(self._tell_cancel_pool(pool, ticket))
        task.add_done_callback(lambda _: self._strays.discard(stray))

    def _announce(self, pool: PoolSide) -> None:
        """Whoever decides has lost its memory, perhaps of the tenants' tickets too."""
        pool.owes = True
        pool.wake.set()
        self._touched_ms = 0

    def _obey(self, pool: PoolSide, grant: Grant) -> None:
        flight = pool.flights.get(grant.ticket)
        if flight is not None and flight.waiter is not None and not flight.waiter.done():
            flight.placed = grant.outcome if isinstance(grant.outcome, Placed) else None
            flight.waiter.set_result(grant.outcome)

    def _wake(self, message: bytes) -> None:
        """Another gateway's call made a grant for a ticket of ours."""
        side = self._pools.get(message.decode())
        if side is not None:
            side.wake.set()

    # When Valkey is away, and when it is back.

    def _go_local(self) -> None:
        if self._local is not None or self._closing:
            return
        _log.warning("valkey is away: admitting and placing alone")
        self._lives += 1
        self._local = LocalDispatch(self._rules.pool, self._rules.limits, now_ms)
        for tenant, known in self._headrooms.items():
            self._local.remember(tenant, known.limits, known.headroom, known.at_ms)
        self._client.drop("it failed a call")
        self._start_afresh()
        self._run(self._come_back())

    async def _come_back(self) -> None:
        await asyncio.sleep(self._rules.alone_ms / 1000)
        await self._client.connected.wait()
        _log.warning("valkey is back")
        self._local = None
        try:
            self._start_afresh()
        except RedisAwayError:
            self._go_local()

    def _start_afresh(self) -> None:
        """Announce everything in flight to whoever decides from now on, before anything else."""
        charges = self._send_charges(self._flights)
        renewals = []
        for pool in self._pools.values():
            pool.acks.clear()
            pool.epoch, pool.owes = "", True
            if not pool.is_idle:
                renewals.append(self._send_renewal(pool))
        self._release(self._hear_out(charges, renewals))

    def _remember(self, tenant: str, limits: Limits, headroom: Headroom) -> None:
        self._headrooms[tenant] = _Remembered(limits, headroom, now_ms())
        self._headrooms.move_to_end(tenant)
        if len(self._headrooms) > self._rules.tenants_remembered_max:
            self._headrooms.popitem(last=False)


class _Remembered(NamedTuple):
    """A tenant's limits as last answered."""

    limits: Limits
    headroom: Headroom
    at_ms: int


class _Renewal(NamedTuple):
    """A renewal on its way: the messages of one moment, to whoever decided then."""

    pool: PoolSide
    life: int
    announces: bool
    answers: list[Awaitable[Renewed]]


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


async def _second(first: Awaitable[None], second: Awaitable[T]) -> T:
    await first
    return await second


def _batches(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
