"""A rollout at one look, and an operator's word: total over every state and whatever is seen.

The shell, every few seconds: `window` → measure → `advance` → keep `Decision.rollout`, append
its transitions, make its `write` with `if_version` of the observed table: one transaction.
"""

from control_plane.rollouts.plan import Plan
from control_plane.rollouts.samples import Window
from control_plane.rollouts.state import Command, Decision, Observed, Refused, Rollout


def begin(rollout_id: str, plan: Plan, now_ms: int) -> Rollout:
    """A new one, pending. The plan has no `fault`."""
    return Rollout(id=rollout_id, plan=plan, seen_ms=now_ms)


def window(rollout: Rollout, now_ms: int) -> Window | None:
    """What to measure before the next look; None: nothing."""
    raise NotImplementedError


def advance(rollout: Rollout, observed: Observed, now_ms: int) -> Decision:
    """The next look. With the same input again it changes nothing more."""
    raise NotImplementedError


def command(
    rollout: Rollout, word: Command, observed: Observed, now_ms: int, *, why: str = ""
) -> Decision | Refused:
    """An operator's word. Only `observed.table` and, for promote, the replicas are asked for.

    `rollback` takes the canary out of the table, which moves its conversations; `abort` only
    keeps new ones from it. `promote` ends the analysis, not the gate of capacity.
    """
    raise NotImplementedError
