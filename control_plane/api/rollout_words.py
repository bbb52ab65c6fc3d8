"""An operator's words about a rollout. Each is one transaction, and everywhere at once.

What leads on must have been seen (`if_version`); what stops needs no look.
"""

from litestar import post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.rollout_bodies import RolloutBody, RolloutWord, body_of, found
from control_plane.rollout_keep import keep, read
from control_plane.rollout_watch import observe
from control_plane.rollouts import machine
from control_plane.rollouts.state import Command, Refused
from control_plane.services import Services
from core.errors import Code, refuse
from store import registry, rollouts
from store.rollouts import RolloutRow

NEEDS_A_LOOK: tuple[Command, ...] = ("promote", "resume")


@post("/rollouts/{name:str}/promote", status_code=200)
async def promote_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
) -> RolloutBody:
    """All new conversations to the canary, without waiting for evidence. Not without capacity."""
    return await _follow(services, actor, name, "promote", data)


@post("/rollouts/{name:str}/pause", status_code=200)
async def pause_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
) -> RolloutBody:
    """Weights stay as they are."""
    return await _follow(services, actor, name, "pause", data)


@post("/rollouts/{name:str}/resume", status_code=200)
async def resume_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
) -> RolloutBody:
    """On from where it paused, with the table as it is now."""
    return await _follow(services, actor, name, "resume", data)


@post("/rollouts/{name:str}/abort", status_code=200)
async def abort_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
) -> RolloutBody:
    """No new conversation for the canary; those it has stay with it for a while."""
    return await _follow(services, actor, name, "abort", data)


@post("/rollouts/{name:str}/rollback", status_code=200)
async def roll_back_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[RolloutWord],
) -> RolloutBody:
    """The canary out of the table, now and everywhere: one write. Its conversations move."""
    return await _follow(services, actor, name, "rollback", data)


async def _follow(
    services: Services, actor: str, name: str, word: Command, data: RolloutWord
) -> RolloutBody:
    async with services.postgres.transaction() as conn:
        # In this order: whoever writes a table holds the routes first.
        await registry.hold_routes(conn)
        await rollouts.hold(conn, name)
        row = await found(conn, name)
        _check_seen(row, word, data.if_version)
        now_ms = await rollouts.now_ms(conn)
        observed = await observe(conn, row, now_ms)
        decision = machine.command(read(row), word, observed, now_ms, why=data.why)
        if isinstance(decision, Refused):
            raise refuse(Code.CONFLICT, decision.message, param="name")
        version = await keep(conn, row, decision, table=observed.table, actor=actor)
        row = await found(conn, name)
    if version is not None:
        await services.announcer.route(row.model, version)
    return body_of(row)


def _check_seen(row: RolloutRow, word: Command, if_version: int | None) -> None:
    if if_version == row.version or (if_version is None and word not in NEEDS_A_LOOK):
        return
    message = f"this rollout is of version {row.version}: say what you have seen with if_version"
    raise refuse(Code.CONFLICT, message, param="if_version")
