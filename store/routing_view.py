"""What a gateway may route to, read each second: two statements by key, most of the time.

The counter is read first and the replicas last, so a view may know more than its number
says, never less. Everything else is many rows that seldom change: it is read again when the
counter has risen. Nothing here decides; a lost replica is in the view, as not ready.
"""

from collections.abc import Sequence

import msgspec

from core.ids import pool_id
from core.registry import RoutingView, ServedModel
from core.route_table import EVERYBODY, RouteTable
from core.tickets import ReplicaView
from store.changes import current_change
from store.postgres import Connection
from store.prices import prices_in_view
from store.providers import providers_in_view
from store.queries import load
from store.registry import all_routes
from store.rows import struct_row

_sql = load("routing_view")


class _ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: str
    deployment: str
    family: str
    context_tokens: int
    created_ms: int


class _ReplicaRow(ReplicaView, frozen=True, kw_only=True):
    deployment: str


async def routing_view(
    conn: Connection, region: str, *, last: RoutingView | None = None
) -> RoutingView:
    """The routes, prices and replicas of one region. `last` is what was read before, if it was."""
    version = await current_change(conn, "routing")
    if last is None or last.version != version:
        last = await _read_routes(conn, region, version)
    replicas: dict[str, list[ReplicaView]] = {model.pool: [] for model in last.models}
    async with conn.cursor(row_factory=struct_row(_ReplicaRow)) as cursor:
        await cursor.execute(_sql["replica_views"], {"region": region})
        for row in await cursor.fetchall():
            replicas.setdefault(pool_id(row.deployment, region), []).append(_view(row))
    found = {pool: tuple(views) for pool, views in replicas.items()}
    return msgspec.structs.replace(last, replicas=found)


async def _read_routes(conn: Connection, region: str, version: int) -> RoutingView:
    """All of a view that the counter tells of."""
    tables = await all_routes(conn)
    async with conn.cursor(row_factory=struct_row(_ModelRow)) as cursor:
        await cursor.execute(_sql["served_models"], {"region": region})
        models = _served(await cursor.fetchall(), tables, region, version)
    return RoutingView(
        region=region,
        version=version,
        models=models,
        prices=await prices_in_view(conn),
        replicas={},
        tables=tables,
        providers=await providers_in_view(conn),
    )


def _served(
    rows: Sequence[_ModelRow], tables: Sequence[RouteTable], region: str, version: int
) -> tuple[ServedModel, ...]:
    limits = {table.model: table.max_output_tokens for table in tables if table.tenant == EVERYBODY}
    return tuple(
        ServedModel(
            model=row.model,
            version=row.version,
            deployment=row.deployment,
            pool=pool_id(row.deployment, region),
            family=row.family,
            context_tokens=row.context_tokens,
            max_output_tokens=limits.get(row.model, 0),
            created_ms=row.created_ms,
            route_version=version,
        )
        for row in rows
    )


def _view(row: _ReplicaRow) -> ReplicaView:
    return ReplicaView(**{name: getattr(row, name) for name in ReplicaView.__struct_fields__})
