"""A gateway process: one incarnation, its requests, and what it repeats.

Invariant: it never accepts a request before it knows the fleet, nor after its death.
"""

import msgspec

from core.tickets import ReplicaView
from simulator.bank import Bank
from simulator.books import Books, Volume
from simulator.control_plane import ControlPlane
from simulator.dispatch_link import DispatchLink
from simulator.dispatcher import PoolType, Valkey
from simulator.exchange import Exchange, ExchangeParts
from simulator.generation import Workers
from simulator.network import Network
from simulator.orders import Order, Orders
from simulator.tasks import Process, sleep

LEASE_MS = 5_000
VIEWS_INTERVAL_MS = 1_000
CHECKPOINT_INTERVAL_MS = 1_000
CALL_MS = 1_000


class GatewayParts(msgspec.Struct, frozen=True, kw_only=True):
    """What every life of every gateway is made with."""

    network: Network
    bank: Bank
    valkey: Valkey
    control_plane: ControlPlane
    workers: Workers
    orders: Orders
    pool_type: PoolType
    block_tokens: int


class Gateway(Process):
    """One incarnation."""

    def __init__(self, parts: GatewayParts, name: str, gateway_id: str, volume: Volume) -> None:
        super().__init__(parts.network.clock, name)
        self.gateway_id = gateway_id
        self.exchanges: dict[str, Exchange] = {}
        self._parts = parts
        self._network = parts.network
        self.link = DispatchLink(
            self,
            gateway_id,
            network=parts.network,
            valkey=parts.valkey,
            pool_type=parts.pool_type,
        )
        self.books = Books(self, parts.network, parts.bank, volume)
        self._exchange_parts = ExchangeParts(
            gateway=self,
            gateway_id=gateway_id,
            link=self.link,
            books=self.books,
            workers=parts.workers,
            orders=parts.orders,
            block_tokens=parts.block_tokens,
        )
        self.spawn(self._assert_lease_for_ever())
        self.spawn(self._read_views_for_ever())
        self.spawn(self._checkpoint_for_ever())

    @property
    def is_ready(self) -> bool:
        """Whether it may be sent requests."""
        return self.alive and self.link.is_ready

    def serve(self, order: Order) -> None:
        """Take a request."""
        assert self.is_ready
        self.exchanges[order.request_id] = Exchange(self._exchange_parts, order)

    def client_leaves(self, order: Order) -> None:
        """It closed its connection."""
        self.exchanges[order.request_id].client_leaves()

    def kill(self) -> None:
        """Its clients' connections break, and so do those to workers."""
        super().kill()
        for exchange in self.exchanges.values():
            exchange.die()
            if not exchange.order.over:
                self._parts.orders.orphan(exchange.order, self.clock.now_ms)

    async def _assert_lease_for_ever(self) -> None:
        bank = self._parts.bank
        while True:
            await self._network.call(
                self,
                bank,
                "lease",
                lambda: bank.assert_lease(self.gateway_id),
                timeout_ms=CALL_MS,
            )
            await sleep(self.clock, LEASE_MS // 4, f"{self.name} lease")

    async def _read_views_for_ever(self) -> None:
        while True:
            views: tuple[ReplicaView, ...] | None = await self._network.call(
                self,
                self._parts.bank,
                "views",
                self._parts.control_plane.views,
                timeout_ms=CALL_MS,
            )
            if views is not None:
                self.link.set_replicas(views)
            await sleep(self.clock, VIEWS_INTERVAL_MS, f"{self.name} views")

    async def _checkpoint_for_ever(self) -> None:
        while True:
            await sleep(self.clock, CHECKPOINT_INTERVAL_MS, f"{self.name} checkpoint")
            for request_id, exchange in list(self.exchanges.items()):
                if exchange.order.over:
                    del self.exchanges[request_id]
                    continue
                witness = exchange.witness()
                if witness is not None:
                    self.spawn(self.books.checkpoint(witness))
