"""Rollouts as operators start and watch them. What they do is in `docs/rollouts.md`."""

from typing import Annotated

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from control_plane.api.etags import tagged
from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.api.rollout_bodies import (
    CreateRollout,
    EventList,
    RolloutBody,
    RolloutDetail,
    RolloutDraft,
    RolloutList,
    RolloutRefusal,
    body_of,
    found,
)
from control_plane.errors import ExistsError
from control_plane.rollout_keep import read, written
from control_plane.rollout_plans import forecast, problems
from control_plane.rollout_samples import compare
from control_plane.rollout_watch import demand, measure
from control_plane.rollouts import machine
from control_plane.rollouts.plan import Plan
from control_plane.services import Services
from core.errors import Code, RefusedError, refuse
from core.route_table import RouteTable
from store import registry, rollouts
from store.audit_log import record
from store.postgres import Connection
from store.registry import Deployment
from store.rollouts import FROM_NEWEST, EventRow, RolloutRow

EVENTS_SHOWN = 20
CREATED = "created"

Before = Annotated[int, QueryParameter(ge=1)]

# `state` is a name that Litestar keeps for the application's own.
InState = Annotated[str, QueryParameter(name="state", max_length=200)]


@post("/rollouts")
async def create_rollout(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    data: JSONBody[CreateRollout],
    *,
    dry_run: FromQuery[bool] = False,
) -> Response[RolloutBody | RolloutDraft]:
    """201; 200 for the very same again, or for a dry run; 409 by name for what is in its way."""
    if dry_run:
        return Response(await _draft(services, data, actor), status_code=200)
    async with services.postgres.transaction() as conn:
        await registry.hold_routes(conn)
        existing = await rollouts.rollout(conn, data.name)
        if existing is not None:
            if msgspec.convert(existing.asked, CreateRollout) != data:
                message = f"another rollout named {data.name!r} exists"
                raise ExistsError(message, param="name", existing_id=data.name)
            return Response(body_of(existing), status_code=200)
        row, plan = await _planned(conn, data, actor)
        async for refusal in problems(conn, plan, data.name, await _regions(conn, plan)):
            raise RefusedError(refusal)
        if not await rollouts.create(conn, row):
            raise refuse(Code.CONFLICT, f"another rollout moves {data.model!r}", param="model")
        await _tell_created(conn, row, actor)
        made = await found(conn, data.name)
    return Response(body_of(made), status_code=201)


@get("/rollouts")
async def list_rollouts(
    services: NamedDependency[Services],
    *,
    model: Filter = "",
    in_state: InState = "",
    only_open: FromQuery[bool] = False,
    after: After = "",
    limit: Limit = ROWS,
) -> RolloutList:
    """All that there ever were, or those of a public name, in a state, or not closed."""
    async with services.postgres.connection() as conn:
        rows = await rollouts.rollouts_page(
            conn, model=model, state=in_state, only_open=only_open, after=after, limit=limit
        )
    last = rows[-1].name if len(rows) == limit else None
    return RolloutList(rollouts=[body_of(row) for row in rows], after=last)


@get("/rollouts/{name:str}")
async def read_rollout(
    services: NamedDependency[Services], name: FromPath[str]
) -> Response[RolloutDetail]:
    """404 for an unknown name. Measures both sides anew."""
    async with services.postgres.connection() as conn:
        row = await found(conn, name)
        now_ms = await rollouts.now_ms(conn)
        events = await rollouts.events_page(conn, name, limit=EVENTS_SHOWN)
    rollout = read(row)
    sample = await measure(services, row, rollout.plan, machine.window(rollout, now_ms))
    detail = RolloutDetail(
        **msgspec.structs.asdict(body_of(row)),
        plan=rollout.plan,
        comparison=None if sample is None else compare(rollout.plan, sample),
        events=events,
    )
    return tagged(detail, row.version)


@get("/rollouts/{name:str}/events")
async def list_rollout_events(
    services: NamedDependency[Services],
    name: FromPath[str],
    before: Before = FROM_NEWEST,
    limit: Limit = ROWS,
) -> EventList:
    """All that ever moved it, with the reasons, the verdicts and what was measured."""
    async with services.postgres.connection() as conn:
        await found(conn, name)
        events = await rollouts.events_page(conn, name, before=before, limit=limit)
    return EventList(events=events, before=events[-1].id if len(events) == limit else None)


async def _planned(conn: Connection, data: CreateRollout, actor: str) -> tuple[RolloutRow, Plan]:
    """What would be kept. 404 for a deployment that is not there."""
    table = await registry.route(conn, data.model, data.tenant)
    stable = await _deployment(conn, data.stable or _only_target(table, data.model), "stable")
    canary = await _deployment(conn, data.canary, "canary")
    plan = Plan(
        model=data.model,
        stable=stable.name,
        canary=canary.name,
        stable_version=stable.version,
        canary_version=canary.version,
        steps=data.steps,
        tenant=data.tenant,
        gates=data.gates,
        rules=data.rules,
    )
    rollout = machine.begin(data.name, plan, await rollouts.now_ms(conn))
    row = RolloutRow(
        name=data.name,
        tenant=data.tenant,
        model=data.model,
        region=stable.region,
        stable=stable.name,
        canary=canary.name,
        stable_version=stable.version,
        canary_version=canary.version,
        asked=msgspec.to_builtins(data),
        body={},
        wanted=[],
        state="",
        ended=False,
        closed=False,
        created_by=actor,
    )
    return written(row, rollout, wanted=[]), plan


def _only_target(table: RouteTable | None, model: str) -> str:
    names = {t.deployment for t in (table.targets if table else ()) if t.deployment and t.weight}
    if len(names) != 1:
        message = f"{model!r} does not lead to one deployment alone: say which is the stable"
        raise refuse(Code.UNPROCESSABLE, message, param="stable")
    return names.pop()


async def _deployment(conn: Connection, name: str, param: str) -> Deployment:
    found = await registry.deployment(conn, name)
    if found is None:
        raise refuse(Code.NOT_FOUND, f"there is no deployment {name!r}", param=param)
    return found


async def _regions(conn: Connection, plan: Plan) -> tuple[str, str]:
    stable = await _deployment(conn, plan.stable, "stable")
    canary = await _deployment(conn, plan.canary, "canary")
    return stable.region, canary.region


async def _draft(services: Services, data: CreateRollout, actor: str) -> RolloutDraft:
    """Holds nothing, so that nobody waits for a question."""
    async with services.postgres.connection() as conn:
        row, plan = await _planned(conn, data, actor)
        now_ms = await rollouts.now_ms(conn)
    demand_rps = await demand(services, row, now_ms)
    async with services.postgres.connection() as conn:
        against = problems(conn, plan, row.name, await _regions(conn, plan))
        refusals = [
            RolloutRefusal(code=each.code, message=each.message, param=each.param)
            async for each in against
        ]
        steps = await forecast(conn, row, plan, demand_rps=demand_rps)
    return RolloutDraft(plan=plan, refusals=refusals, steps=steps, demand_rps=demand_rps)


async def _tell_created(conn: Connection, row: RolloutRow, actor: str) -> None:
    event = EventRow(
        actor=actor,
        event=CREATED,
        before="",
        after=row.state,
        percent=0,
        reasons=[],
        verdicts=[],
        sample=None,
    )
    await rollouts.add_event(conn, row.name, event)
    await record(conn, actor=actor, action="rollout.create", subject=row.name, detail=row.asked)
