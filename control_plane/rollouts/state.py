"""Where a rollout stands, and what has moved it. All of it is kept; nothing else is remembered.

pending ─► staging ─► stepping ─► promoting ─► promoted
   │          │          │  ▲         │
   │          ├─► paused ◄──┘◄────────┤      and back by `resume`
   │          │      │                │
   └──────────┴──────┴─► aborted      └─► rolling_back ─► rolled_back
"""

from enum import StrEnum
from typing import Literal

import msgspec

from control_plane.rollouts.plan import Metric, Plan, Role
from control_plane.rollouts.samples import Sample, Side
from core.fleet import ReplicaState
from core.route_table import RouteTable


class State(StrEnum):
    """Of a rollout."""

    PENDING = "pending"  # another rollout has the name
    STAGING = "staging"  # no weight yet: waiting for the canary's replicas
    STEPPING = "stepping"
    PAUSED = "paused"  # weights stay; `pause` says why
    PROMOTING = "promoting"  # all new conversations to the canary; the stable kept warm
    PROMOTED = "promoted"
    ROLLING_BACK = "rolling_back"  # the table without the canary is written, not yet seen
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"  # no new conversation for the canary; `closed` once it is out of the table


ENDS = (State.PROMOTED, State.ROLLED_BACK, State.ABORTED)

Pause = Literal["", "manual", "inconclusive", "edited", "staging", "failed_alone"]
Event = Literal[
    "started", "gates_open", "step_passed", "promoted", "failed", "lost", "retreated", "restored",
    "inconclusive", "edited", "staging_bound", "failed_alone", "warm_ended", "seen", "rewritten",
    "promote", "pause", "resume", "abort", "rollback",
]  # fmt: skip
Command = Literal["promote", "pause", "resume", "abort", "rollback"]
Outcome = Literal["pass", "fail", "inconclusive"]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a side's metric is, and between what it lies. `size` is the effective sample's."""

    low: float
    value: float
    high: float
    size: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One gate at one look. `reason` is a sentence with the numbers; None: not measured."""

    metric: Metric
    role: Role
    outcome: Outcome
    reason: str
    test: str
    canary: Bounds | None = None
    stable: Bounds | None = None


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known.

    Durations are counted look by look, at most `tick_ms_max` for each, so that a clock's jump
    is worth no more than one look.
    """

    id: str
    plan: Plan
    state: State = State.PENDING
    step: int = 0  # of the plan, from 0; the one that is or will be taken
    percent: int = 0  # what is written of the canary's share
    base: RouteTable | None = None  # the table as found, without the canary; None: not touched yet
    over_version: int = 0  # of the table that its last write replaced; no older one is believed
    seen_ms: int = 0  # of the last look
    held_ms: int = 0  # counted in this state or step, while nothing holds it
    waited_ms: int = 0  # counted in this state or step, whatever holds it
    lost_ms: int = 0  # counted without any replica of the canary; 0: there are some
    steady_ms: int = 0  # counted with enough replicas for the whole step; 0: there are not
    began_ms: int = 0  # of the window that is measured; 0: none is
    windows: int = 0  # opened so far: each has a part of the chance of a false alarm
    look: int = 0  # the last one taken in this window
    verdicts: tuple[Verdict, ...] = ()  # of that look
    baseline: Side | None = None  # the stable's, of all steps that passed beside it
    granted: int = 0  # replicas of the canary that its present share was given on
    stable_replicas: int = 0  # the most that were ready: what carried all of the traffic
    pause: Pause = ""
    resumes: State = State.STAGING  # what a pause came out of
    closed: bool = False  # nothing is left to do
    reasons: tuple[str, ...] = ()  # why it stands as it does


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One line of its history, for the audit log."""

    event: Event
    before: State
    after: State
    percent: int  # the canary's share from now on
    reasons: tuple[str, ...]
    at_ms: int


class ReplicaSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of a side, as the fleet knows it. A READY one has been warmed."""

    name: str
    state: ReplicaState
    version: str


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """The world at a look. None: could not be read, which is never taken for zero."""

    table: RouteTable | None = None  # the name's own table; here None is: there is none
    canary: tuple[ReplicaSeen, ...] | None = None
    stable: tuple[ReplicaSeen, ...] | None = None
    demand_rps: float | None = None  # requests per second under the name, both sides together
    replica_rps: float | None = None  # what one replica of the canary was measured to carry
    sample: Sample | None = None  # of `machine.window`
    busy_with: str = ""  # another rollout of this name that has not closed


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A floor for a deployment's replicas while a rollout needs them."""

    deployment: str
    replicas: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to keep and what to do, in one transaction or not at all.

    `write` replaces the table that was observed, if that still has its version. `release` names
    a deployment which this rollout needs no longer.
    """

    rollout: Rollout
    transitions: tuple[Transition, ...] = ()
    write: RouteTable | None = None
    wanted: tuple[Wanted, ...] = ()
    release: str = ""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Why a command is not followed: a sentence."""

    message: str
