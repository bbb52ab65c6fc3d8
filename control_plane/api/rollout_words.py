"""An operator's words about a rollout. Each is one transaction, and everywhere at once.

What leads on must have been seen (`if_version`, or `If-Match`); what stops needs no look.
"""

from typing import Any, NamedTuple

from litestar import Request, Response, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.etags import require_match, tagged
from control_plane.api.rollout_bodies import RolloutBody, RolloutWord, body_of, found
from control_plane.rollout_keep import keep, read
from control_plane.rollout_watch import demand, observe
from control_plane.rollouts import machine
from control_plane.rollouts.state import Command, Refused
from control_plane.services import Services
from core.errors import Code, refuse
from store import registry, rollouts
from store.rollouts import RolloutRow

NEEDS_A_LOOK: tuple[Command, ...] = ("promote", "resume")

Asked = Request[Any, Any, Any]


class Said(NamedTuple):
    """Which word, about which rollout."""

    name: str
    word: Command
    data: RolloutWord


@post("/rollouts/{name:str}/promote", status_code=200)
async def promote_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
    request: Asked,
) -> Response[RolloutBody]:
    """All new conversations to the canary, without waiting for evidence. Not without capacity."""
    return await _follow(request, services, actor, Said(name, "promote", data))


@post("/rollouts/{name:str}/pause", status_code=200)
async def pause_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
    request: Asked,
) -> Response[RolloutBody]:
    """Weights stay as they are."""
    return await _follow(request, services, actor, Said(name, "pause", data))


@post("/rollouts/{name:str}/resume", status_code=200)
async def resume_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
    request: Asked,
) -> Response[RolloutBody]:
    """On from where it paused, with the table as it is now."""
    return await _follow(request, services, actor, Said(name, "resume", data))


@post("/rollouts/{name:str}/abort", status_code=200)
async def abort_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
    request: Asked,
) -> Response[RolloutBody]:
    """No new conversation for the canary; those it has stay with it for a while."""
    return await _follow(request, services, actor, Said(name, "abort", data))


@post("/rollouts/{name:str}/rollback", status_code=200)
async def roll_back_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
    request: Asked,
) -> Response[RolloutBody]:
    """The canary out of the table, now and everywhere: one write. Its conversations move."""
    return await _follow(request, services, actor, Said(name, "rollback", data))


async def _follow(
    request: Asked, services: Services, actor: str, said: Said
) -> Response[RolloutBody]:
    async with services.postgres.connection() as conn:
        row = await found(conn, said.name)
        now_ms = await rollouts.now_ms(conn)
    # What stops must not wait for a count.
    demand_rps = await demand(services, row, now_ms) if said.word == "promote" else None
    async with services.postgres.transaction() as conn:
        # In this order: whoever writes a table holds the routes first.
        await registry.hold_routes(conn)
        await rollouts.hold(conn, said.name)
        row = await found(conn, said.name)
        _check_seen(request, row, said)
        observed = await observe(conn, row, demand_rps=demand_rps)
        decision = machine.command(read(row), said.word, observed, now_ms, why=said.data.why)
        if isinstance(decision, Refused):
            raise refuse(Code.CONFLICT, decision.message, param="name")
        version = await keep(conn, row, decision, table=observed.table, actor=actor)
        row = await found(conn, said.name)
    if version is not None:
        await services.announcer.route(row.model, version)
    return tagged(body_of(row), row.version)


def _check_seen(request: Asked, row: RolloutRow, said: Said) -> None:
    if "if-match" in request.headers:
        return require_match(request, row.version)
    if_version = said.data.if_version
    if if_version == row.version or (if_version is None and said.word not in NEEDS_A_LOOK):
        return None
    message = f"this rollout is of version {row.version}: say what you have seen with if_version"
    raise refuse(Code.CONFLICT, message, param="if_version")
