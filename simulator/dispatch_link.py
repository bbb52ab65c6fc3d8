"""A gateway's side of dispatch: `store.dispatch` in virtual time.

Whoever decides (`contact`) is told of every ticket in flight, and of all of them again when
it changes or forgets. Invariant: what a ticket holds is known to whoever decides, or is on
its way there, or will run out with a lease.
"""

from collections.abc import Callable, Iterable

import msgspec

from core.limits import LimitRules
from core.protocol import Load
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
    ReplicaView,
)
from simulator.clock import Clock
from simulator.contact import CALL_MS, Command, Contact
from simulator.dispatcher import ArmReply, Dispatcher, Outputs, PoolReply, PoolType, Valkey
from simulator.flights import Flight, PoolSide
from simulator.network import Network
from simulator.tasks import Process, Promise, sleep, within

RENEW_MS = 500
CHARGE_MS = 100
REPORT_MS = 50  # how soon a replica's report is passed on while tickets wait
TOUCH_MS = LimitRules().lease_ms // 3  # between rounds of charging that keep every ticket held


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
    ) -> None:
        self._gateway = gateway
        self._clock: Clock = gateway.clock
        self._contact = Contact(
            gateway,
            gateway_id,
            network=network,
            valkey=valkey,
            pool_type=pool_type,
            on_change=self._start_afresh,
        )
        self._flights: dict[str, Flight] = {}
        self._cancelling: set[str] = set()
        self._touched_ms = 0
        self._produced: dict[str, None] = {}  # tickets with output not yet charged
        self._side = PoolSide(gateway.clock)
        self._wake: Promise[None] = Promise(gateway.clock)
        gateway.spawn(self._keep_renewing())
        gateway.spawn(self._keep_charging())

    @property
    def is_ready(self) -> bool:
        """Whether it knows of any replica."""
        return bool(self._side.replicas)

    @property
    def held(self) -> Iterable[str]:
        """Tickets that were admitted and are not yet let go."""
        return self._flights

    @property
    def shared_since_ms(self) -> int | None:
        """Since when the shared dispatcher decides without a break; None when it does not."""
        return self._contact.shared_since_ms

    # A request's way.

    async def admit(self, asked: Admit) -> Admitted | LimitRefused:
        """Charge the tenant's limits and hold the ticket, or charge nothing."""
        flight = Flight(asked.ticket, asked.tenant)
        answer = await self._contact.ask(f"admit {asked.ticket}", lambda: _admit(asked))
        if isinstance(answer, Admitted):
            flight.admitted = True
            self._flights[asked.ticket] = flight
        return answer

    async def place(self, arm: Arm) -> Placed | Dropped:
        """Wait for a replica, at most until the deadline."""
        flight = self._flights[arm.ticket]
        waiter = self._side.enter(flight, arm)
        # A little longer, so that it is the dispatcher that says so.
        patience_ms = max(0, arm.deadline_ms - self._clock.now_ms) + CALL_MS
        late = Dropped(reason="expired")
        timer = self._clock.after(
            patience_ms, f"{arm.ticket} patience", lambda: waiter.resolve(late)
        )
        try:
            outcome = await self._arm_and_wait(arm, waiter)
        except Exception:
            self._leave(flight)
            raise
        finally:
            timer.cancel()
        if isinstance(outcome, Placed):
            self._side.settle(flight, outcome)
        elif outcome is late:
            self._leave(flight)
        else:
            self._side.leave(flight)
        return outcome

    def produced(self, ticket: str, tokens: int) -> None:
        """All its output so far."""
        self._flights[ticket].output_tokens = tokens
        self._produced[ticket] = None

    def finish(
        self, ticket: str, tenant: str, *, input_tokens: int, prefix_hashes: tuple[str, ...]
    ) -> None:
        """The engine's last word: everything held is free."""
        flight = self._let_go(ticket)
        output_tokens = flight.output_tokens if flight is not None else 0

        def at_tenant(dispatcher: Dispatcher) -> bool:
            return dispatcher.finish_tenant(
                tenant, ticket, input_tokens=input_tokens, output_total=output_tokens
            )

        def at_pool(name: str) -> Command[PoolReply]:
            return lambda dispatcher: dispatcher.finish_pool(
                name,
                ticket,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                prefix_hashes=prefix_hashes,
            )

        self._gateway.spawn(self._contact.ask(f"finish {ticket}", lambda: at_tenant))
        self._gateway.spawn(self._tell_pool(f"finish {ticket} in pool", at_pool))

    def cancel(self, ticket: str, tenant: str) -> None:
        """Give everything back."""
        self._let_go(ticket)

        def at_tenant(dispatcher: Dispatcher) -> bool:
            return dispatcher.cancel_tenant(tenant, ticket)

        self._gateway.spawn(self._contact.ask(f"cancel {ticket}", lambda: at_tenant))
        self._cancel_in_pool(ticket)

    # What the gateway knows.

    def observe(self, replica: str, load: Load) -> None:
        """Pass on a replica's report."""
        self._side.observe(replica, load)
        if self._side.is_waiting:
            self._clock.after(REPORT_MS, f"{self._gateway.name} report", self._renew_now)

    def set_replicas(self, replicas: tuple[ReplicaView, ...]) -> None:
        """The fleet as the registry has it now."""
        if self._side.replicas != replicas:
            self._side.replicas = replicas
            self._renew_now()

    # Waiting for a replica.

    async def _arm_and_wait(self, arm: Arm, waiter: Promise[Placed | Dropped]) -> Placed | Dropped:
        reply = await self._contact.ask(f"arm {arm.ticket}", lambda: self._arm(arm))
        self._hear(reply.pool)
        # A grant, in answer to a renew, may have been faster.
        if waiter.done or isinstance(reply.outcome, Queued):
            return await waiter
        return reply.outcome

    def _arm(self, arm: Arm) -> Command[ArmReply]:
        message = msgspec.structs.replace(arm, gateway=self._contact.name)
        return lambda dispatcher: dispatcher.arm(message)

    def _leave(self, flight: Flight) -> None:
        self._side.leave(flight)
        self._cancel_in_pool(flight.ticket)

    def _let_go(self, ticket: str) -> Flight | None:
        flight = self._flights.pop(ticket, None)
        self._produced.pop(ticket, None)
        if flight is not None:
            self._side.leave(flight)
        return flight

    # Telling whoever decides.

    async def _tell_pool(self, label: str, make: Callable[[str], Command[PoolReply]]) -> None:
        self._hear(await self._contact.ask(label, lambda: make(self._contact.name)))

    def _cancel_in_pool(self, ticket: str) -> None:
        def make(name: str) -> Command[PoolReply]:
            return lambda dispatcher: dispatcher.cancel_pool(name, ticket)

        async def cancel() -> None:
            await self._tell_pool(f"cancel {ticket} in pool", make)
            self._cancelling.discard(ticket)

        # The answers to other calls name it too until this one has arrived.
        if ticket not in self._cancelling:
            self._cancelling.add(ticket)
            self._gateway.spawn(cancel())

    def _renew_now(self) -> None:
        self._wake.resolve(None)

    async def _keep_renewing(self) -> None:
        while True:
            await within(self._clock, self._wake, RENEW_MS, f"{self._gateway.name} renew")
            self._wake = Promise(self._clock)
            if self._side.replicas or self._side.flights:
                await self._renew()

    async def _renew(self) -> None:
        told: list[Renew] = []

        def make() -> Command[Renewed]:
            told.append(self._side.renewal(self._contact.name))
            return _renew(told[-1])

        renewed = await self._contact.ask("renew", make)
        # An answer to another name's message is no answer to us.
        if told[-1].gateway == self._contact.name:
            self._take(told[-1], renewed)

    def _take(self, renew: Renew, renewed: Renewed) -> None:
        if renew.announces:
            self._side.epoch = renewed.epoch
        for grant in renewed.confirmed:
            self._obey(grant)
        self._hear(PoolReply(renewed.epoch, renewed.grants))
        if renewed.reannounce:
            self._announce()

    def _hear(self, reply: PoolReply) -> None:
        """Acknowledge grants: only a confirmed one is acted on."""
        for grant in reply.grants:
            if grant.ticket in self._side.flights:
                self._side.acks[grant.ticket] = None
                self._renew_now()
            else:
                self._cancel_in_pool(grant.ticket)
        if reply.epoch != self._side.epoch:
            self._announce()

    def _obey(self, grant: Grant) -> None:
        flight = self._side.flights.get(grant.ticket)
        if flight is not None and flight.waiter is not None and not flight.waiter.done:
            flight.placed = grant.outcome if isinstance(grant.outcome, Placed) else None
            flight.waiter.resolve(grant.outcome)

    def _announce(self) -> None:
        """Whoever decides has lost its memory, perhaps of the tenants' tickets too."""
        self._side.owes = True
        self._touched_ms = 0
        self._renew_now()

    def _start_afresh(self) -> None:
        """Tell everything in flight to whoever decides from now on, before anything else."""
        self._side.acks.clear()
        self._side.epoch, self._side.owes = "", True
        self._gateway.spawn(self._charge(list(self._flights)))
        self._gateway.spawn(self._renew())

    async def _keep_charging(self) -> None:
        while True:
            await sleep(self._clock, CHARGE_MS, f"{self._gateway.name} charge")
            names: Iterable[str] = self._produced
            if self._clock.now_ms - self._touched_ms >= TOUCH_MS:
                names, self._touched_ms = self._flights, self._clock.now_ms
            await self._charge(list(names))

    async def _charge(self, names: list[str]) -> None:
        self._produced.clear()
        outputs: Outputs = {}
        for flight in (self._flights[name] for name in names):
            total = Output(flight.ticket, flight.output_tokens)
            outputs[flight.tenant] = (*outputs.get(flight.tenant, ()), total)
        if outputs:
            await self._contact.ask("charge", lambda: _charge(outputs))


def _admit(asked: Admit) -> Command[Admitted | LimitRefused]:
    return lambda dispatcher: dispatcher.admit(asked)


def _charge(outputs: Outputs) -> Command[bool]:
    return lambda dispatcher: dispatcher.charge(outputs)


def _renew(message: Renew) -> Command[Renewed]:
    return lambda dispatcher: dispatcher.renew(message)
