"""How many replicas should serve, from what was observed: a pure step with its reasons.

    up      the highest need wins, at once; asleep ones are woken, cold starts come behind
    down    when everything that would have to be known is known, the window is over, and fewer
            would have borne the peak of that window with room to spare
    zero    only where nothing came, nothing waits and nothing runs for a whole window

Between the load that raises a count and the load that lowers it to the same lies a band, so
that under a constant load the count settles. Missing signals never stop a round: they are told
as alarms, nothing is stopped on their account, and what is left decides.
"""

import msgspec

from control_plane.scaling.needs import Need, foreseen, is_late, is_panic, needs
from control_plane.scaling.policy import ScalingPolicy
from control_plane.scaling.signals import Signals
from control_plane.scaling.state import Peak, State, highest, tick, with_peak
from control_plane.scaling.view import View, look

BAND = 0.9  # of the load target, that fewer replicas would have to keep to
BURST_BAND = 0.9  # of all that they can do, for the window's highest burst
DOWN_SHARE = 2  # at most one in so many goes at once
RETRY_FIRST_MS = 30_000
RETRY_MAX_MS = 1_800_000


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """`desired` is how many replicas are to be there, asleep ones aside.

    `wake`, `start`, `stop` and `warm` are what lies between that and what was seen: replicas to
    wake, to start to serve, to stop, and to start for the warm pool. `lost` were not ready in
    time; each is replaced once, with growing pauses between.
    """

    desired: int
    wake: int
    start: int
    stop: int
    warm: int
    reasons: tuple[str, ...]
    alarms: tuple[str, ...]
    lost: tuple[str, ...]
    state: State


def decide(policy: ScalingPolicy, state: State, signals: Signals, now_ms: int) -> Decision:
    """One round. The policy is sound (`policy.fault`); `state` is of the round before."""
    state, jumped = tick(state, now_ms)
    view, state = look(policy, state, signals)
    state = _adopted(policy, state, view)
    state = _remembered(policy, state, view)
    wanted, reasons = _wanted(policy, state, view)
    state = _moved(state, wanted)
    state, replaced = _replaced(state, view)
    alarms = (*view.alarms, *(["the clock jumped"] if jumped else []))
    desired = min(policy.ceiling, wanted + replaced)
    if replaced:
        reasons.append(f"{desired - wanted} more in place of {len(view.lost)} that are lost")
    wake = min(view.asleep, max(0, wanted - view.serving))
    return Decision(
        desired=desired,
        wake=wake,
        start=max(0, desired - view.serving - len(view.lost) - wake),
        stop=max(0, view.serving - wanted),
        warm=max(0, policy.warm_replicas - (view.asleep - wake) - view.filling),
        reasons=tuple(reasons),
        alarms=alarms,
        lost=view.lost,
        state=state,
    )


def _adopted(policy: ScalingPolicy, state: State, view: View) -> State:
    """At first what is there is right, and a changed policy's bounds hold from now on."""
    count = view.serving if state.target is None else state.target
    inside = min(policy.ceiling, max(policy.min_replicas, count))
    if state.target is None:
        state = msgspec.structs.replace(state, target=inside)
        # Nobody saw what came before: as if a replica had just been started.
        return msgspec.structs.replace(state, raised_ms=state.elapsed_ms)
    return _moved(state, inside)


def _remembered(policy: ScalingPolicy, state: State, view: View) -> State:
    seen = Peak(
        bucket=0,
        level=foreseen(policy, state, view) if view.burst is not None else 0.0,
        burst=view.burst or 0.0,
        kv=(view.kv or 0.0) * view.ready,
        waiting=max(view.queued or 0.0, view.queued_any or 0.0),
    )
    state = with_peak(state, seen, policy.down_window_ms)
    if is_panic(view, state.target or 0):
        until_ms = state.elapsed_ms + policy.stable_window_ms
        state = msgspec.structs.replace(state, panic_until_ms=until_ms)
    if not is_late(policy, view):
        return msgspec.structs.replace(state, late_since_ms=None)
    if state.late_since_ms is None:
        return msgspec.structs.replace(state, late_since_ms=state.elapsed_ms)
    return state


