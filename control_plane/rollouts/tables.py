"""The route table of a rollout: at each share, and with either side out of it.

A conversation stays with its target while that is in the table, at weight 0 too. So a share is
a matter of weights, and to move conversations is to take their target out. Everything else in a
table is kept as it is; weights keep their proportions.
"""

import math
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from control_plane.rollouts.plan import WHOLE, Plan
from core.route_table import TARGETS_MAX, WEIGHT_MAX, RouteTable, Target


def unfit(table: RouteTable | None, plan: Plan) -> str | None:
    """Why a rollout cannot begin on it, or None."""
    if table is None:
        return f"there is no route table for {plan.model}"
    return next(_unfit(table, plan), None)


def _unfit(table: RouteTable, plan: Plan) -> Iterator[str]:
    ours = [target for target in table.targets if target.deployment == plan.stable]
    if table.alias:
        yield f"{plan.model} is an alias of {table.alias}"
    if leads_to(table, plan.canary):
        yield f"the table of {plan.model} leads to {plan.canary} already"
    if not any(target.weight for target in ours):
        yield f"{plan.stable} has no weight in the table of {plan.model}"
    if len(table.targets) + len(ours) > TARGETS_MAX:
        yield f"the table of {plan.model} has no room: at most {TARGETS_MAX} targets"
    if any(target.weight > WEIGHT_MAX // WHOLE for target in table.targets):
        yield f"a weight is above {WEIGHT_MAX // WHOLE}, which cannot be split to the percent"


def leads_to(table: RouteTable, deployment: str) -> bool:
    """As a target or as a fallback."""
    fallbacks = (fallback.target for fallback in table.fallbacks)
    return any(target.deployment == deployment for target in (*table.targets, *fallbacks))


def split(base: RouteTable, plan: Plan, percent: int) -> RouteTable:
    """The canary beside the stable, under the same conditions, with this part of its weight."""
    targets: list[Target] = []
    for target in base.targets:
        if target.deployment == plan.stable:
            mine = target.weight * percent
            targets.append(
                # It stood alone until now, so what began and is bound to nobody is its own.
                replace(target, weight=target.weight * WHOLE - mine, keeps_begun=True)
            )
            targets.append(replace(target, deployment=plan.canary, weight=mine))
        else:
            targets.append(replace(target, weight=target.weight * WHOLE))
    return replace(base, targets=_reduced(targets))


def promoted(base: RouteTable, plan: Plan) -> RouteTable:
    """The canary in the stable's place everywhere, fallbacks too: nothing needs the stable."""

    def moved(target: Target) -> Target:
        if target.deployment != plan.stable:
            return target
        return replace(target, deployment=plan.canary)

    return replace(
        base,
        targets=tuple(moved(target) for target in base.targets),
        fallbacks=tuple(replace(f, target=moved(f.target)) for f in base.fallbacks),
    )


def returned(table: RouteTable, plan: Plan, *, keep: bool) -> RouteTable:
    """All the canary's weight with the stable again, in any table, however it was edited.

    `keep` leaves the canary at weight 0, for the conversations bound to it.
    """
    targets: list[Target] = [t for t in table.targets if t.deployment != plan.canary]
    for canary in (t for t in table.targets if t.deployment == plan.canary):
        heir = replace(canary, deployment=plan.stable)
        for at, target in enumerate(targets):
            if target.deployment == plan.stable and target.when == canary.when:
                heir = replace(target, weight=min(WEIGHT_MAX, target.weight + canary.weight))
                targets[at] = heir
                break
        else:
            targets.append(heir)
        if keep:
            targets.append(replace(canary, weight=0))
    fallbacks = table.fallbacks
    if not keep:
        fallbacks = tuple(f for f in fallbacks if f.target.deployment != plan.canary)
        targets = [
            replace(t, keeps_begun=t.keeps_begun and t.deployment != plan.stable) for t in targets
        ]
    return replace(table, targets=_reduced(targets), fallbacks=fallbacks)


def same(table: RouteTable | None, wanted: RouteTable) -> bool:
    """Whether it says the same, whoever wrote it and when."""
    return table is not None and table == replace(
        wanted, version=table.version, created_ms=table.created_ms
    )


def _reduced(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Weights as small as their proportions allow."""
    targets = tuple(targets)
    divisor = math.gcd(*(target.weight for target in targets)) or 1
    return tuple(replace(target, weight=target.weight // divisor) for target in targets)
