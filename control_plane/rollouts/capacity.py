"""Whether a canary's replicas are there, are right, and carry a share of the traffic."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from control_plane.rollouts.plan import WHOLE
from control_plane.rollouts.state import Observed, ReplicaSeen, Rollout
from core.fleet import ReplicaState


class Need(NamedTuple):
    """Replicas of the canary for a share, and a sentence on why so many."""

    replicas: int
    why: str


def ready(replicas: Sequence[ReplicaSeen], version: str) -> int:
    """Those that take requests and serve what they should."""
    return sum(r.state is ReplicaState.READY and r.version == version for r in replicas)


def strangers(replicas: Sequence[ReplicaSeen], version: str) -> tuple[str, ...]:
    """Those that run anything else, in a sentence each."""
    over = (ReplicaState.STOPPED, ReplicaState.LOST)
    return tuple(
        f"{r.name} serves version {r.version}, not {version}"
        for r in replicas
        if r.version != version and r.state not in over
    )


def need(rollout: Rollout, observed: Observed, percent: int) -> Need:
    """By what a replica carries, where that and the demand are known; else by the stable's."""
    plan = rollout.plan
    rules = plan.rules
    carried = _usable(rules.replica_rps) or _usable(observed.replica_rps)
    demand = observed.demand_rps
    if carried and demand is not None and math.isfinite(demand) and demand >= 0:
        share = demand * percent / WHOLE * rules.headroom
        source = "as set" if _usable(rules.replica_rps) else "as measured"
        why = (
            f"{percent} % of {demand:.2f} requests a second with headroom {rules.headroom:.2f} is "
            f"{share:.2f}; a replica carries {carried:.2f}, {source}"
        )
        return Need(max(rules.least_replicas, math.ceil(share / carried)), why)
    why = (
        f"{percent} % of the {rollout.stable_replicas} replicas that carry everything on "
        f"{plan.stable}; what one of {plan.canary} carries is not known"
    )
    return Need(
        max(rules.least_replicas, math.ceil(rollout.stable_replicas * percent / WHOLE)), why
    )


def _usable(rate: float | None) -> float:
    """A rate that says something, else 0."""
    return rate if rate is not None and math.isfinite(rate) and rate > 0 else 0.0


def shortage(rollout: Rollout, have: int, wanted: Need) -> str:
    """The sentence that holds a share back."""
    return f"{have} of {wanted.replicas} replicas of {rollout.plan.canary} are ready ({wanted.why})"


def affordable(rollout: Rollout, observed: Observed, have: int) -> int:
    """The largest share, of the plan's up to the present step or 0, that so many carry."""
    steps = rollout.plan.steps[: rollout.step + 1]
    shares = [
        step.percent for step in steps if have >= need(rollout, observed, step.percent).replicas
    ]
    return max(shares, default=0) if have else 0
