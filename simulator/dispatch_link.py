"""A gateway's side of dispatch: the shared dispatcher while it answers, its own twin while not.

    held      tickets armed and not let go: waiting for a replica, or placed on one
    acks      grants seen and not confirmed; acted on when they come back confirmed
    closings  finishes and cancels not acknowledged yet, repeated until they are

Invariant: a ticket is let go of once, and every dispatcher that may know it hears of that.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from core.protocol import Load
from core.tickets import (
    Admit,
    Admitted,
    Arm,
    Dropped,
    Grant,
    LimitRefused,
    Placed,
    Renew,
    Renewed,
    ReplicaView,
)
from simulator.clock import Clock
from simulator.dispatcher import Dispatcher, Outputs, PoolType, Valkey
from simulator.network import Network
from simulator.tasks import Process, Promise, sleep
from simulator.worker import POOL

R = TypeVar("R")

RENEW_INTERVAL_MS = 500
CHARGE_INTERVAL_MS = 100
CALL_MS = 250
TRIES = 2


class TicketWatch(Protocol):
    """Who judges the limits."""

    def admitted(self, asked: Admit, life: int) -> None:
        """By the shared dispatcher, in that life of its memory."""

    def touched(self, tickets: list[str]) -> None:
        """The shared dispatcher has just heard that these are held."""

    def let_go(self, ticket: str) -> None:
        """Its request is over."""


class _Held(msgspec.Struct, eq=False):
    arm: Arm
    answer: Promise[Placed | Dropped]
    placed: Placed | None = None


class DispatchLink:
    """One gateway incarnation's."""

    def __init__(
        self,
        gateway: Process,
        gateway_id: str,
        *,
        network: Network,
        valkey: Valkey,
        pool_type: PoolType,
        watch: TicketWatch,
    ) -> None:
        self.degraded = False
        self.replicas: tuple[ReplicaView, ...] = ()
        self.closings: dict[str, Callable[[Dispatcher], bool]] = {}
        self._gateway = gateway
        self._gateway_id = gateway_id
        self._clock: Clock = gateway.clock
        self._network = network
        self._valkey = valkey
        self._watch = watch
        self._local = Dispatcher(gateway.clock, pool_type)
        self._epoch = ""
        self._tenants: dict[str, str] = {}  # of every ticket not let go
        self._admitted: dict[str, None] = {}  # to be kept held; none before it was admitted
        self._held: dict[str, _Held] = {}
        self._acks: dict[str, None] = {}
        self._disputed: dict[str, None] = {}  # the dispatcher has them elsewhere than we do
        self._loads: dict[str, Load] = {}
        self._outputs: dict[str, int] = {}
        self._uncharged: dict[str, None] = {}
        gateway.spawn(self._renew_for_ever())
        gateway.spawn(self._charge_for_ever())

    async def admit(self, asked: Admit) -> Admitted | LimitRefused:
        """Charge the tenant, or say which limit forbids it."""
        self._tenants[asked.ticket] = asked.tenant
        for _ in range(TRIES):
            if self.degraded:
                break
            answer = await self._call(f"admit {asked.ticket}", lambda d: d.admit(asked))
            if isinstance(answer, Admitted):
                self._admitted[asked.ticket] = None
                self._watch.admitted(asked, self._valkey.dispatcher.life)
            if answer is not None:
                return answer
        self._lose_contact()
        self._admitted[asked.ticket] = None
        return self._local.admit(asked)

    def place(self, arm: Arm) -> Promise[Placed | Dropped]:
        """Ask for a replica: at once, from the queue, or not at all."""
        held = self._held[arm.ticket] = _Held(arm, Promise(self._clock))
        self._acks.pop(arm.ticket, None)
        self._gateway.spawn(self._arm(held))
        return held.answer

    def produced(self, ticket: str, tokens: int) -> None:
        """All its output so far."""
        if ticket in self._tenants:
            self._outputs[ticket] = tokens
            self._uncharged[ticket] = None

    def observe(self, replica: str, load: Load) -> None:
        """The newest report goes with the next renew."""
        known = self._loads.get(replica)
        if known is None or known.boot_id != load.boot_id or known.seq < load.seq:
            self._loads[replica] = load

    def finish(
        self, ticket: str, *, input_tokens: int, output_tokens: int, prefix_hashes: tuple[str, ...]
    ) -> None:
        """An engine has worked for it."""
        tenant = self._tenants[ticket]
        self._close(
            ticket,
            lambda dispatcher: dispatcher.finish(
                ticket,
                tenant,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                prefix_hashes=prefix_hashes,
            ),
        )

    def cancel(self, ticket: str) -> None:
        """Nothing was done for it."""
        tenant = self._tenants[ticket]
        self._close(ticket, lambda dispatcher: dispatcher.cancel(ticket, tenant))

    # Placing.

    async def _arm(self, held: _Held) -> None:
        ticket = held.arm.ticket
        failures = 0
        while self._held.get(ticket) is held and not held.answer.done:
            if self.degraded:
                answer = self._local.arm(held.arm)
            else:
                asked = await self._call(f"arm {ticket}", lambda d: d.arm(held.arm))
                if asked is None:
                    failures += 1
                    if failures == TRIES:
                        self._lose_contact()
                        return
                    continue
                answer = asked
            if isinstance(answer, Placed | Dropped) and self._held.get(ticket) is held:
                self._decide(held, answer)
            return

    def _decide(self, held: _Held, outcome: Placed | Dropped) -> None:
        if held.placed is not None:
            if outcome != held.placed:
                self._disputed[held.arm.ticket] = None
            return
        if isinstance(outcome, Placed):
            held.placed = outcome
        held.answer.resolve(outcome)

    # What is repeated.

    async def _renew_for_ever(self) -> None:
        while True:
            await self._renew()
            await sleep(self._clock, RENEW_INTERVAL_MS, f"{self._gateway.name} renew")

    async def _renew(self, *, announces: bool = False) -> None:
        if self.degraded:
            self._renew_locally()
        for _ in range(TRIES):
            disputed = [self._as_held(name) for name in self._disputed if name in self._held]
            held = self._all_held() if announces else tuple(disputed)
            renew = self._message(self._epoch, held, announces=announces)
            answer = await self._say(renew)
            if answer is not None:
                self._disputed.clear()
                self._hear(renew, answer)
                return
            if self.degraded:
                return
        self._lose_contact()

    def _say(self, renew: Renew) -> Promise[Renewed | None]:
        return self._call("renew", lambda d: d.renew(renew))

    def _message(
        self, epoch: str, held: tuple[tuple[Arm, Placed | None], ...], *, announces: bool = False
    ) -> Renew:
        return Renew(
            gateway=self._gateway_id,
            pool=POOL,
            epoch=epoch,
            replicas=self.replicas,
            loads=tuple(self._loads.items()),
            acks=tuple(self._acks),
            held=held,
            announces=announces,
            outputs=tuple(self._outputs.items()),
        )

    def _all_held(self) -> tuple[tuple[Arm, Placed | None], ...]:
        return tuple(map(self._as_held, self._held))

    def _as_held(self, ticket: str) -> tuple[Arm, Placed | None]:
        held = self._held[ticket]
        return held.arm, held.placed

    def _hear(self, renew: Renew, answer: Renewed) -> None:
        is_back, self.degraded = self.degraded, False
        if is_back:
            self._local.wipe()
        is_new, self._epoch = answer.epoch != self._epoch, answer.epoch
        for name in renew.acks:
            self._acks.pop(name, None)
        for grant in answer.confirmed:
            if (held := self._held.get(grant.ticket)) is not None:
                self._decide(held, grant.outcome)
        self._see(answer.grants)
        if not renew.announces and (is_back or is_new or answer.reannounce):
            self._gateway.spawn(self._renew(announces=True))
        elif self._acks:
            self._gateway.spawn(self._renew())

    def _see(self, grants: tuple[Grant, ...]) -> None:
        for grant in grants:
            held = self._held.get(grant.ticket)
            if held is None:
                # Let go of here, and not known to be there: say so again.
                if grant.ticket not in self.closings:
                    self._gateway.spawn(self._call_off(grant.ticket))
                continue
            self._acks[grant.ticket] = None
            if isinstance(grant.outcome, Dropped) or held.placed is not None:
                self._decide(held, grant.outcome)

    def _renew_locally(self) -> None:
        """Our own twin knows all that we hold, and cannot change its mind in between."""
        message = self._message("", self._all_held(), announces=True)
        for grant in self._local.renew(message).grants:
            if (held := self._held.get(grant.ticket)) is not None:
                self._decide(held, grant.outcome)

    async def _call_off(self, ticket: str) -> None:
        await self._call(f"call off {ticket}", lambda d: d.cancel(ticket, ""))

    async def _charge_for_ever(self) -> None:
        rounds = 0
        while True:
            await sleep(self._clock, CHARGE_INTERVAL_MS, f"{self._gateway.name} charge")
            rounds += 1
            touches = rounds % (RENEW_INTERVAL_MS // CHARGE_INTERVAL_MS) == 0
            names = list(self._admitted) if touches else list(self._uncharged)
            if names:
                await self._charge(names)

    async def _charge(self, names: list[str]) -> None:
        outputs: Outputs = {}
        for name in names:
            self._uncharged.pop(name, None)
            if (tenant := self._tenants.get(name)) is not None:
                total = (name, self._outputs.get(name, 0))
                outputs[tenant] = (*outputs.get(tenant, ()), total)
        if self.degraded:
            self._local.charge(outputs)
        elif await self._call("charge", lambda d: d.charge(outputs)) is not None:
            self._watch.touched(names)

    # Letting go, and losing contact.

    def _close(self, ticket: str, command: Callable[[Dispatcher], bool]) -> None:
        self._watch.let_go(ticket)
        del self._tenants[ticket]
        self._held.pop(ticket, None)
        self._outputs.pop(ticket, None)
        for names in (self._admitted, self._acks, self._disputed, self._uncharged):
            names.pop(ticket, None)
        if self.degraded:
            command(self._local)
        self.closings[ticket] = command
        self._gateway.spawn(self._send_closing(ticket, command))

    async def _send_closing(self, ticket: str, command: Callable[[Dispatcher], bool]) -> None:
        while await self._call(f"close {ticket}", command) is None:
            await sleep(self._clock, RENEW_INTERVAL_MS, f"{self._gateway.name} close again")
        del self.closings[ticket]

    def _lose_contact(self) -> None:
        if not self.degraded:
            self.degraded = True
            self._local.wipe()
            self._renew_locally()

    def _call(self, name: str, command: Callable[[Dispatcher], R]) -> Promise[R | None]:
        dispatcher = self._valkey.dispatcher
        return self._network.call(
            self._gateway,
            self._valkey,
            name,
            lambda: command(dispatcher),
            timeout_ms=CALL_MS,
            ordered=True,
        )
