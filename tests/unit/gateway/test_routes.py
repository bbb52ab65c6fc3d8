"""What the dispatcher and callers are told of the routing view, as it changes."""

import msgspec

from core.errors import Code, Refusal
from core.money import Price
from core.pricing import ListedPrice, PriceTable
from core.registry import RoutingView
from core.route_table import RouteTable, Target
from core.tickets import ReplicaView
from gateway.auth import Identity
from gateway.routes import Routes
from tests.unit.gateway.test_route_index import a_key, a_tenant, served

READY = ReplicaView(
    replica="r", boot_id="b", url="http://r", version="v", ready=True, kv_blocks=1, sequences=1
)
GONE = msgspec.structs.replace(READY, ready=False)


def a_view(**replicas: tuple[ReplicaView, ...]) -> RoutingView:
    return RoutingView(
        region="local", version=1, models=(), prices=PriceTable(()), replicas=replicas
    )


def some_routes() -> Routes:
    return Routes("local", output_tokens_max=100, no_replica_s=10.0)


def test_a_pool_that_left_the_view_is_announced_empty_once() -> None:
    routes = some_routes()
    routes.update(a_view(one=(READY,), two=(READY,)), 1.0)
    assert routes.announcement() == {"one": (READY,), "two": (READY,)}
    routes.update(a_view(one=(READY,)), 2.0)
    assert routes.announcement() == {"one": (READY,), "two": ()}
    assert routes.announcement() == {"one": (READY,)}
    routes.update(a_view(one=(READY,), two=(READY,)), 3.0)
    assert routes.announcement() == {"one": (READY,), "two": (READY,)}


def test_a_deserted_pool_is_announced_empty() -> None:
    routes = some_routes()
    routes.update(a_view(one=(READY,)), 1.0)
    routes.update(a_view(one=(GONE,)), 11.0)
    assert routes.announcement() == {"one": (GONE,)}
    routes.update(a_view(one=(GONE,)), 11.5)
    assert routes.announcement() == {"one": ()}


PRICE = Price(id="p", input_micro=1, cached_input_micro=1, output_micro=1)


def an_identity(*, billed: bool = True) -> Identity:
    tenant = msgspec.structs.replace(a_tenant(), billed=billed)
    return Identity(key=a_key(), tenant=tenant)


def a_served_view() -> RoutingView:
    names = ("priced", "other")
    aliases = {"cheap": "other", "fast": "priced"}
    return RoutingView(
        region="local",
        version=1,
        models=tuple(served(name, "a") for name in names),
        prices=PriceTable(
            [
                ListedPrice(model="priced", service_class="batch", effective_ms=5, price=PRICE),
                ListedPrice(model="cheap", effective_ms=6, price=PRICE),
            ]
        ),
        replicas={},
        tables=tuple(RouteTable(model=n, targets=(Target(deployment="a"),)) for n in names)
        + tuple(RouteTable(model=name, alias=alias) for name, alias in aliases.items()),
    )


def test_a_tenant_is_told_of_the_models_that_it_may_use() -> None:
    routes = some_routes()
    routes.update(a_served_view(), 0.0)
    told = [[card.id for card in routes.cards(an_identity(), at_ms)] for at_ms in (4, 5, 6)]
    assert told == [[], ["fast", "priced"], ["cheap", "fast", "priced"]]
    free = routes.cards(an_identity(billed=False), 4)
    assert [card.id for card in free] == ["cheap", "fast", "other", "priced"]
    assert {card.context_tokens for card in free} == {100}
    found = routes.find("priced", an_identity(), 5)
    assert not isinstance(found, Refusal)
    assert found.name == "priced"
    for name, code in (("other", Code.MODEL_NOT_PRICED), ("none", Code.MODEL_NOT_FOUND)):
        refused = routes.find(name, an_identity(), 5)
        assert isinstance(refused, Refusal)
        assert refused.code is code


def test_names_are_sought_again_only_when_routes_changed() -> None:
    routes, view = some_routes(), a_served_view()
    routes.update(view, 0.0)
    index = routes.index
    routes.update(msgspec.structs.replace(view, replicas={"a@local": (READY,)}), 1.0)
    assert routes.index is index
    assert routes.versions == {"v-a"}
    routes.update(msgspec.structs.replace(view, tables=view.tables[:1]), 2.0)
    assert routes.index is not index
