"""Makes a rollout's decision stand: its state, its history, its table, in one transaction.

Both use it: the leader's look every few seconds, and an operator's word at any control plane.
Whoever comes second finds the row or the table moved, and keeps nothing.
"""

from typing import Any

import msgspec

from control_plane.rollout_samples import compare
from control_plane.rollouts.samples import Sample
from control_plane.rollouts.state import ENDS, Decision, Rollout, Transition
from control_plane.route_writes import write_table
from core.route_table import RouteTable
from store import registry, rollouts
from store.audit_log import record
from store.postgres import Connection
from store.rollouts import EventRow, RolloutRow


class MovedMeanwhileError(Exception):
    """The rollout or its table is no longer what the decision was made on. Look again."""


def read(row: RolloutRow) -> Rollout:
    """Where it stands."""
    return msgspec.convert(row.body, Rollout)


def written(row: RolloutRow, rollout: Rollout, *, wanted: list[dict[str, Any]]) -> RolloutRow:
    """The row with where it stands from now on."""
    return msgspec.structs.replace(
        row,
        body=msgspec.to_builtins(rollout),
        wanted=[] if rollout.closed else wanted,
        state=str(rollout.state),
        ended=rollout.state in ENDS,
        closed=rollout.closed,
    )


async def keep(
    conn: Connection,
    row: RolloutRow,
    decision: Decision,
    *,
    table: RouteTable | None,
    actor: str,
    sample: Sample | None = None,
) -> int | None:
    """The version of the route that it wrote, for gateways to hear of after the commit; or None.

    Raises:
        MovedMeanwhileError: Nothing of it may stand.
    """
    version = None
    if decision.write is not None:
        version = await _write(conn, table, decision.write, row=row, actor=actor)
    wanted: list[dict[str, Any]] = msgspec.to_builtins(decision.wanted)
    kept = await rollouts.keep(
        conn, written(row, decision.rollout, wanted=wanted), moved=bool(decision.transitions)
    )
    if kept is None:
        raise MovedMeanwhileError(row.name)
    for transition in decision.transitions:
        await _tell(conn, decision.rollout, transition, row=row, actor=actor, sample=sample)
    return version


async def _write(
    conn: Connection, seen: RouteTable | None, wanted: RouteTable, *, row: RolloutRow, actor: str
) -> int:
    await registry.hold_routes(conn)
    before = await registry.route(conn, row.model, row.tenant)
    if _version(before) != _version(seen):
        raise MovedMeanwhileError(row.model)
    return await write_table(conn, wanted, before=before, actor=actor)


def _version(table: RouteTable | None) -> int:
    return 0 if table is None else table.version


async def _tell(
    conn: Connection,
    rollout: Rollout,
    transition: Transition,
    *,
    row: RolloutRow,
    actor: str,
    sample: Sample | None,
) -> None:
    """In its own history, with the evidence, and in the audit log."""
    figures = None if sample is None else msgspec.to_builtins(compare(rollout.plan, sample))
    event = EventRow(
        actor=actor,
        event=transition.event,
        before=transition.before,
        after=transition.after,
        percent=transition.percent,
        reasons=list(transition.reasons),
        verdicts=msgspec.to_builtins(rollout.verdicts),
        sample=figures,
    )
    await rollouts.add_event(conn, row.name, event)
    detail = {
        "model": row.model,
        "before": transition.before,
        "after": transition.after,
        "percent": transition.percent,
        "reasons": list(transition.reasons),
    }
    await record(
        conn, actor=actor, action=f"rollout.{transition.event}", subject=row.name, detail=detail
    )
