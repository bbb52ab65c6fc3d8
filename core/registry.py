"""What the registry tells gateways: which models are served, at what prices, and by whom.

A gateway reads the view each second and routes from it; it never routes from anything older
than its last view. `route_version` and `version` come from one counter that rises with every
change of a route or a provider and every new price: equal numbers mean equal routes and price
versions, while these start by their date and replicas come and go.
"""

import msgspec

from core.pricing import PriceTable
from core.providers import ProviderDialect, ProviderView
from core.route_table import RouteTable
from core.tickets import ReplicaView


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment of ours, as the target of a request for a public name.

    `max_output_tokens` 0 leaves an answer to the context alone.
    """

    model: str  # the public name that the request is billed and limited under
    version: str  # of the weights and text rules, a content hash
    deployment: str
    pool: str
    family: str
    context_tokens: int
    max_output_tokens: int
    created_ms: int
    route_version: int


class ProviderModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of an outside provider, as the target of a request: the same face, where it can."""

    model: str  # the public name that the request is billed and limited under
    provider: str
    upstream: str  # what the provider calls it
    dialect: ProviderDialect
    context_tokens: int
    max_output_tokens: int
    created_ms: int
    route_version: int
    images: bool = True  # whether it takes any

    @property
    def version(self) -> str:
        """What a usage row says instead of a version of ours; no content hash has a slash."""
        return f"{self.provider}/{self.upstream}"


TargetModel = ServedModel | ProviderModel


class RoutingView(msgspec.Struct, frozen=True, kw_only=True):
    """One region's routes and replicas; it may know more than `version` says, never less.

    `models` are the deployments that tables lead to, each under its own name; those of another
    region are not in it, nor is a table's target there. A table without a price is, for tenants
    who are not billed. Every pool that a model names is a key of `replicas`, be it with none.
    """

    region: str
    version: int
    models: tuple[ServedModel, ...]
    prices: PriceTable
    replicas: dict[str, tuple[ReplicaView, ...]]
    tables: tuple[RouteTable, ...] = ()
    providers: tuple[ProviderView, ...] = ()


def deployment_name(model: str, version: str) -> str:
    """What a version's deployment is called where nobody chose a name.

    A deployment is of one version for ever; another version of the same model is another
    deployment, and the public name moves to it.
    """
    return f"{model}-{version[:8]}"
