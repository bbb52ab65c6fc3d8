"""An operator's words. Each is followed in every state, or refused with the reason."""

from collections.abc import Callable

from msgspec.structs import replace

from control_plane.rollouts.capacity import need, ready, shortage
from control_plane.rollouts.moves import (
    Move,
    Tick,
    edited,
    enters,
    is_as_written,
    is_old,
    pauses,
    rolls_back,
    shifts,
    takes_out,
)
from control_plane.rollouts.plan import WHOLE
from control_plane.rollouts.state import ENDS, Command, Observed, Refused, Rollout, State
from control_plane.rollouts.tables import leads_to, returned, unfit
from core.route_table import RouteTable

PAUSABLE = (State.PENDING, State.STAGING, State.STEPPING, State.PROMOTING)


def follow(
    rollout: Rollout, word: Command, observed: Observed, tick: Tick, why: str
) -> Move | Refused:
    """What it does, if it may."""
    if rollout.closed:
        return Refused(message=f"This rollout has ended: it is {rollout.state}.")
    if rollout.state is State.ROLLING_BACK:
        return Refused(message="This rollout is rolling back, which nothing stops.")
    if is_old(rollout, observed.table):
        return Refused(message="The route table was read before the last change. Please try again.")
    return WORDS[word](rollout, observed, tick, f"an operator's word: {why or word}")


def _pause(rollout: Rollout, observed: Observed, tick: Tick, reason: str) -> Move | Refused:
    del observed, tick
    if rollout.state not in PAUSABLE:
        return Refused(message=f"A rollout that is {rollout.state} cannot be paused.")
    return pauses(rollout, "manual", "pause", reason)


def _resume(rollout: Rollout, observed: Observed, tick: Tick, reason: str) -> Move | Refused:
    if rollout.state is not State.PAUSED:
        return Refused(message=f"A rollout that is {rollout.state} is not paused.")
    if rollout.base is None:
        return enters(rollout, rollout.resumes, "resume", reason)
    adopted = _adopted(rollout, observed.table)
    if isinstance(adopted, Refused):
        return adopted
    rollout, table = adopted
    if not is_as_written(rollout, table) or rollout.pause == "failed_alone":
        # What was measured is of other weights, or has been judged: a window of its own.
        move = shifts(rollout, table, rollout.percent, tick.now_ms, "resume", reason)
    else:
        began_ms = rollout.began_ms
        move = enters(rollout, rollout.resumes, "resume", reason)
        move = move._replace(rollout=replace(move.rollout, began_ms=began_ms))
    return move._replace(rollout=replace(move.rollout, state=rollout.resumes))


def _adopted(rollout: Rollout, table: RouteTable | None) -> tuple[Rollout, RouteTable] | Refused:
    """With the table as it is for its base, if the rollout can go on from there."""
    if table is not None and is_as_written(rollout, table):
        return rollout, table
    base = None if table is None else returned(table, rollout.plan, keep=False)
    problem = unfit(base, rollout.plan)
    if base is None or problem is not None:
        return Refused(
            message=f"{edited(rollout, table)}; it cannot go on from there: {problem}. "
            "Abort or roll back."
        )
    return replace(rollout, base=base), replace(base, version=0 if table is None else table.version)


def _promote(rollout: Rollout, observed: Observed, tick: Tick, reason: str) -> Move | Refused:
    plan = rollout.plan
    stepping = (rollout.state, rollout.resumes) == (State.PAUSED, State.STEPPING)
    if rollout.state is not State.STEPPING and not stepping:
        return Refused(message=f"A rollout that is {rollout.state} cannot be promoted.")
    if rollout.state is State.STEPPING and not is_as_written(rollout, observed.table):
        return Refused(message=f"{edited(rollout, observed.table)}.")
    adopted = _adopted(rollout, observed.table)
    if isinstance(adopted, Refused):
        return adopted
    if observed.canary is None:
        return Refused(message=f"The replicas of {plan.canary} could not be read.")
    have, wanted = ready(observed.canary, plan.canary_version), need(rollout, observed, WHOLE)
    if have < wanted.replicas:
        return Refused(message=f"{shortage(rollout, have, wanted)}.")
    move = shifts(
        replace(adopted[0], step=len(plan.steps) - 1, granted=wanted.replicas),
        adopted[1],
        WHOLE,
        tick.now_ms,
        "promote",
        reason,
    )
    return move._replace(rollout=replace(move.rollout, state=State.PROMOTING, began_ms=0))


def _abort(rollout: Rollout, observed: Observed, tick: Tick, reason: str) -> Move | Refused:
    del tick
    if rollout.state in ENDS:
        return Refused(message=f"This rollout is {rollout.state} already.")
    move = enters(rollout, State.ABORTED, "abort", reason)
    table = observed.table
    if rollout.base is None or table is None or not leads_to(table, rollout.plan.canary):
        closed = replace(move.rollout, percent=0, closed=True)
        return move._replace(rollout=closed, release=rollout.plan.canary)
    return takes_out(move, table, keep=True)


def _roll_back(rollout: Rollout, observed: Observed, tick: Tick, reason: str) -> Move | Refused:
    del tick
    if rollout.base is None:
        return Refused(message="Nothing has been given to the canary. Abort the rollout instead.")
    if rollout.state is State.ABORTED:
        # It has given the name up, and another may move that by now: this one write ends it.
        ended = enters(rollout, State.ROLLED_BACK, "rollback", reason)
        closed = ended._replace(
            rollout=replace(ended.rollout, closed=True), release=rollout.plan.canary
        )
        return takes_out(closed, observed.table, keep=False)
    return rolls_back(rollout, observed.table, "rollback", reason)


WORDS: dict[Command, Callable[[Rollout, Observed, Tick, str], Move | Refused]] = {
    "promote": _promote,
    "pause": _pause,
    "resume": _resume,
    "abort": _abort,
    "rollback": _roll_back,
}
