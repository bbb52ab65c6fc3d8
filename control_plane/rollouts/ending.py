"""The loser's last hour: kept warm and in the table while conversations are bound to it."""

from msgspec.structs import replace

from control_plane.rollouts.capacity import ready
from control_plane.rollouts.moves import (
    Move,
    Tick,
    edited,
    enters,
    is_as_written,
    pauses,
    rolls_back,
    stays,
    takes_out,
)
from control_plane.rollouts.state import Event, Observed, Rollout, State
from control_plane.rollouts.tables import leads_to, promoted
from control_plane.rollouts.watch import counted, lost_for_good


def look_promoting(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    """The stable leaves the table and the rollout once it has been kept long enough."""
    plan = rollout.plan
    rollout = counted(rollout, observed, tick.passed_ms)
    if not is_as_written(rollout, observed.table):
        return pauses(rollout, "edited", "edited", edited(rollout, observed.table))
    gone = lost_for_good(rollout)
    if gone:
        return rolls_back(rollout, observed.table, "lost", gone)
    if observed.canary is None:
        return stays(rollout, f"the replicas of {plan.canary} could not be read")
    if not ready(observed.canary, plan.canary_version):
        return stays(rollout, f"{plan.canary} has no ready replica; {plan.stable} is kept")
    rollout = replace(rollout, held_ms=rollout.held_ms + tick.passed_ms)
    left_ms = plan.rules.keep_warm_ms - rollout.held_ms
    if left_ms > 0:
        return stays(rollout, f"{plan.stable} is kept warm for another {left_ms / 1000:.0f} s")
    assert rollout.base is not None
    assert observed.table is not None
    write = replace(promoted(rollout.base, plan), version=observed.table.version)
    reason = f"{plan.model} is served by {plan.canary} alone; {plan.stable} is not needed any more"
    ended = enters(rollout, State.PROMOTED, "warm_ended", reason).rollout
    ended = replace(ended, closed=True, over_version=observed.table.version)
    return Move(ended, "warm_ended", write, release=plan.stable)


def look_rolling_back(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    """Until the table is seen without the canary."""
    del tick
    canary = rollout.plan.canary
    if observed.table is not None and leads_to(observed.table, canary):
        again = replace(
            rollout, reasons=(f"{canary} was put into the table again; it is taken out",)
        )
        return takes_out(Move(again, "rewritten"), observed.table, keep=False)
    return _closes(rollout, State.ROLLED_BACK, "seen", f"the table is without {canary}")


def look_aborted(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    """Conversations bound to the canary are kept for a while, and it is taken out then."""
    canary = rollout.plan.canary
    rollout = replace(rollout, held_ms=rollout.held_ms + tick.passed_ms)
    left_ms = rollout.plan.rules.keep_warm_ms - rollout.held_ms
    if left_ms > 0:
        return stays(
            rollout, f"{canary} keeps its conversations for another {left_ms / 1000:.0f} s"
        )
    closed = _closes(rollout, State.ABORTED, "warm_ended", f"{canary} is out of the table")
    return takes_out(closed, observed.table, keep=False)


def _closes(rollout: Rollout, state: State, event: Event, reason: str) -> Move:
    ended = enters(rollout, state, event, reason).rollout
    return Move(replace(ended, closed=True), event, release=rollout.plan.canary)
