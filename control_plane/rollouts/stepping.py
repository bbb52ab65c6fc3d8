"""While the canary has a share: hold it, take it back, go on, or roll back."""

from msgspec.structs import replace

from control_plane.rollouts.analysis import outcome, told
from control_plane.rollouts.capacity import affordable, need, ready, shortage
from control_plane.rollouts.moves import (
    Move,
    Tick,
    edited,
    enters,
    is_as_written,
    pauses,
    rolls_back,
    shifts,
    stays,
)
from control_plane.rollouts.samples import merged
from control_plane.rollouts.state import Event, Observed, Rollout, State
from control_plane.rollouts.watch import counted, full_share, is_alone, looked, lost_for_good


def look_stepping(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    """The table first: who edits it has a reason, and nothing is decided over their head."""
    rollout = counted(rollout, observed, tick.passed_ms)
    if not is_as_written(rollout, observed.table):
        return pauses(rollout, "edited", "edited", edited(rollout, observed.table))
    gone = lost_for_good(rollout)
    if gone:
        return rolls_back(rollout, observed.table, "lost", gone)
    return _fleet(rollout, observed, tick) or _evidence(rollout, observed, tick)


def look_paused(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    """Weights stay. What would roll back still does, where the pause was not for that."""
    if rollout.pause not in {"manual", "inconclusive"} or rollout.resumes is not State.STEPPING:
        return stays(rollout, *rollout.reasons)
    reasons = rollout.reasons
    rollout = counted(rollout, observed, tick.passed_ms)
    if not is_as_written(rollout, observed.table):
        return stays(rollout, *reasons)
    gone = lost_for_good(rollout)
    if gone:
        return rolls_back(rollout, observed.table, "lost", gone)
    rollout, _ = looked(rollout, observed, is_last=False)
    if outcome(rollout.verdicts) == "fail":
        return _failed(rollout, observed)
    return stays(rollout, *reasons)


def _fleet(rollout: Rollout, observed: Observed, tick: Tick) -> Move | None:
    """What too few replicas lead to, or enough of them again. None: all is well."""
    if observed.canary is None:
        return _bounded(rollout, f"the replicas of {rollout.plan.canary} could not be read")
    have = ready(observed.canary, rollout.plan.canary_version)
    wanted = need(rollout, observed, full_share(rollout))
    # Demand that has grown since is the autoscaler's, and one that has fallen needs fewer.
    if have >= min(rollout.granted, need(rollout, observed, rollout.percent).replicas):
        if rollout.percent == full_share(rollout):
            return None
        if rollout.steady_ms > rollout.plan.rules.restore_ms:
            return _shares(rollout, observed, tick, full_share(rollout), "restored")
        return _bounded(
            rollout,
            f"the share is down to {rollout.percent} %, and back to {full_share(rollout)} % once "
            f"enough replicas are ready for {rollout.plan.rules.restore_ms / 1000:.0f} s",
            shortage(rollout, have, wanted),
        )
    carried = affordable(rollout, observed, have)
    retreats = not have or rollout.plan.rules.on_loss == "retreat"
    if retreats and carried < rollout.percent:
        return _shares(rollout, observed, tick, carried, "retreated")
    return _bounded(rollout, shortage(rollout, have, wanted))


def _shares(rollout: Rollout, observed: Observed, tick: Tick, percent: int, event: Event) -> Move:
    """Another share within the same step, whose time goes on: it stays bounded."""
    assert observed.table is not None
    assert observed.canary is not None
    have = ready(observed.canary, rollout.plan.canary_version)
    wanted = need(rollout, observed, full_share(rollout))
    granted = need(rollout, observed, percent).replicas if percent else 0
    reasons = (
        shortage(rollout, have, wanted),
        f"share of new conversations: {rollout.percent} % to {percent} %; bound ones stay",
    )
    given = replace(rollout, granted=granted)
    move = shifts(given, observed.table, percent, tick.now_ms, event, *reasons)
    kept = replace(move.rollout, waited_ms=rollout.waited_ms, lost_ms=rollout.lost_ms)
    return move._replace(rollout=kept)


def _evidence(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    rollout = replace(rollout, held_ms=rollout.held_ms + tick.passed_ms)
    rollout, missing = looked(rollout, observed, is_last=_is_over(rollout))
    if missing:
        return _bounded(rollout, missing)
    found = outcome(rollout.verdicts)
    if found == "fail":
        return _failed(rollout, observed)
    if found == "inconclusive":
        return _bounded(rollout, *_undecided(rollout))
    left_ms = rollout.plan.steps[rollout.step].least_ms - rollout.held_ms
    if left_ms > 0:
        return _bounded(
            rollout, f"every gate that decides has passed; {left_ms / 1000:.0f} s are left"
        )
    return _passed(rollout, observed, tick)


def _undecided(rollout: Rollout) -> tuple[str, ...]:
    return (
        f"look {rollout.look} does not decide; the next is when the sample has grown",
        *told(rollout.verdicts, "inconclusive"),
    )


def _failed(rollout: Rollout, observed: Observed) -> Move:
    """Back, unless the comparison is with another time and the rules leave it to people."""
    why = told(rollout.verdicts, "fail")
    is_error = any(
        v.metric == "errors" and v.outcome == "fail" and v.role != "told" for v in rollout.verdicts
    )
    if is_alone(rollout) and not is_error and rollout.plan.rules.when_alone == "pause":
        return pauses(
            rollout,
            "failed_alone",
            "failed_alone",
            "worse than the stable was in the step before, at another time",
            *why,
        )
    return rolls_back(rollout, observed.table, "failed", *why)


def _passed(rollout: Rollout, observed: Observed, tick: Tick) -> Move:
    """The next step, if its share can be carried; after the last one, promotion."""
    plan = rollout.plan
    why = told(rollout.verdicts, "pass")
    if rollout.step + 1 == len(plan.steps):
        return enters(
            rollout,
            State.PROMOTING,
            "promoted",
            f"every step has passed; {plan.stable} is kept for "
            f"{plan.rules.keep_warm_ms / 1000:.0f} s with the conversations bound to it",
            *why,
        )
    assert observed.sample is not None
    assert observed.table is not None
    assert observed.canary is not None
    percent = plan.steps[rollout.step + 1].percent
    have, wanted = ready(observed.canary, plan.canary_version), need(rollout, observed, percent)
    if have < wanted.replicas:
        return _bounded(
            rollout,
            f"step {rollout.step + 1} has passed; {percent} % cannot be carried yet",
            shortage(rollout, have, wanted),
        )
    rollout = replace(
        rollout,
        step=rollout.step + 1,
        baseline=merged(rollout.baseline, observed.sample.stable),
        granted=wanted.replicas,
    )
    reason = f"step {rollout.step + 1} of {len(plan.steps)}: {percent} % of new conversations"
    return shifts(rollout, observed.table, percent, tick.now_ms, "step_passed", reason, *why)


def _bounded(rollout: Rollout, *reasons: str) -> Move:
    """Waits, but not for ever."""
    if not _is_over(rollout):
        return stays(rollout, *reasons)
    bound = rollout.plan.steps[rollout.step].most_ms
    return pauses(
        rollout,
        "inconclusive",
        "inconclusive",
        f"step {rollout.step + 1} has not been decided in {bound / 1000:.0f} s",
        *reasons,
    )


def _is_over(rollout: Rollout) -> bool:
    """Whether the step has had all of its time."""
    return rollout.waited_ms >= rollout.plan.steps[rollout.step].most_ms
