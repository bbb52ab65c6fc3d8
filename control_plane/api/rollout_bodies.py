"""What is said to and by the calls about rollouts."""

from typing import Annotated

import msgspec

from control_plane.api.names import DeploymentName, ModelName
from control_plane.rollout_keep import read
from control_plane.rollout_plans import StepForecast
from control_plane.rollout_samples import Comparison
from control_plane.rollouts.plan import GATES, Gate, Plan, Rules, Step
from control_plane.rollouts.state import Verdict, Wanted
from core.errors import Code, refuse
from core.route_table import EVERYBODY
from store import rollouts
from store.postgres import Connection
from store.rollouts import EventRow, RolloutRow

Why = Annotated[str, msgspec.Meta(max_length=500)]
IfVersion = Annotated[int, msgspec.Meta(ge=1)]


class CreateRollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move the public name `model` from `stable` to `canary`, which are deployments.

    `stable` may be left out where the name leads to one deployment alone.
    """

    name: DeploymentName
    model: ModelName
    canary: DeploymentName
    stable: Annotated[str, msgspec.Meta(max_length=63)] = ""
    tenant: Annotated[str, msgspec.Meta(max_length=64)] = EVERYBODY
    steps: tuple[Step, ...] = (Step(percent=5), Step(percent=50), Step(percent=100))
    gates: tuple[Gate, ...] = GATES
    rules: Rules = Rules()


class RolloutWord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`if_version` is what the caller has seen; `why` is kept with what the word does."""

    if_version: IfVersion | None = None
    why: Why = ""


class RolloutBody(msgspec.Struct, frozen=True, kw_only=True):
    """Where it stands, and why. `version` rises with each transition, not with each look.

    `ended`: it moves its name no longer. `closed`: there is nothing left to do at all.
    """

    name: str
    model: str
    tenant: str
    region: str
    stable: str
    canary: str
    stable_version: str
    canary_version: str
    state: str
    step: int
    steps: int
    percent: int
    pause: str
    reasons: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    wanted: tuple[Wanted, ...]
    ended: bool
    closed: bool
    version: int
    created_by: str
    created_ms: int
    updated_ms: int


class RolloutDetail(RolloutBody, frozen=True, kw_only=True):
    """With its plan, both sides measured now (null while nothing is), and its newest events."""

    plan: Plan
    comparison: Comparison | None
    events: list[EventRow]


class RolloutRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why the create would be refused."""

    code: Code
    message: str
    param: str | None


class RolloutDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What a create would do. Nothing was written."""

    plan: Plan
    refusals: list[RolloutRefusal]
    steps: list[StepForecast]
    demand_rps: float | None


class RolloutList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of name; `after` asks for the next ones, null at the end."""

    rollouts: list[RolloutBody]
    after: str | None


class EventList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first; `before` asks for older ones, null at the end."""

    events: list[EventRow]
    before: int | None


def body_of(row: RolloutRow) -> RolloutBody:
    """Of what is kept."""
    rollout = read(row)
    return RolloutBody(
        name=row.name,
        model=row.model,
        tenant=row.tenant,
        region=row.region,
        stable=row.stable,
        canary=row.canary,
        stable_version=row.stable_version,
        canary_version=row.canary_version,
        state=row.state,
        step=rollout.step,
        steps=len(rollout.plan.steps),
        percent=rollout.percent,
        pause=rollout.pause,
        reasons=rollout.reasons,
        verdicts=rollout.verdicts,
        wanted=tuple(msgspec.convert(each, Wanted) for each in row.wanted),
        ended=row.ended,
        closed=row.closed,
        version=row.version,
        created_by=row.created_by,
        created_ms=row.created_ms,
        updated_ms=row.updated_ms,
    )


async def found(conn: Connection, name: str) -> RolloutRow:
    """404 for an unknown name."""
    row = await rollouts.rollout(conn, name)
    if row is None:
        raise refuse(Code.NOT_FOUND, f"there is no rollout {name!r}", param="name")
    return row
