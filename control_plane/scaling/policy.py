"""What an operator wants of a model's replicas: bounds, objectives, and what they may cost.

A policy is for one deployment, or for each deployment of one model. Two policies never govern
one deployment: neither would know what the other did.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec

REPLICAS_MAX = 1_000
MS_MAX = 7 * 86_400_000
MICRO_MAX = 2**53 - 1
WORK_OF_AN_OUTPUT_TOKEN = 2  # and 1 of an uncached prompt token, as in the fair queue

_Count = Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]
_Micro = Annotated[int, msgspec.Meta(ge=0, le=MICRO_MAX)]
_Ms = Annotated[int, msgspec.Meta(ge=1, le=MS_MAX)]
_Percent = Annotated[int, msgspec.Meta(ge=1, le=100)]


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`fault` says what is wrong with one. A target is a `deployment` or a `model`.

    Work is in tokens as the fair queue counts them: 1 for an uncached prompt token, 2 for an
    output token.
    """

    deployment: str = ""
    model: str = ""
    min_replicas: _Count = 1
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)]
    warm_replicas: _Count = 0  # asleep, to be woken at once

    ttft_objective_ms: _Ms = 2_000  # p95
    wait_objective_ms: _Ms = 1_000  # for a place in the pool
    kv_ceiling_percent: _Percent = 85
    load_target_percent: _Percent = 75  # of what a replica was measured to do; the rest is room

    replica_hour_micro: _Micro = 0
    budget_hour_micro: _Micro = 0  # 0 is none

    cold_start_prior_ms: _Ms = 120_000  # until one was measured
    wake_prior_ms: _Ms = 5_000
    work_rate_prior: Annotated[int, msgspec.Meta(ge=0)] = 0  # of a replica, a second; 0: unknown
    start_timeout_ms: _Ms = 600_000  # then a replica that is not ready is counted lost

    panic_window_ms: _Ms = 30_000
    stable_window_ms: _Ms = 180_000
    down_window_ms: _Ms = 300_000  # nothing is stopped that its peak would have needed
    stale_ms: _Ms = 30_000  # an older signal is told, and not acted on
    season_ms: Annotated[int, msgspec.Meta(ge=0, le=MS_MAX)] = 0  # 86,400,000 is a day; 0: none

    @property
    def target(self) -> str:
        """Its name among policies."""
        return f"deployment:{self.deployment}" if self.deployment else f"model:{self.model}"

    @property
    def affordable(self) -> int:
        """How many replicas the budget bears, beside those kept warm."""
        if not self.budget_hour_micro or not self.replica_hour_micro:
            return REPLICAS_MAX
        return self.budget_hour_micro // self.replica_hour_micro - self.warm_replicas

    @property
    def ceiling(self) -> int:
        """The most that may ever be wanted."""
        return min(self.max_replicas, self.affordable)


def fault(policy: ScalingPolicy) -> tuple[str, str] | None:
    """The field that makes it no policy, and why; None for a sound one."""
    kept = max(1, policy.min_replicas)
    faults = (
        (
            bool(policy.deployment) == bool(policy.model),
            "deployment",
            "name a deployment or a model, and not both",
        ),
        (
            policy.min_replicas > policy.max_replicas,
            "min_replicas",
            f"{policy.min_replicas} is more than max_replicas",
        ),
        (
            bool(policy.budget_hour_micro) and not policy.replica_hour_micro,
            "replica_hour_micro",
            "a budget needs what a replica costs",
        ),
        (
            policy.affordable < kept,
            "budget_hour_micro",
            f"{kept + policy.warm_replicas} replicas would cost more than that",
        ),
        (
            policy.panic_window_ms > policy.stable_window_ms,
            "panic_window_ms",
            "the panic window is longer than the stable one",
        ),
        (
            0 < policy.season_ms < 4 * policy.stable_window_ms,
            "season_ms",
            "a season is shorter than four stable windows",
        ),
    )
    return next(((field, why) for wrong, field, why in faults if wrong), None)


def rival(policy: ScalingPolicy, others: Iterable[ScalingPolicy], model: str) -> str | None:
    """The target of another policy that would govern the same replicas, if there is one.

    `model` is the policy's own, or its deployment's; `others` are those of that model and of
    its deployments.
    """
    for other in others:
        if other.target == policy.target:
            continue
        if policy.model or other.model == model:
            return other.target
    return None
