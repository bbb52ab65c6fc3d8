"""Builders with defaults: a test says only what it is about."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from control_plane.scaling.decide import Decision, decide
from control_plane.scaling.policy import ScalingPolicy, fault
from control_plane.scaling.signals import Missing, Observed, Phase, ReplicaSignal, Signals
from control_plane.scaling.state import State

START_MS = 1_800_000_000_000
ROUND_MS = 5_000
RATE = 1_000  # work a second that a replica does


def a_policy(**changes: Any) -> ScalingPolicy:
    fields: dict[str, Any] = {
        "deployment": "d",
        "min_replicas": 1,
        "max_replicas": 10,
        "work_rate_prior": RATE,
        "cold_start_prior_ms": 60_000,
    }
    return ScalingPolicy(**(fields | changes))


def replicas(
    ready: int = 0, coming: int = 0, asleep: int = 0, *, coming_ms: int = 0, used: float = 0.0
) -> tuple[ReplicaSignal, ...]:
    phases = [Phase.READY] * ready + [Phase.COMING] * coming + [Phase.ASLEEP] * asleep
    return tuple(
        ReplicaSignal(
            replica=f"r{place}",
            phase=phase,
            phase_ms=coming_ms if phase is Phase.COMING else 0,
            kv_use=Observed(used),
            slots_use=Observed(used),
        )
        for place, phase in enumerate(phases)
    )


def a_look(*, ready: int = 1, work: float = 0.0, queued: float = 0, **changes: Any) -> Signals:
    """`work` arrives and is served, as far as the replicas can."""
    able = ready * RATE
    fields: dict[str, Any] = {
        "replicas": replicas(ready, used=min(1.0, work / able) if able else 0.0),
        "queued": Observed(queued),
        "queued_any": Observed(queued),
        "queued_work": Observed(queued * 100),
        "wait_ms": Observed(queued * 100),
        "ttft_ms": Observed(100.0),
        "arrived": Observed(work),
        "served": Observed(min(work, able)),
        "cold_start_ms": Observed(60_000, 10**9),
    }
    return Signals(**(fields | changes))


def rounds(
    policy: ScalingPolicy,
    state: State,
    look: Any,
    count: int,
    now_ms: int = START_MS,
    *,
    every_ms: int = ROUND_MS,
) -> list[Decision]:
    """So many rounds of what `look(decision or None)` sees."""
    told: list[Decision] = []
    for _ in range(count):
        told.append(decide(policy, state, look(told[-1] if told else None), now_ms))
        state = told[-1].state
        now_ms += every_ms
    return told


def settled(policy: ScalingPolicy, work: float, ready: int, count: int = 200) -> State:
    """After a long time of that."""
    return rounds(policy, State(), lambda _: a_look(ready=ready, work=work), count)[-1].state


def blind(signals: Signals, *names: str) -> Signals:
    """With those of them missing."""
    gone = dict.fromkeys(names, Missing("renamed"))
    return msgspec.structs.replace(signals, **gone)


observations = st.one_of(
    st.builds(Missing, st.just("away")),
    st.builds(
        Observed,
        st.one_of(st.floats(0, 1e6), st.sampled_from([-1.0, float("nan"), float("inf")])),
        st.integers(0, 100_000),
    ),
)
replica_signals = st.builds(
    ReplicaSignal,
    replica=st.text("abc", min_size=1, max_size=3),
    phase=st.sampled_from(list(Phase)),
    phase_ms=st.integers(0, 10**7),
    kv_use=observations,
    slots_use=observations,
)
any_signals = st.builds(
    Signals,
    replicas=st.lists(replica_signals, max_size=6).map(tuple),
    **dict.fromkeys(
        (
            "queued",
            "queued_any",
            "queued_work",
            "wait_ms",
            "ttft_ms",
            "arrived",
            "served",
            "cold_start_ms",
            "wake_ms",
        ),
        observations,
    ),
)
policies = st.builds(
    ScalingPolicy,
    deployment=st.just("d"),
    min_replicas=st.integers(0, 4),
    max_replicas=st.integers(1, 12),
    warm_replicas=st.integers(0, 3),
    replica_hour_micro=st.sampled_from([0, 1_000]),
    budget_hour_micro=st.sampled_from([0, 7_000]),
    work_rate_prior=st.sampled_from([0, RATE]),
    season_ms=st.sampled_from([0, 86_400_000]),
).filter(lambda policy: fault(policy) is None)
