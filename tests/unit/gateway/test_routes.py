"""What the dispatcher is told of the routing view, as pools come, are deserted and go."""

import msgspec

from core.pricing import PriceTable
from core.registry import RoutingView
from core.tickets import ReplicaView
from gateway.routes import Routes

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