def _wanted(policy: ScalingPolicy, state: State, view: View) -> tuple[int, list[str]]:
    """How many should serve, and why."""
    current = state.target or 0
    called = needs(policy, state, view, current)
    highest_need = max(called, key=lambda need: need.count, default=None)
    if highest_need is not None and highest_need.count > current:
        return _raised(policy, current, highest_need)
    held = _held(policy, state, view)
    if held is not None:
        return current, [f"stays at {current}: {held}"]
    fewer = _fewer(policy, state, view)
    if fewer == current:
        return current, [f"stays at {current}: one less would not have borne the recent peak"]
    peak = highest(state.peaks)
    why = f"{peak.level:.0f} tokens/s, {peak.burst:.0f} in a burst"
    window_s = policy.down_window_ms // 1000
    return fewer, [f"down to {fewer}: it would have borne the peak of {window_s} s ({why})"]


def _raised(policy: ScalingPolicy, current: int, need: Need) -> tuple[int, list[str]]:
    count = min(policy.ceiling, need.count)
    reasons = [f"{need.code}: {need.count} needed: {need.why}"]
    if count < need.count:
        by_budget = policy.affordable < policy.max_replicas
        bound = f"the budget bears {count}" if by_budget else f"max_replicas is {count}"
        reasons.append(f"capped: {bound}")
    if count == current:
        reasons.append(f"stays at {current}")
    return count, reasons


def _held(policy: ScalingPolicy, state: State, view: View) -> str | None:
    """Why nothing may be stopped now, whatever the load; None where something may."""
    current, now_ms = state.target or 0, state.elapsed_ms
    blind = [
        name
        for name, value in (
            ("arriving work", view.burst),
            ("the queue", view.queued_any),
            ("KV use", view.kv if view.ready else 0.0),
        )
        if value is None
    ]
    bars = (
        (current <= policy.min_replicas, "that is the least"),
        (bool(blind), f"{' and '.join(blind)} cannot be seen"),
        (now_ms < state.panic_until_ms, "a burst was beyond what can be served"),
        (
            now_ms - state.raised_ms < policy.down_window_ms,
            "it was raised within the scale-down window",
        ),
        (
            now_ms - state.changed_ms < policy.stable_window_ms,
            "it changed within the stable window",
        ),
        (view.coming > 0 and view.ready < current, "replicas are still coming"),
        (state.late_since_ms is not None, "objectives are missed"),
    )
    return next((why for holds, why in bars if holds), None)


def _fewer(policy: ScalingPolicy, state: State, view: View) -> int:
    """The least that would have borne the window's peak, or what there is."""
    current = state.target or 0
    least = max(policy.min_replicas, current - max(1, current // DOWN_SHARE))
    return next(
        (count for count in range(least, current) if _bears(policy, state, view, count)), current
    )


def _bears(policy: ScalingPolicy, state: State, view: View, count: int) -> bool:
    """Whether so few would have been enough all through the window, with room to spare."""
    peak = highest(state.peaks)
    if count == 0:
        return not (peak.burst or peak.waiting or view.slots or view.coming or peak.kv)
    if peak.kv > count * BAND * policy.kv_ceiling_percent / 100:
        return False
    if not view.rate:
        return not (peak.burst or peak.waiting)
    planned = view.rate * policy.load_target_percent / 100
    return peak.level <= BAND * planned * count and peak.burst <= BURST_BAND * view.rate * count


def _moved(state: State, target: int) -> State:
    if target == state.target:
        return state
    raised_ms = state.elapsed_ms if target > (state.target or 0) else state.raised_ms
    return msgspec.structs.replace(
        state, target=target, changed_ms=state.elapsed_ms, raised_ms=raised_ms
    )


def _replaced(state: State, view: View) -> tuple[State, int]:
    """How many of the lost have another in their place, and when the next may have one."""
    count = len(view.lost)
    if count == 0:
        healed = msgspec.structs.replace(state, replaced=0, failures=0, retry_ms=0)
        return (healed if not view.coming else msgspec.structs.replace(state, replaced=0)), 0
    if count <= state.replaced or state.elapsed_ms < state.retry_ms:
        replaced = min(count, state.replaced)
        return msgspec.structs.replace(state, replaced=replaced), replaced
    pause_ms = min(RETRY_MAX_MS, RETRY_FIRST_MS << min(state.failures, 30))
    failed = msgspec.structs.replace(
        state,
        replaced=count,
        failures=state.failures + 1,
        retry_ms=state.elapsed_ms + pause_ms,
    )
    return failed, count
