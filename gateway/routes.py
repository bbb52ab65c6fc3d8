"""The last routing view this gateway has read: the one mutable place that routing reads from."""

from core.errors import Refusal
from core.pricing import PriceTable
from core.registry import RoutingView
from core.tenancy import Tenant
from core.tickets import ReplicaView
from gateway.auth import Identity
from gateway.conversation import ModelCard
from gateway.route_index import Route, RouteIndex
from gateway.routing import is_sold, not_priced, output_limit


class Routes:
    """Empty until the first view. Times are of one monotonic clock, in seconds."""

    def __init__(self, region: str, *, output_tokens_max: int, no_replica_s: float) -> None:
        self.output_tokens_max = output_tokens_max
        self._no_replica_s = no_replica_s
        self.view = RoutingView(
            region=region, version=0, models=(), prices=PriceTable(()), replicas={}
        )
        self.index = RouteIndex(self.view)
        self.read_s = float("-inf")
        self._ready_s: dict[str, float] = {}  # when a pool last had a ready replica
        self._told: frozenset[str] = frozenset()  # pools in the last announcement

    def update(self, view: RoutingView, read_s: float) -> None:
        """Route by this view from now on."""
        if view.tables is not self.view.tables or view.models is not self.view.models:
            self.index = RouteIndex(view)
        self.view = view
        self.read_s = read_s
        for pool, replicas in view.replicas.items():
            if pool not in self._ready_s or any(replica.ready for replica in replicas):
                self._ready_s[pool] = read_s

    def deserted(self, pool: str) -> bool:
        """Whether nobody has been ready there for so long that waiting is no use."""
        return self.read_s - self._ready_s.get(pool, self.read_s) > self._no_replica_s

    def announcement(self) -> dict[str, tuple[ReplicaView, ...]]:
        """Replicas by pool, as the dispatcher is to have them from now on.

        None for a pool that has left the view, nor for a deserted one, so that its queue ends.
        """
        pools = frozenset(self.view.replicas)
        told, self._told = self._told, pools
        return {
            pool: () if self.deserted(pool) else self.replicas(pool)
            for pool in sorted(pools | told)
        }

    def replicas(self, pool: str) -> tuple[ReplicaView, ...]:
        """All of a pool's replicas, ready or not."""
        return self.view.replicas.get(pool, ())

    def can_resume(self, pool: str, replica: str) -> bool:
        """Whether this replica takes an answer that another one began."""
        return any(r.can_resume for r in self.replicas(pool) if r.replica == replica)

    @property
    def ready_replicas(self) -> int:
        """Replicas that take work now, in all pools."""
        return sum(r.ready for replicas in self.view.replicas.values() for r in replicas)

    @property
    def versions(self) -> frozenset[str]:
        """Of ours, that some name leads to."""
        return frozenset(model.version for model in self.view.models)

    def find(self, name: str, identity: Identity, at_ms: int) -> Route | Refusal:
        """What this name leads the caller to, if it may use it now."""
        found = self.index.find(name, identity.tenant, identity.key)
        if isinstance(found, Refusal) or self._sells((name, found.name), identity.tenant, at_ms):
            return found
        return not_priced(name)

    def cards(self, identity: Identity, at_ms: int) -> tuple[ModelCard, ...]:
        """What a caller may know, the newest model first."""
        cards = [
            self.card(name, route)
            for name, route in self.index.names(identity.tenant, identity.key)
            if self._sells((name, route.name), identity.tenant, at_ms)
        ]
        return tuple(sorted(cards, key=lambda card: (-card.created_ms, card.id)))

    def card(self, name: str, route: Route) -> ModelCard:
        """One of `cards`."""
        model = route.widest
        return ModelCard(
            id=name,
            created_ms=model.created_ms,
            context_tokens=model.context_tokens,
            output_tokens_max=output_limit(model, self.output_tokens_max),
        )

    def _sells(self, names: tuple[str, ...], tenant: Tenant, at_ms: int) -> bool:
        prices = self.view.prices
        return any(is_sold(prices, tenant, name, at_ms=at_ms) for name in names)
