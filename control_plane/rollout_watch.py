"""What a rollout is decided on, read: its table, its replicas, the demand, both sides measured."""

import asyncio
import logging

import msgspec

from control_plane.rollout_samples import assemble
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.samples import Sample, Window
from control_plane.rollouts.state import Observed, ReplicaSeen
from control_plane.services import Services
from store import registry, rollouts
from store.postgres import Connection, StoreAwayError
from store.rollouts import Measured, RolloutRow, SeenReplica

MEASURE_S = 5.0  # for one window's rows: without an answer it goes unmeasured, and waits

_log = logging.getLogger(__name__)


async def observe(conn: Connection, row: RolloutRow, *, demand_rps: float | None) -> Observed:
    """All but the sample."""
    seen = await rollouts.replicas_of(conn, (row.canary, row.stable))
    return Observed(
        table=await registry.route(conn, row.model, row.tenant),
        canary=_side(seen, row.canary),
        stable=_side(seen, row.stable),
        demand_rps=demand_rps,
        busy_with=await rollouts.ahead_of(conn, row) or "",
    )


async def demand(services: Services, row: RolloutRow, at_ms: int) -> float | None:
    """Requests per second under the name. None where there is no answer in time."""
    try:
        async with asyncio.timeout(MEASURE_S), services.books.connection() as conn:
            return await rollouts.demand(conn, row, at_ms)
    except (StoreAwayError, TimeoutError) as error:
        _unmeasured(row, error)
        return None


async def measure(
    services: Services, row: RolloutRow, plan: Plan, window: Window | None
) -> Sample | None:
    """None where there is nothing to measure, or no answer in time: nobody's zero."""
    if window is None:
        return None
    asked = Measured(
        model=row.model,
        tenant=row.tenant,
        region=row.region,
        versions=(plan.canary_version, plan.stable_version),
        from_ms=window.from_ms,
        to_ms=window.to_ms,
    )
    try:
        # Not the pool that heartbeats need: a long window has many rows.
        async with asyncio.timeout(MEASURE_S), services.books.connection() as conn:
            counted = await rollouts.sample(conn, asked)
            still_open = await rollouts.still_open(conn, asked)
    except (StoreAwayError, TimeoutError) as error:
        _unmeasured(row, error)
        return None
    return assemble(plan, window, counted, still_open)


def _unmeasured(row: RolloutRow, error: Exception) -> None:
    facts = {"rollout": row.name, "reason": str(error) or type(error).__name__}
    _log.warning("a rollout could not be measured", extra={"facts": facts})


def _side(seen: list[SeenReplica], deployment: str) -> tuple[ReplicaSeen, ...]:
    return tuple(
        msgspec.convert(
            {"name": each.name, "state": each.state, "version": each.version}, ReplicaSeen
        )
        for each in seen
        if each.deployment == deployment
    )
