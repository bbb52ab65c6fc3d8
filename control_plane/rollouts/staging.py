"""Before any weight: the name is free, the table is fit, and the canary is there to carry it."""

from collections.abc import Iterator

from msgspec.structs import replace

from control_plane.rollouts.capacity import need, ready, shortage, strangers
from control_plane.rollouts.moves import Move, Tick, enters, pauses, shifts, stays
from control_plane.rollouts.state import Observed, Rollout, State
from control_plane.rollouts.tables import unfit


def look_pending(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    """Waits for the name."""
    del tick
    if observed.busy_with:
        return stays(rollout, f"rollout {observed.busy_with} of {rollout.plan.model} has not ended")
    reason = f"{rollout.plan.model} is free: waiting for replicas of {rollout.plan.canary}"
    return enters(rollout, State.STAGING, "started", reason)


def look_staging(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    """Waits for everything that a first share needs."""
    carrying = ready(observed.stable or (), rollout.plan.stable_version)
    rollout = replace(
        rollout,
        waited_ms=rollout.waited_ms + tick.passed_ms,
        stable_replicas=max(rollout.stable_replicas, carrying),
    )
    closed = tuple(_closed_gates(rollout, observed))
    if not closed and observed.table is not None:
        step = rollout.plan.steps[0]
        wanted = need(rollout, observed, step.percent)
        return shifts(
            replace(rollout, base=observed.table, step=0, granted=wanted.replicas),
            observed.table,
            step.percent,
            tick.now_ms,
            "gates_open",
            f"the replicas of {rollout.plan.canary} are ready, warmed and of version "
            f"{rollout.plan.canary_version}: {wanted.replicas} needed ({wanted.why})",
            f"step 1 of {len(rollout.plan.steps)}: {step.percent} % of new conversations",
        )
    bound = rollout.plan.rules.stage_ms_max
    if rollout.waited_ms >= bound:
        return pauses(
            rollout, "staging", "staging_bound", f"not staged after {bound / 1000:.0f} s", *closed
        )
    return stays(rollout, *closed)


def _closed_gates(rollout: Rollout, observed: Observed) -> Iterator[str]:
    plan = rollout.plan
    problem = unfit(observed.table, plan)
    if problem is not None:
        yield problem
    if observed.stable is None:
        yield f"the replicas of {plan.stable} could not be read"
    elif not ready(observed.stable, plan.stable_version):
        yield f"{plan.stable} has no ready replica: there is nothing to compare with"
    if observed.canary is None:
        yield f"the replicas of {plan.canary} could not be read"
        return
    yield from strangers(observed.canary, plan.canary_version)
    have = ready(observed.canary, plan.canary_version)
    wanted = need(rollout, observed, plan.steps[0].percent)
    if have < wanted.replicas:
        yield shortage(rollout, have, wanted)
