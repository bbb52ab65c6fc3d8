"""What the registry tells gateways: which models are served, at what prices, and by whom.

A gateway reads the view each second and routes from it; it never routes from anything older
than its last view. `route_version` and `version` come from one counter that rises with every
change of a route and every new price: equal numbers mean equal routes and price versions,
while these start by their date and replicas come and go.
"""

import msgspec

from core.pricing import PriceTable
from core.tickets import ReplicaView


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A public model name, and everything a request for it needs to know.

    `max_output_tokens` 0 leaves an answer to the context alone.
    """

    model: str
    version: str  # of the weights and text rules, a content hash
    deployment: str
    pool: str
    family: str
    context_tokens: int
    max_output_tokens: int
    created_ms: int
    route_version: int


class RoutingView(msgspec.Struct, frozen=True, kw_only=True):
    """One region's routes and replicas; it may know more than `version` says, never less.

    A model routed to another region is not in it; one without a price is, for tenants who are
    not billed. Every pool that a model names is a key of `replicas`, be it with none.
    """

    region: str
    version: int
    models: tuple[ServedModel, ...]
    prices: PriceTable
    replicas: dict[str, tuple[ReplicaView, ...]]


def deployment_name(model: str, version: str) -> str:
    """What a version's deployment is called where nobody chose a name.

    A deployment is of one version for ever; another version of the same model is another
    deployment, and the public name moves to it.
    """
    return f"{model}-{version[:8]}"
