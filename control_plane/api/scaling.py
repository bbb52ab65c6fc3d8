"""Scaling policies: how many replicas a deployment, or each of a model, may have and should.

A policy's target is `deployment:NAME` or `model:NAME`. With `dry_run` nothing is written, and
the answer says what would be decided now, with the reasons.
"""

from typing import Annotated, Any

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.scaler import plan_for, policy_of, word
from control_plane.scaling.policy import ScalingPolicy, fault, rival
from control_plane.services import Services
from core.errors import Code, refuse
from store import registry, scaling
from store.audit_log import record
from store.postgres import Connection
from store.scaling import FROM_NEWEST, DecisionRow, Governed, PolicyRow

GOVERNED_MAX = 100  # deployments told of in one dry run

Before = Annotated[int, QueryParameter(ge=1, le=FROM_NEWEST)]


class PolicyBody(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as it is, and since when."""

    target: str
    policy: ScalingPolicy
    version: int
    updated_ms: int


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of target; `after` asks for the next ones, null at the end."""

    policies: list[PolicyBody]
    after: str | None


class DeletedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Its deployments keep the number of replicas that they are wanted to have."""

    target: str


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What is, or would be, decided about one deployment. `before` null: nobody manages it."""

    deployment: str
    before: int | None
    desired: int
    wake: int
    start: int
    stop: int
    reasons: list[str]
    alarms: list[str]


class PutResult(msgspec.Struct, frozen=True, kw_only=True):
    """`proposals` is what the policy makes of its deployments now; `version` 0 in a dry run."""

    target: str
    policy: ScalingPolicy
    version: int
    dry_run: bool
    proposals: list[Proposal]


class DecisionList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first; `before` asks for older ones, null at the end."""

    decisions: list[DecisionRow]
    before: int | None


@put("/scaling-policies/{target:path}")
async def put_scaling_policy(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    target: FromPath[str],
    data: JSONBody[ScalingPolicy],
    *,
    dry_run: FromQuery[bool] = False,
) -> PutResult:
    """409 where another policy governs the same replicas. In force with the next round."""
    policy = _aimed(data, target.removeprefix("/"))
    _require_sound(policy)
    async with services.postgres.transaction() as conn:
        await scaling.lock_policies(conn)
        model = await _model(conn, policy)
        await _require_alone(conn, policy, model)
        version = 0
        if not dry_run:
            version = await scaling.put_policy(
                conn,
                target=policy.target,
                deployment=policy.deployment,
                model=model,
                body=msgspec.to_builtins(policy),
            )
            detail = msgspec.to_builtins(policy)
            await record(
                conn, actor=actor, action="scaling.put", subject=policy.target, detail=detail
            )
        ones = await scaling.governable(
            conn, model=model, deployment=policy.deployment, limit=GOVERNED_MAX
        )
    return PutResult(
        target=policy.target,
        policy=policy,
        version=version,
        dry_run=dry_run,
        proposals=[await _proposal(services, one, policy) for one in ones],
    )


@get("/scaling-policies")
async def list_scaling_policies(
    services: NamedDependency[Services], after: After = "", limit: Limit = ROWS
) -> PolicyList:
    """All of them."""
    async with services.postgres.connection() as conn:
        rows = await scaling.policies_page(conn, after=after, limit=limit)
    last = rows[-1].target if len(rows) == limit else None
    return PolicyList(policies=[_body(row) for row in rows], after=last)


@get("/scaling-policies/{target:path}")
async def read_scaling_policy(
    services: NamedDependency[Services], target: FromPath[str]
) -> PolicyBody:
    """404 where there is none."""
    async with services.postgres.connection() as conn:
        found = await scaling.policy(conn, target.removeprefix("/"))
    if found is None:
        raise refuse(Code.NOT_FOUND, f"there is no policy for {target.removeprefix('/')!r}")
    return _body(found)


@delete("/scaling-policies/{target:path}", status_code=200)
async def delete_scaling_policy(
    services: NamedDependency[Services], actor: NamedDependency[str], target: FromPath[str]
) -> DeletedPolicy:
    """From now on nobody changes the number of replicas but operators."""
    name = target.removeprefix("/")
    async with services.postgres.transaction() as conn:
        if not await scaling.delete_policy(conn, name):
            raise refuse(Code.NOT_FOUND, f"there is no policy for {name!r}")
        await record(conn, actor=actor, action="scaling.delete", subject=name, detail={})
    return DeletedPolicy(target=name)


@get("/scaling-decisions")
async def list_scaling_decisions(
    services: NamedDependency[Services],
    deployment: Filter = "",
    before: Before = FROM_NEWEST,
    limit: Limit = ROWS,
) -> DecisionList:
    """Those that changed something, and one every few minutes besides, each with its reasons."""
    async with services.postgres.connection() as conn:
        rows = await scaling.decisions_page(conn, deployment=deployment, before=before, limit=limit)
    return DecisionList(decisions=rows, before=rows[-1].id if len(rows) == limit else None)


def _aimed(policy: ScalingPolicy, target: str) -> ScalingPolicy:
    """With the path's target, which the body may repeat."""
    kind, _, name = target.partition(":")
    if kind not in ("deployment", "model") or not name:
        raise refuse(Code.NOT_FOUND, "a target is deployment:NAME or model:NAME")
    aim: dict[str, Any] = {"deployment": "", "model": "", kind: name}
    for field, said in aim.items():
        if getattr(policy, field) not in ("", said):
            raise refuse(Code.UNPROCESSABLE, f"the path names {target!r}", param=field)
    return msgspec.structs.replace(policy, **aim)


def _require_sound(policy: ScalingPolicy) -> None:
    wrong = fault(policy)
    if wrong is not None:
        field, why = wrong
        raise refuse(Code.UNPROCESSABLE, why, param=field)


async def _model(conn: Connection, policy: ScalingPolicy) -> str:
    """Whose replicas it is about. 404 for what there is not."""
    if policy.model:
        if await registry.model_family(conn, policy.model) is None:
            raise refuse(Code.NOT_FOUND, f"there is no model {policy.model!r}")
        return policy.model
    deployment = await registry.deployment(conn, policy.deployment)
    if deployment is None:
        raise refuse(Code.NOT_FOUND, f"there is no deployment {policy.deployment!r}")
    version = await registry.model_version(conn, deployment.version)
    assert version is not None, "a foreign key"
    return version.model


async def _require_alone(conn: Connection, policy: ScalingPolicy, model: str) -> None:
    rows = await scaling.policies_of_model(conn, model)
    other = rival(policy, (policy_of(row.body) for row in rows), model)
    if other is not None:
        message = f"{other} governs the same replicas, and two policies would fight over them"
        raise refuse(Code.CONFLICT, message)


async def _proposal(services: Services, one: Governed, policy: ScalingPolicy) -> Proposal:
    plan = await plan_for(services, one, policy)
    return Proposal(deployment=one.deployment, before=one.replicas_desired, **word(plan.decision))


def _body(row: PolicyRow) -> PolicyBody:
    return PolicyBody(
        target=row.target,
        policy=policy_of(row.body),
        version=row.version,
        updated_ms=row.updated_ms,
    )
