"""What is always watched while the canary has weight: its replicas, and the evidence."""

from msgspec.structs import replace

from control_plane.rollouts.analysis import judge, look_due
from control_plane.rollouts.capacity import need, ready
from control_plane.rollouts.plan import WHOLE
from control_plane.rollouts.samples import unsound
from control_plane.rollouts.state import Observed, Rollout


def counted(rollout: Rollout, observed: Observed, passed_ms: int) -> Rollout:
    """With the time of one more look, and what its replicas make of it.

    Being lost, or steady, counts from the look that first saw it, not from the one before.
    """
    rollout = replace(rollout, waited_ms=rollout.waited_ms + passed_ms)
    if observed.stable is not None:
        carrying = ready(observed.stable, rollout.plan.stable_version)
        rollout = replace(rollout, stable_replicas=max(rollout.stable_replicas, carrying))
    if observed.canary is None:
        return rollout
    have = ready(observed.canary, rollout.plan.canary_version)
    enough = have >= need(rollout, observed, full_share(rollout)).replicas
    return replace(
        rollout,
        lost_ms=_lasting(rollout.lost_ms, passed_ms, holds=not have),
        steady_ms=_lasting(rollout.steady_ms, passed_ms, holds=enough),
    )


def _lasting(before_ms: int, passed_ms: int, *, holds: bool) -> int:
    if not holds:
        return 0
    return before_ms + passed_ms if before_ms else 1


def full_share(rollout: Rollout) -> int:
    """What the present step gives the canary, whatever it has been given of it."""
    return rollout.plan.steps[rollout.step].percent


def lost_for_good(rollout: Rollout) -> str:
    """Why there is nothing to wait for any more, or nothing."""
    bound = rollout.plan.rules.lost_ms_max
    if rollout.lost_ms <= bound:
        return ""
    return (
        f"{rollout.plan.canary} has had no ready replica for {rollout.lost_ms / 1000:.0f} s; "
        f"{bound / 1000:.0f} s are tolerated"
    )


def looked(rollout: Rollout, observed: Observed, *, is_last: bool) -> tuple[Rollout, str]:
    """With the verdicts of a look, if one is due, or why there is nothing to look at.

    The last one before a step's time is over is due in any case, with all there is by then.
    """
    sample = observed.sample
    if not rollout.began_ms:
        return rollout, "nothing is measured while the canary's share is withdrawn"
    if sample is None:
        return rollout, "there are no measurements of this step"
    if sample.window.from_ms != rollout.began_ms:
        return rollout, "the measurements are of another window"
    problem = unsound(sample)
    if problem is not None:
        return rollout, f"the measurements cannot be true: {problem}"
    # By what began: a side on which everything hangs has something to show as well.
    stable, fewest = sample.stable, min(sample.canary.begun, sample.stable.begun)
    if is_alone(rollout):
        assert rollout.baseline is not None
        stable, fewest = rollout.baseline, sample.canary.begun
    step = rollout.plan.steps[rollout.step]
    due = look_due(fewest, step.least_requests, rollout.plan.rules.look_growth)
    if due and is_last:
        due = max(due, rollout.look + 1)
    if due > rollout.look:
        verdicts = judge(rollout.plan, sample.canary, stable, window=rollout.windows, look=due)
        rollout = replace(rollout, look=due, verdicts=verdicts)
    if not rollout.look:
        return rollout, (
            f"{sample.canary.requests} requests of the canary and {stable.requests} of the stable "
            f"have ended, {sample.canary.open} and {sample.stable.open} are open; "
            f"{step.least_requests} of each are needed"
        )
    return rollout, ""


def is_alone(rollout: Rollout) -> bool:
    """Whether the stable gets no new conversation to compare with."""
    return full_share(rollout) == WHOLE
