"""What a rollout is asked to do: two sides, steps of share, what is tolerated, and its bounds."""

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

import msgspec

from core.route_table import EVERYBODY, Fault

Metric = Literal[
    "errors",  # failed, expired and never begun, of all but those that left or were lost
    "truncated",  # ended by length
    "filtered",  # ended by a safety filter
    "refused",  # the model said no, where that is measured
    "cancelled",  # the client left
    "unfinished",  # began long enough ago, and is still open
    "first_token_p95",  # milliseconds
    "inter_token_p95",  # milliseconds
    "output_tokens",  # the shape of their distribution, as the largest gap between both
    "tokens_mean",  # prompt and output, of a request
    "cost_mean",  # micro-units, of a request
]
METRICS: tuple[Metric, ...] = get_args(Metric)
Role = Literal[
    "decides",  # a failure rolls back, and a step needs it to pass
    "guards",  # a failure rolls back, a step goes on without its pass
    "told",  # shown, never acted on
]

STEPS_MAX = 20
WHOLE = 100
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Millis = Annotated[int, msgspec.Meta(ge=0, le=30 * DAY_MS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Chance = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of new conversations, held for at least `least_ms` and `least_requests` of each side.

    Without a conclusion after `most_ms` it pauses.
    """

    percent: Annotated[int, msgspec.Meta(ge=1, le=WHOLE)]
    least_ms: Millis = 5 * 60_000
    most_ms: Millis = 2 * HOUR_MS
    least_requests: Count = 200


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much worse than the stable's a metric of the canary may be.

    Tolerated is `stable * (1 + ratio) + plus`, `plus` in the metric's own unit: a share of one
    for rates, milliseconds, tokens, micro-units. For `output_tokens` it is the distance of the
    two distributions, from 0 to 1, and `ratio` says nothing.
    """

    metric: Metric
    ratio: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    plus: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    role: Role = "decides"


GATES = (
    Gate(metric="errors", ratio=0.1, plus=0.01),
    Gate(metric="first_token_p95", ratio=0.3, plus=50.0),
    Gate(metric="inter_token_p95", ratio=0.25, plus=5.0),
    Gate(metric="output_tokens", plus=0.15, role="guards"),
    Gate(metric="truncated", ratio=0.1, plus=0.03, role="guards"),
    Gate(metric="filtered", ratio=0.1, plus=0.02, role="guards"),
    Gate(metric="refused", ratio=0.1, plus=0.03, role="guards"),
    Gate(metric="unfinished", ratio=0.5, plus=0.1, role="guards"),
    Gate(metric="tokens_mean", ratio=0.25, plus=10.0, role="guards"),
    Gate(metric="cost_mean", ratio=0.25, role="guards"),
    Gate(metric="cancelled", ratio=0.25, plus=0.03, role="told"),
)


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of a whole rollout.

    `false_alarm` is the chance that any gate ever fails a canary which is within what is
    tolerated; `missed` that a step passes one metric beyond it. `replica_rps` is what one
    replica of the canary carries, 0 takes what was measured. `when_alone` is what a failure
    against the stable of an earlier step does, at 100 %, where there is no other to compare with;
    errors roll back in any case.
    """

    false_alarm: Chance = 0.05
    missed: Chance = 0.1
    look_growth: Annotated[float, msgspec.Meta(ge=1.05, le=10)] = 2.0  # of requests between looks
    least_replicas: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    replica_rps: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    headroom: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.2  # of demand, to be carried
    on_loss: Literal["hold", "retreat"] = "retreat"
    when_alone: Literal["pause", "roll_back"] = "pause"
    lost_ms_max: Millis = 60_000  # without any replica of the canary, then back to the stable
    restore_ms: Millis = 60_000  # with enough replicas again, before a share taken back is given
    stage_ms_max: Millis = 2 * HOUR_MS
    keep_warm_ms: Millis = HOUR_MS  # of the side that lost, and of conversations bound to it
    settle_ms: Millis = 30_000  # the newest requests are not judged yet: slow ones are still open
    tick_ms_max: Annotated[int, msgspec.Meta(ge=1, le=HOUR_MS)] = 15_000  # counted for one look


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One public name's move from `stable` to `canary`, which are deployments."""

    model: Name
    stable: Name
    canary: Name
    stable_version: Name
    canary_version: Name
    steps: tuple[Step, ...] = (Step(percent=5), Step(percent=50), Step(percent=WHOLE))
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = EVERYBODY
    gates: tuple[Gate, ...] = GATES
    rules: Rules = Rules()

    @property
    def sides(self) -> tuple[str, str]:
        """The canary's deployment and the stable's."""
        return self.canary, self.stable


def fault(plan: Plan) -> Fault | None:
    """The first reason against a plan by itself; whether what it names exists is not asked."""
    return next(_faults(plan), None)


def _faults(plan: Plan) -> Iterator[Fault]:
    yield from _side_faults(plan)
    yield from _step_faults(plan)
    yield from _gate_faults(plan)
    if plan.rules.lost_ms_max < 2 * plan.rules.tick_ms_max:
        # One look that came late would be taken for a loss that lasted.
        yield Fault("lost_ms_max is at least twice tick_ms_max", "rules.lost_ms_max")


def _side_faults(plan: Plan) -> Iterator[Fault]:
    if plan.stable == plan.canary:
        yield Fault("a canary is another deployment than the stable", "canary")
    if plan.stable_version == plan.canary_version:
        yield Fault("both sides serve one version: their requests cannot be told apart", "canary")


def _step_faults(plan: Plan) -> Iterator[Fault]:
    if not plan.steps:
        yield Fault("a rollout has steps", "steps")
    elif len(plan.steps) > STEPS_MAX:
        yield Fault(f"a rollout has at most {STEPS_MAX} steps", "steps")
    elif plan.steps[-1].percent != WHOLE:
        yield Fault(f"the last step is {WHOLE} percent", f"steps.{len(plan.steps) - 1}.percent")
    elif len(plan.steps) == 1:
        yield Fault("an earlier step leaves the stable a share, to compare with", "steps.0.percent")
    for at, step in enumerate(plan.steps):
        if at and step.percent <= plan.steps[at - 1].percent:
            yield Fault("each step is a larger share than the one before", f"steps.{at}.percent")
        if step.most_ms <= step.least_ms:
            yield Fault("most_ms is longer than least_ms", f"steps.{at}.most_ms")


def _gate_faults(plan: Plan) -> Iterator[Fault]:
    for at, gate in enumerate(plan.gates):
        if gate.metric in {earlier.metric for earlier in plan.gates[:at]}:
            yield Fault(f"{gate.metric} has a gate already", f"gates.{at}.metric")
        if gate.metric == "output_tokens" and not 0 < gate.plus < 1:
            yield Fault(
                "the distance of two distributions lies between 0 and 1", f"gates.{at}.plus"
            )
        if gate.role != "told" and not (gate.ratio or gate.plus):
            # Equal sides would never pass, and fail as often as chance allows.
            yield Fault("something must be tolerated", f"gates.{at}.plus")
    if not any(gate.role == "decides" for gate in plan.gates):
        yield Fault("at least one gate decides", "gates")
