"""All processes of one world: how they start, find each other, and die.

    crowd ─► gateways ─► Valkey (dispatch twin)
                 │  └──► Postgres (ledger) ◄── control plane ◄─┐ journals, beats
                 └─────► workers (scheduler, blocks) ──────────┘

Invariant: what outlives a process (disks, volumes, services) is kept here, under its name.
"""

from collections.abc import Iterator

from core.ids import ENTROPY_BYTES, boot_id, gateway_id
from core.protocol import Generate
from simulator.bank import Bank
from simulator.books import Volume
from simulator.clock import Clock
from simulator.config import BOASTS, Seeded, WorldConfig, engine_config
from simulator.control_plane import ControlPlane
from simulator.dispatcher import Valkey
from simulator.engine import StepTimes
from simulator.gateway import LEASE_MS, Gateway, GatewayParts
from simulator.invariants import Invariants
from simulator.journal import Disk
from simulator.network import Network, Stream
from simulator.orders import Order, Orders
from simulator.service_rules import InFlight
from simulator.tasks import Process, Promise
from simulator.worker import Worker, WorkerParts

ABORT_CALL_MS = 1_000


class Cast:
    """Implements `Workers` for gateways and `Door` for tenants."""

    def __init__(self, config: WorldConfig, clock: Clock, seeded: Seeded, orders: Orders) -> None:
        self._config = config
        self._clock = clock
        self._seeded = seeded
        self._orders = orders
        self._dice = seeded.stream("cast")
        drawn, boast = engine_config(self._dice), self._dice.choice(BOASTS)
        self.engine_config = config.engine or drawn
        self._told_kv_blocks = int(self.engine_config.kv_blocks * (1.0 if config.engine else boast))
        self.network = Network(clock, seeded.stream("network"))
        self.bank = Bank(clock, config.book_type, LEASE_MS)
        self.valkey = Valkey(clock, config.pool_type)
        self.control_plane = ControlPlane(
            clock, self.network, self.bank, seeded.stream("control plane")
        )
        self.workers: dict[str, Worker] = {}
        self.gateways: dict[str, Gateway] = {}
        self.dead_gateways: set[str] = set()  # incarnations
        self.invariants = Invariants(
            clock,
            orders,
            self.bank,
            self.valkey.dispatcher,
            workers=self.workers.values,
            in_flight=self._in_flight,
            all_goes_well=not config.faults,
        )
        self.preemptions_before = 0  # of workers that died
        self._failure_chance = 0.0  # of an engine's step
        self._lives = 0
        self._disks = {f"worker {n}": Disk() for n in range(config.workers)}
        self._volumes = {f"gateway {n}": Volume() for n in range(config.gateways)}
        self._door: dict[str, Gateway] = {}  # request: who took it
        for name in self._disks:
            self.start_worker(name)
        for name in self._volumes:
            self.start_gateway(name)

    # Between processes.

    def connect(self, gateway: Process, replica: str, request: Generate) -> Promise[Stream | None]:
        """See `Workers`."""
        worker = self.workers[replica]
        name = f"generate {request.request_id}:{request.attempt}"
        return self.network.connect(
            gateway, worker, name, lambda stream: worker.generate(request, stream)
        )

    def abort(self, gateway: Process, replica: str, request_id: str, attempt: int) -> None:
        """See `Workers`."""
        worker = self.workers[replica]
        self.network.call(
            gateway,
            worker,
            f"abort {request_id}:{attempt}",
            lambda: worker.abort((request_id, attempt)),
            timeout_ms=ABORT_CALL_MS,
        )

    def enter(self, order: Order) -> bool:
        """See `Door`."""
        ready = [gateway for gateway in self.gateways.values() if gateway.is_ready]
        if not ready:
            return False
        gateway = self._dice.choice(ready)
        self._orders.add(order)
        self._door[order.request_id] = gateway
        gateway.serve(order)
        return True

    def leave(self, order: Order) -> None:
        """See `Door`."""
        self._door[order.request_id].client_leaves(order)

    # Lives.

    def start_worker(self, name: str) -> None:
        """A new life on the same machine."""
        self._lives += 1
        parts = WorkerParts(
            clock=self._clock,
            network=self.network,
            registry=self.control_plane,
            registry_process=self.control_plane,
            config=self.engine_config,
            told_kv_blocks=self._told_kv_blocks,
            pool_type=self._config.block_pool_type,
            times=StepTimes(),
            dice=self._seeded.stream(f"{name} {self._lives}"),
            watch=self.invariants,
        )
        boot = boot_id(self._dice.randbytes(ENTROPY_BYTES))
        worker = self.workers[name] = Worker(parts, name, boot, self._disks[name])
        worker.engine.failure_chance = self._failure_chance

    def start_gateway(self, name: str) -> None:
        """A new incarnation on the same volume."""
        parts = GatewayParts(
            network=self.network,
            bank=self.bank,
            valkey=self.valkey,
            control_plane=self.control_plane,
            workers=self,
            orders=self._orders,
            pool_type=self._config.pool_type,
            block_tokens=self.engine_config.block_tokens,
        )
        incarnation = gateway_id(self._dice.randbytes(ENTROPY_BYTES))
        self.gateways[name] = Gateway(parts, name, incarnation, self._volumes[name])

    def kill_worker(self, name: str, *, power: bool) -> None:
        """With `power` its machine dies too, and comes back with what its disk had synced."""
        worker = self.workers[name]
        self.preemptions_before += worker.engine.scheduler.num_preemptions
        if not power:
            worker.kill()
            return
        for request_id, attempt in worker.lose_power():
            self._orders.all[request_id].attempts[attempt].journal_survived = False

    def kill_gateway(self, name: str) -> None:
        """Its requests are left to the sweeper."""
        gateway = self.gateways[name]
        gateway.kill()
        self.dead_gateways.add(gateway.gateway_id)

    def fail_steps(self, chance: float) -> None:
        """Of every engine, present and future."""
        self._failure_chance = chance
        for worker in self.workers.values():
            worker.engine.failure_chance = chance

    def stop(self) -> None:
        """The world is over."""
        for process in self._processes():
            process.kill()

    def unsaid(self) -> str:
        """What somebody still has to tell somebody; empty when nothing is left."""
        for worker in self.workers.values():
            if not worker.told_everything:
                return f"{worker.name}'s journal"
        for name, volume in self._volumes.items():
            if volume.records:
                return f"{name}'s spool"
        return ""

    def _in_flight(self) -> Iterator[InFlight]:
        for gateway in self.gateways.values():
            since_ms = gateway.link.shared_since_ms
            if gateway.alive and since_ms is not None:
                yield from (InFlight(ticket, since_ms) for ticket in gateway.link.held)

    def _processes(self) -> Iterator[Process]:
        yield from self.gateways.values()
        yield from self.workers.values()
        yield self.control_plane
