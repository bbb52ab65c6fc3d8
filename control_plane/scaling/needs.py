"""How many replicas each objective calls for, and why: every need on its own, none stops another.

A need is a count with its arithmetic in words. None of them looks at how busy a processor is: a
GPU at 100 % may be keeping every promise, and one at 40 % may be breaking them.
"""

import math

import msgspec

from control_plane.scaling.forecast import ahead, source
from control_plane.scaling.policy import ScalingPolicy
from control_plane.scaling.state import State
from control_plane.scaling.view import BUSY_SLOTS, View, is_steady

TOLERANCE = 1.1  # of a target, before it is acted on
FULL = 0.9  # of what replicas can do; arriving work beyond it is a panic
GROWTH = 0.5  # of what a burst is above the level, that it is taken to grow by still
UNKNOWN_RATE_STEP = 2.0  # at most so many times the replicas, where no rate is known


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """`count` replicas should serve."""

    code: str
    count: int
    why: str


def needs(policy: ScalingPolicy, state: State, view: View, current: int) -> list[Need]:
    """All that call for something, in the order of the objectives."""
    found = [
        _wake(view, current),
        _work(policy, state, view, current),
        _panic(policy, state, view, current),
        _backlog(policy, state, view),
        _kv(policy, state, view),
        _wait(policy, view),
        _late(policy, state, view, current),
    ]
    return [need for need in found if need is not None]


def is_panic(view: View, current: int) -> bool:
    """Nearly as much arrives as the replicas can do when they are full, or more."""
    return bool(
        view.burst is not None and view.rate and view.burst > FULL * view.rate * max(1, current)
    )


def is_late(policy: ScalingPolicy, view: View) -> bool:
    """Whether an objective is missed for want of replicas.

    A slow first token behind which nobody waits is a long prompt, which no replica cures.
    """
    if view.wait_ms is not None and view.wait_ms > policy.wait_objective_ms:
        return True
    if view.ttft_ms is None or view.ttft_ms <= policy.ttft_objective_ms:
        return False
    if view.queued is None and view.slots is None:
        return True
    return bool(view.queued) or (view.slots or 0.0) >= BUSY_SLOTS


def foreseen(policy: ScalingPolicy, state: State, view: View) -> float:
    """Work a second, by when a cold start would be over."""
    return ahead(
        state.forecast,
        view.cold_ms,
        window_ms=policy.stable_window_ms,
        season_ms=policy.season_ms,
        now_ms=state.wall_ms,
    )


def _wake(view: View, current: int) -> Need | None:
    if current:
        return None
    if view.queued_any or view.burst:
        return Need(code="wake", count=1, why="requests wait and nothing serves")
    if view.queued_any is None and view.burst is None:
        return Need(code="blind", count=1, why="nobody can tell whether requests wait")
    return None


def _work(policy: ScalingPolicy, state: State, view: View, current: int) -> Need | None:
    if view.burst is None or not view.rate or not current:
        return None
    work = foreseen(policy, state, view)
    planned = view.rate * policy.load_target_percent / 100
    if work <= planned * current * TOLERANCE:
        return None
    why = (
        f"{work:.0f} tokens/s foreseen in {view.cold_ms / 1000:.0f} s by {source(state.forecast)};"
        f" {planned:.0f} planned for each ({policy.load_target_percent} % of {view.rate:.0f},"
        f" {view.rate_source})"
    )
    return Need(code="work", count=math.ceil(work / planned), why=why)


def _panic(policy: ScalingPolicy, state: State, view: View, current: int) -> Need | None:
    if not is_panic(view, current):
        return None
    assert view.burst is not None, "a panic has its burst"
    assert view.rate, "and its rate"
    planned = view.rate * policy.load_target_percent / 100
    grown = view.burst + GROWTH * max(0.0, view.burst - state.forecast.level)
    why = f"{view.burst:.0f} tokens/s arrive, {view.rate * max(1, current):.0f} can be served"
    return Need(code="panic", count=math.ceil(grown / planned), why=why)


def _backlog(policy: ScalingPolicy, state: State, view: View) -> Need | None:
    """What will still wait when help comes, worked off in as long as that took, and a window."""
    if not view.queued_work or not view.rate:
        return None
    arriving = max(view.burst or 0.0, foreseen(policy, state, view))
    able = (view.ready + view.coming / 2) * view.rate  # those coming help half of the time
    left = view.queued_work + (arriving - able) * view.soon_ms / 1000
    if left <= 0:
        return None
    catch_up_s = (view.soon_ms + policy.panic_window_ms) / 1000
    count = math.ceil((arriving + left / catch_up_s) / view.rate)
    why = f"{view.queued_work:.0f} tokens wait, {left:.0f} still would when a replica is there"
    return Need(code="backlog", count=count, why=why)


def _kv(policy: ScalingPolicy, state: State, view: View) -> Need | None:
    """On average, since a replica that joins a queue is full for a while."""
    ceiling = policy.kv_ceiling_percent / 100
    if view.kv is None or min(view.kv, state.kv) <= ceiling or not is_steady(policy, state):
        return None
    why = f"{state.kv:.0%} of KV in use, {ceiling:.0%} is the ceiling"
    return Need(code="kv", count=math.ceil(view.ready * state.kv / ceiling), why=why)


def _wait(policy: ScalingPolicy, view: View) -> Need | None:
    """In proportion, where no rate turns the queue into work."""
    if view.rate or view.wait_ms is None or view.wait_ms <= policy.wait_objective_ms:
        return None
    ratio = min(UNKNOWN_RATE_STEP, view.wait_ms / policy.wait_objective_ms)
    why = f"a wait of {view.wait_ms:.0f} ms, and how fast a replica is is unknown"
    return Need(code="wait", count=math.ceil(max(1, view.ready) * ratio), why=why)


def _late(policy: ScalingPolicy, state: State, view: View, current: int) -> Need | None:
    """One more, when objectives were missed for a window and the last one more did not help."""
    if state.late_since_ms is None or view.coming or current > view.ready:
        return None
    late_ms = state.elapsed_ms - max(state.late_since_ms, state.ready_since_ms)
    if late_ms < policy.panic_window_ms:
        return None
    waits = "unknown" if view.wait_ms is None else f"{view.wait_ms:.0f} ms"
    first = "unknown" if view.ttft_ms is None else f"{view.ttft_ms:.0f} ms"
    why = f"objectives missed for {late_ms // 1000} s: wait {waits}, first token {first}"
    return Need(code="late", count=current + 1, why=why)
