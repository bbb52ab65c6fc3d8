"""Whether a rollout can be made of what is there, and what it would do."""

from collections.abc import AsyncIterator

import msgspec

from control_plane.rollout_watch import observe
from control_plane.rollouts.capacity import need, ready
from control_plane.rollouts.machine import begin
from control_plane.rollouts.plan import Plan, fault
from control_plane.rollouts.tables import split, unfit
from core.errors import Code, Refusal
from core.route_table import EVERYBODY, Target
from store import registry, rollouts
from store.postgres import Connection
from store.registry import DesiredState, VersionState
from store.rollouts import RolloutRow
from store.tenants import tenant_by_id


class StepForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One step: its table, and the replicas it takes by what is known now."""

    percent: int
    targets: tuple[Target, ...]
    replicas_needed: int
    replicas_ready: int
    why: str


async def problems(
    conn: Connection, plan: Plan, name: str, region: tuple[str, str]
) -> AsyncIterator[Refusal]:
    """Everything against it, the first reason first. `region` is the stable's and the canary's."""
    found = fault(plan)
    if found is not None:
        yield Refusal(code=Code.UNPROCESSABLE, message=found.message, param=found.param)
    if plan.tenant != EVERYBODY and await tenant_by_id(conn, plan.tenant) is None:
        yield Refusal(
            code=Code.NOT_FOUND, message=f"there is no tenant {plan.tenant!r}", param="tenant"
        )
    async for refusal in _version_problems(conn, plan):
        yield refusal
    if region[0] != region[1]:
        message = f"{plan.stable} is in region {region[0]}, {plan.canary} in region {region[1]}"
        yield _conflict(message, "canary")
    async for refusal in _name_problems(conn, plan, name):
        yield refusal


async def _version_problems(conn: Connection, plan: Plan) -> AsyncIterator[Refusal]:
    found = await registry.model_version(conn, plan.canary_version)
    stable = await registry.model_version(conn, plan.stable_version)
    assert found is not None
    assert stable is not None
    if found.state != VersionState.READY:
        yield _conflict(f"the version of {plan.canary} is {found.state}", "canary")
    if found.context_tokens < stable.context_tokens:
        message = (
            f"{plan.canary} takes {found.context_tokens} tokens and {plan.stable} "
            f"{stable.context_tokens}: what fits one would be refused by the other"
        )
        yield _conflict(message, "canary")
    deployment = await registry.deployment(conn, plan.canary)
    if deployment is not None and deployment.desired_state != DesiredState.RUNNING:
        yield _conflict(f"{plan.canary} is {deployment.desired_state}", "canary")


async def _name_problems(conn: Connection, plan: Plan, name: str) -> AsyncIterator[Refusal]:
    other = await rollouts.moving(conn, plan.model, plan.tenant)
    if other is not None and other != name:
        yield _conflict(f"the rollout {other!r} moves {plan.model!r}", "model")
        return
    if await rollouts.unclosed(conn, plan.model, plan.tenant) is not None:
        return  # it has yet to leave the table, and this one waits for that
    unready = unfit(await registry.route(conn, plan.model, plan.tenant), plan)
    if unready is not None:
        yield _conflict(unready, "model")


async def forecast(
    conn: Connection, row: RolloutRow, plan: Plan, *, demand_rps: float | None
) -> list[StepForecast]:
    """What each step would write and need. Nothing where the table cannot take it."""
    observed = await observe(conn, row, demand_rps=demand_rps)
    if observed.table is None or unfit(observed.table, plan) is not None:
        return []
    carrying = ready(observed.stable or (), plan.stable_version)
    rollout = msgspec.structs.replace(
        begin(row.name, plan, row.created_ms), stable_replicas=carrying
    )
    have = ready(observed.canary or (), plan.canary_version)
    steps = []
    for step in plan.steps:
        wanted = need(rollout, observed, step.percent)
        steps.append(
            StepForecast(
                percent=step.percent,
                targets=split(observed.table, plan, step.percent).targets,
                replicas_needed=wanted.replicas,
                replicas_ready=have,
                why=wanted.why,
            )
        )
    return steps


def _conflict(message: str, param: str) -> Refusal:
    return Refusal(code=Code.CONFLICT, message=message, param=param)
