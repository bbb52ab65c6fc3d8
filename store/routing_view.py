"""What a gateway may route to, read each second: three statements by key.

The counter is read first and the replicas last, so a view may know more than its number
says, never less. Prices, which are many and seldom change, are read again when it has risen.
Nothing here decides; a lost replica is in the view, as not ready.
"""

import msgspec

from core.ids import pool_id
from core.registry import RoutingView, ServedModel
from core.tickets import ReplicaView
from store.changes import current_change
from store.postgres import Connection
from store.prices import prices_in_view
from store.queries import load
from store.rows import struct_row

_sql = load("routing_view")


class _ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: str
    deployment: str
    family: str
    context_tokens: int
    max_output_tokens: int
    created_ms: int
    route_version: int


class _ReplicaRow(ReplicaView, frozen=True, kw_only=True):
    deployment: str


async def routing_view(
    conn: Connection, region: str, *, last: RoutingView | None = None
) -> RoutingView:
    """The routes, prices and replicas of one region. `last` is what was read before, if it was."""
    version = await current_change(conn, "routing")
    if last is not None and last.version == version:
        prices = last.prices
    else:
        prices = await prices_in_view(conn, region)
    async with conn.cursor(row_factory=struct_row(_ModelRow)) as cursor:
        await cursor.execute(_sql["served_models"], {"region": region})
        models = tuple(_served(row, region) for row in await cursor.fetchall())
    replicas: dict[str, list[ReplicaView]] = {model.pool: [] for model in models}
    async with conn.cursor(row_factory=struct_row(_ReplicaRow)) as cursor:
        await cursor.execute(_sql["replica_views"], {"region": region})
        for row in await cursor.fetchall():
            replicas.setdefault(pool_id(row.deployment, region), []).append(_view(row))
    return RoutingView(
        region=region,
        version=version,
        models=models,
        prices=prices,
        replicas={pool: tuple(views) for pool, views in replicas.items()},
    )


def _served(row: _ModelRow, region: str) -> ServedModel:
    return ServedModel(
        model=row.model,
        version=row.version,
        deployment=row.deployment,
        pool=pool_id(row.deployment, region),
        family=row.family,
        context_tokens=row.context_tokens,
        max_output_tokens=row.max_output_tokens,
        created_ms=row.created_ms,
        route_version=row.route_version,
    )


def _view(row: _ReplicaRow) -> ReplicaView:
    return ReplicaView(**{name: getattr(row, name) for name in ReplicaView.__struct_fields__})
