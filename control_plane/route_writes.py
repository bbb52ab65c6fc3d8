"""The one way in which a route table is written, by an operator's hand or by a rollout's.

The caller holds the routes (`registry.hold_routes`), has judged what stands there, and announces
the version when its transaction has committed.
"""

import msgspec

from core.errors import Code, refuse
from core.route_table import EVERYBODY, RouteTable, alias_loop, placed_targets
from store import providers, registry, rollouts
from store.audit_log import record
from store.postgres import Connection


async def write_table(
    conn: Connection,
    table: RouteTable,
    *,
    before: RouteTable | None,
    actor: str,
    short: bool = False,
) -> int:
    """In the place of what stands there, and in the audit log. Returns the new version.

    `short` is for whoever asked in the short form, and is told of its field.
    """
    await _check_exists(conn, table, short=short)
    version = await registry.put_table(conn, table)
    _check_aliases(await registry.all_routes(conn))
    detail = msgspec.to_builtins({"now": table, "before": before})
    await record(conn, actor=actor, action="route.put", subject=table.model, detail=detail)
    return version


async def check_unmoved(conn: Connection, model: str, tenant: str) -> None:
    """409 while a rollout moves this public name: it would be moved from under it."""
    name = await rollouts.moving(conn, model, tenant)
    if name is not None:
        message = f"the rollout {name!r} moves {model!r}: abort it or roll it back first"
        raise refuse(Code.CONFLICT, message, param="model")


def leads(tables: tuple[RouteTable, ...], alias: RouteTable) -> bool:
    """Whether what an alias names is there, for whom the alias is."""
    return any(
        table.model == alias.alias and table.tenant in {alias.tenant, EVERYBODY} for table in tables
    )


async def _check_exists(conn: Connection, table: RouteTable, *, short: bool) -> None:
    for path, target in placed_targets(table):
        if target.deployment and await registry.deployment(conn, target.deployment) is None:
            param = "deployment" if short else f"{path}.deployment"
            message = f"there is no deployment {target.deployment!r}"
            raise refuse(Code.NOT_FOUND, message, param=param)
        if target.provider and await providers.provider(conn, target.provider) is None:
            message = f"there is no provider {target.provider!r}"
            raise refuse(Code.NOT_FOUND, message, param=f"{path}.provider")
    if table.alias and not leads(await registry.all_routes(conn), table):
        raise refuse(Code.NOT_FOUND, f"there is no route {table.alias!r}", param="alias")


def _check_aliases(tables: tuple[RouteTable, ...]) -> None:
    loop = alias_loop(tables)
    if loop is not None:
        message = f"aliases would lead in a circle: {' → '.join(loop)}"
        raise refuse(Code.CONFLICT, message, param="alias")
