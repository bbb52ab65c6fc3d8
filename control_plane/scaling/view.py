"""One round's facts: signals judged for their age, joined with what was learnt before.

    work arriving   arrivals ──► what is served ──► unknown
    a replica does  measured while work waited ──► the policy's prior ──► served ÷ slots in use

Each arrow is what is used where the thing before it is missing or stale; what had to be passed
over is an alarm.
"""

import msgspec

from control_plane.scaling.forecast import observe
from control_plane.scaling.policy import ScalingPolicy
from control_plane.scaling.signals import EVER_MS, Phase, Signal, Signals, fresh, mean, plight
from control_plane.scaling.state import State

BUSY_SLOTS = 0.8  # in use on average: such a replica shows what it can do
RATE_SAMPLES = 3  # before a measured rate is believed rather than the prior
SLOTS_MIN = 0.05  # below this a quotient says nothing
RATE_SMOOTHING = 0.3  # for each panic window


class View(msgspec.Struct, frozen=True, kw_only=True):
    """None is what nobody knows. Rates and work are a second's, in tokens."""

    ready: int
    coming: int  # and expected to be ready within the start timeout
    asleep: int
    filling: int  # coming, for the warm pool
    lost: tuple[str, ...]  # did not become ready in time
    queued: float | None
    queued_any: float | None
    queued_work: float | None
    wait_ms: float | None
    ttft_ms: float | None
    burst: float | None
    kv: float | None
    slots: float | None
    rate: float | None
    rate_source: str
    cold_ms: int  # until a replica that is started now serves
    soon_ms: int  # the same of one that may be had soonest
    alarms: tuple[str, ...]

    @property
    def serving(self) -> int:
        """Replicas that serve or will."""
        return self.ready + self.coming


def look(policy: ScalingPolicy, state: State, signals: Signals) -> tuple[View, State]:
    """What is so, and the state with what this round teaches."""
    stale_ms = policy.stale_ms
    ready, asleep = signals.of(Phase.READY), signals.of(Phase.ASLEEP)
    lost = [r for r in signals.of(Phase.COMING) if r.phase_ms > policy.start_timeout_ms]
    kv, kv_silent = mean((replica.kv_use for replica in ready), stale_ms)
    slots, _ = mean((replica.slots_use for replica in ready), stale_ms)
    burst, alarms = _burst(signals, stale_ms)
    alarms += _alarms(signals, burst, stale_ms)
    if kv_silent:
        alarms.append(f"kv_use unknown of {kv_silent} in {len(ready)} replicas")
    if lost:
        alarms.append(f"lost: {len(lost)} not ready after {policy.start_timeout_ms // 1000} s")
    queued = fresh(signals.queued, stale_ms)
    state = _steadied(state, len(ready))
    state = _averaged(policy, state, slots, kv)
    state = _learn_rate(policy, state, fresh(signals.served, stale_ms))
    if burst is not None:
        state = _sampled(policy, state, burst)
    rate, rate_source = _rate(policy, state)
    cold_ms = _measured(signals.cold_start_ms, policy.cold_start_prior_ms)
    return View(
        ready=len(ready),
        coming=len(signals.of(Phase.COMING)) - len(lost),
        asleep=len(asleep),
        filling=len(signals.of(Phase.FILLING)),
        lost=tuple(replica.replica for replica in lost),
        queued=queued,
        queued_any=fresh(signals.queued_any, stale_ms),
        queued_work=fresh(signals.queued_work, stale_ms),
        wait_ms=fresh(signals.wait_ms, stale_ms),
        ttft_ms=fresh(signals.ttft_ms, stale_ms),
        burst=burst,
        kv=kv,
        slots=slots,
        rate=rate,
        rate_source=rate_source,
        cold_ms=cold_ms,
        soon_ms=_measured(signals.wake_ms, policy.wake_prior_ms) if asleep else cold_ms,
        alarms=tuple(alarms),
    ), state


def _burst(signals: Signals, stale_ms: int) -> tuple[float | None, list[str]]:
    """Work that arrives, or at least what is served of it."""
    arrived = fresh(signals.arrived, stale_ms)
    if arrived is not None:
        return arrived, []
    return fresh(signals.served, stale_ms), [f"arrived {plight(signals.arrived, stale_ms)}"]


def _alarms(signals: Signals, burst: float | None, stale_ms: int) -> list[str]:
    """A time to the first token is expected only where there is work."""
    expected = ["served", "queued", "queued_work", "wait_ms", *(["ttft_ms"] if burst else [])]
    plights = {name: plight(getattr(signals, name), stale_ms) for name in expected}
    return [f"{name} {wrong}" for name, wrong in plights.items() if wrong]


def _steadied(state: State, ready: int) -> State:
    if ready == state.ready:
        return state
    return msgspec.structs.replace(state, ready=ready, ready_since_ms=state.elapsed_ms)


def _averaged(policy: ScalingPolicy, state: State, slots: float | None, kv: float | None) -> State:
    """Slots and KV in use, over about the window that `served` is measured over."""
    dt_ms = state.elapsed_ms - state.used_ms
    share = min(1.0, dt_ms / policy.panic_window_ms) if state.used_ms else 1.0
    used = slots if slots is not None else kv
    if used is None:
        return state
    full = state.kv if kv is None else state.kv + share * (kv - state.kv)
    return msgspec.structs.replace(
        state,
        slots=state.slots + share * (min(1.0, used) - state.slots),
        kv=full,
        used_ms=state.elapsed_ms,
    )


def is_steady(policy: ScalingPolicy, state: State) -> bool:
    """Whether as many replicas were ready all through the window that things are measured over."""
    return state.elapsed_ms - state.ready_since_ms >= policy.panic_window_ms


def _learn_rate(policy: ScalingPolicy, state: State, served: float | None) -> State:
    """A replica does what it was seen to do with its slots in use, and never less than it did."""
    if not served or not state.ready or state.slots < SLOTS_MIN or not is_steady(policy, state):
        return state
    each = served / state.ready
    state = msgspec.structs.replace(state, rate_guess=each / state.slots)
    if state.slots < BUSY_SLOTS:
        faster = state.rate_samples and each > state.rate
        return msgspec.structs.replace(state, rate=each) if faster else state
    since_ms = state.elapsed_ms - state.rate_ms
    share = min(1.0, RATE_SMOOTHING * since_ms / policy.panic_window_ms)
    full = state.rate_guess
    rate = state.rate + share * (full - state.rate) if state.rate_samples else full
    return msgspec.structs.replace(
        state, rate=rate, rate_samples=state.rate_samples + 1, rate_ms=state.elapsed_ms
    )


def _sampled(policy: ScalingPolicy, state: State, burst: float) -> State:
    forecast = observe(
        state.forecast,
        burst,
        state.elapsed_ms - state.sampled_ms,
        window_ms=policy.stable_window_ms,
        season_ms=policy.season_ms,
        now_ms=state.wall_ms,
    )
    return msgspec.structs.replace(state, forecast=forecast, sampled_ms=state.elapsed_ms)


def _rate(policy: ScalingPolicy, state: State) -> tuple[float | None, str]:
    if state.rate_samples >= RATE_SAMPLES:
        return state.rate, "measured"
    if policy.work_rate_prior:
        return float(policy.work_rate_prior), "the policy's"
    return (state.rate_guess, "by slots in use") if state.rate_guess else (None, "unknown")


def _measured(signal: Signal, prior_ms: int) -> int:
    """Such times do not go stale: a start takes what the last ones took."""
    return int(fresh(signal, EVER_MS) or prior_ms)
