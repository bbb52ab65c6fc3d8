"""What is seen of a deployment, as signals: facts from Postgres and Valkey, judged by nobody yet.

Requests do not say to which of several deployments of one version in a region they went, so
each of those is taken to have had an equal part.
"""

from collections.abc import Iterable

import msgspec

from control_plane.scaling.policy import WORK_OF_AN_OUTPUT_TOKEN
from control_plane.scaling.signals import (
    Missing,
    Observed,
    Phase,
    ReplicaSignal,
    Signal,
    Signals,
)
from core.fleet import ReplicaState
from store.pool_view import PoolView, Unknown
from store.scaling import ColdStarts, ReplicaFacts, Traffic

_PHASES = {
    ReplicaState.STARTING: Phase.COMING,
    ReplicaState.LOADING: Phase.COMING,
    ReplicaState.WARMING: Phase.COMING,
    ReplicaState.READY: Phase.READY,
    ReplicaState.SLEEPING: Phase.ASLEEP,
}
NEVER_BEAT = Missing("it has not been heard of")


def signals_of(
    replicas: Iterable[ReplicaFacts],
    pool: PoolView | Unknown,
    traffic: Traffic | Unknown,
    starts: ColdStarts,
    *,
    window_ms: int,
    sharing: int = 1,
    filling: int = 0,
) -> Signals:
    """All of it for one deployment; so many of those coming, the youngest, are to sleep."""
    return Signals(
        replicas=_filled([_replica(facts) for facts in replicas], filling),
        cold_start_ms=_cold_start(starts),
        **_worked(traffic, window_ms / 1000 * max(1, sharing)),
        **_waiting(pool, traffic),
    )


def _worked(traffic: Traffic | Unknown, seconds: float) -> dict[str, Signal]:
    if isinstance(traffic, Unknown):
        return dict.fromkeys(("arrived", "served", "ttft_ms"), Missing(traffic.reason))
    return {
        "arrived": Observed(_arrived(traffic) / seconds),
        "served": Observed(_served(traffic) / seconds),
        "ttft_ms": _ttft(traffic),
    }


def _replica(facts: ReplicaFacts) -> ReplicaSignal:
    phase = _PHASES.get(ReplicaState(facts.state), Phase.LEAVING)
    return ReplicaSignal(
        replica=facts.replica,
        phase=phase,
        phase_ms=facts.coming_ms if phase is Phase.COMING else 0,
        kv_use=_share(facts, facts.kv_blocks_free, facts.kv_blocks, of_free=True),
        slots_use=_share(facts, facts.running, facts.sequences, of_free=False),
    )


def _filled(replicas: list[ReplicaSignal], count: int) -> tuple[ReplicaSignal, ...]:
    coming = [one for one in replicas if one.phase is Phase.COMING]
    filling = sorted(coming, key=lambda one: one.phase_ms)[: max(0, count)]
    return tuple(
        msgspec.structs.replace(one, phase=Phase.FILLING) if one in filling else one
        for one in replicas
    )


def _share(facts: ReplicaFacts, part: int | None, whole: int | None, *, of_free: bool) -> Signal:
    if facts.silent_ms is None or part is None or not whole:
        return NEVER_BEAT
    return Observed((whole - part if of_free else part) / whole, facts.silent_ms)


def _waiting(pool: PoolView | Unknown, traffic: Traffic | Unknown) -> dict[str, Signal]:
    if isinstance(pool, Unknown):
        missing = Missing(pool.reason)
        return dict.fromkeys(("queued", "queued_any", "queued_work", "wait_ms"), missing)
    return {
        "queued": Observed(pool.waiting),
        "queued_any": Observed(pool.waiting_any),
        "queued_work": _queued_work(pool, traffic),
        "wait_ms": Observed(pool.wait_ms),
    }


def _queued_work(pool: PoolView, traffic: Traffic | Unknown) -> Signal:
    if isinstance(traffic, Unknown):
        return Missing(traffic.reason)
    return Observed(_work_of(pool.waiting, traffic))


def _work_of(requests: float, traffic: Traffic) -> float:
    """What so many requests are worth, by those that ended of late."""
    if not traffic.ended:
        return 0.0
    whole = traffic.uncached + WORK_OF_AN_OUTPUT_TOKEN * traffic.output
    return requests * whole / traffic.ended


def _arrived(traffic: Traffic) -> float:
    """Prompts as they are, as far as prompts were not cached; answers as long as they were."""
    share = traffic.uncached / traffic.prompt if traffic.prompt else 1.0
    answer = traffic.output / traffic.ended if traffic.ended else 0.0
    answers = WORK_OF_AN_OUTPUT_TOKEN * answer * traffic.arrived
    return traffic.arrived_prompt * share + answers


def _served(traffic: Traffic) -> float:
    return traffic.served_uncached + WORK_OF_AN_OUTPUT_TOKEN * traffic.served_output


def _ttft(traffic: Traffic) -> Signal:
    if traffic.ttft_ms is None:
        return Missing("no request ended in the window")
    return Observed(traffic.ttft_ms)


def _cold_start(starts: ColdStarts) -> Signal:
    if starts.took_ms is None or starts.age_ms is None:
        return Missing("no replica of this version has started yet")
    return Observed(starts.took_ms, starts.age_ms)
