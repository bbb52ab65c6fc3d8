"""What a replica is good for, judged by what was last heard of it. Pure.

    starting ─► loading ─► warming ─► ready ◄─► sleeping          draining ─► stopped
    └─────────── COMING ────────────┘ SERVING   ASLEEP            LEAVING     GONE (or lost)

Health is progress: a ready replica that has work and makes no step is suspected, then stuck.
An open port proves nothing, and neither does a closed one: a long prefill or a compile goes on
behind either. Silence is not judged here but by the reaper, who asks before it believes.
"""

from enum import StrEnum

import msgspec

from core.fleet import ReplicaState


class Condition(StrEnum):
    """What a replica counts as."""

    COMING = "coming"
    SERVING = "serving"
    SUSPECT = "suspect"  # still serving
    ASLEEP = "asleep"
    LEAVING = "leaving"
    STUCK = "stuck"  # to be replaced
    GONE = "gone"


AWAKE = frozenset({Condition.COMING, Condition.SERVING, Condition.SUSPECT})


class LifeRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds, in milliseconds."""

    stalled_ms: int = 180_000  # without a step, with work; half of it is suspicious
    start_ms: int = 900_000  # from its start to ready


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the registry, as far as its life is concerned."""

    replica_id: str
    deployment: str
    state: ReplicaState
    busy: int = 0  # requests that run or wait there
    silent_ms: int = 0
    stalled_ms: int = 0
    started_ms: int | None = None
    ready_ms: int | None = None
    drain_reason: str = ""
    drain_deadline_ms: int | None = None

    @property
    def serves(self) -> bool:
        """Whether it is in the state of those that take work."""
        return self.state is ReplicaState.READY

    @property
    def drains(self) -> bool:
        """Whether it takes no more work, and why is known."""
        return self.state is ReplicaState.DRAINING or self.drain_deadline_ms is not None


class Judgement(msgspec.Struct, frozen=True):
    """And the reason, for a person."""

    condition: Condition
    reason: str


def judge(replica: Replica, *, now_ms: int, rules: LifeRules) -> Judgement:
    """The first of these that holds."""
    state = replica.state
    if state in (ReplicaState.STOPPED, ReplicaState.LOST):
        return Judgement(Condition.GONE, f"it is {state}")
    if replica.drains:
        return Judgement(Condition.LEAVING, replica.drain_reason or "its worker drains")
    if state is ReplicaState.SLEEPING:
        return Judgement(Condition.ASLEEP, "it sleeps")
    if state is ReplicaState.READY:
        return _by_progress(replica, rules)
    return _by_age(replica, now_ms, rules)


def _by_progress(replica: Replica, rules: LifeRules) -> Judgement:
    told = f"no step for {replica.stalled_ms / 1000:.0f} s with {replica.busy} requests"
    if replica.stalled_ms > rules.stalled_ms:
        return Judgement(Condition.STUCK, told)
    if replica.stalled_ms > rules.stalled_ms // 2:
        return Judgement(Condition.SUSPECT, told)
    return Judgement(Condition.SERVING, "it is ready")


def _by_age(replica: Replica, now_ms: int, rules: LifeRules) -> Judgement:
    # One that was ready before is waking, or takes on another version: its age says nothing.
    if replica.ready_ms is None and replica.started_ms is not None:
        age_ms = now_ms - replica.started_ms
        if age_ms > rules.start_ms:
            return Judgement(Condition.STUCK, f"not ready {age_ms / 1000:.0f} s after its start")
    return Judgement(Condition.COMING, f"it is {replica.state}")
