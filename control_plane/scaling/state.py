"""What one deployment's scaler remembers from round to round.

Its time is its own: `elapsed_ms` grows by what the wall clock moved since the last round, never
backwards and never by more than `GAP_MS` at once. So a clock that jumps neither ends a window
nor makes one last for ever, and a pause of ours is no evidence of an idle deployment.
"""

import msgspec

from control_plane.scaling.forecast import Forecast

GAP_MS = 60_000
BUCKETS = 10  # that a window's peaks are kept in


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that was seen in one part of the scale-down window. Work is a second's."""

    bucket: int
    level: float = 0.0  # smoothed, or foreseen
    burst: float = 0.0  # over the panic window
    kv: float = 0.0  # in replicas that are wholly full
    waiting: float = 0.0  # requests


class State(msgspec.Struct, frozen=True, kw_only=True):
    """`target` is how many should serve; None before the first round. Times are elapsed ms."""

    wall_ms: int = 0
    elapsed_ms: int = 0
    target: int | None = None
    changed_ms: int = 0
    raised_ms: int = 0
    panic_until_ms: int = 0
    late_since_ms: int | None = None  # objectives missed without a break
    forecast: Forecast = Forecast()
    sampled_ms: int = 0  # when the forecast had its last sample
    slots: float = 0.0  # in use, of all, averaged
    kv: float = 0.0
    used_ms: int = 0
    rate_guess: float = 0.0  # what a replica would do with all slots in use
    rate: float = 0.0  # work a second that one replica was measured to do
    rate_samples: int = 0
    rate_ms: int = 0
    ready: int = 0
    ready_since_ms: int = 0
    peaks: tuple[Peak, ...] = ()
    replaced: int = 0  # of the replicas that are counted lost
    failures: int = 0  # to start, in a row
    retry_ms: int = 0


def tick(state: State, now_ms: int) -> tuple[State, bool]:
    """The state at this moment, and whether the clock has jumped since the last."""
    if state.wall_ms == 0:
        return msgspec.structs.replace(state, wall_ms=now_ms), False
    moved_ms = now_ms - state.wall_ms
    counted_ms = min(max(0, moved_ms), GAP_MS)
    later = msgspec.structs.replace(state, wall_ms=now_ms, elapsed_ms=state.elapsed_ms + counted_ms)
    return later, moved_ms != counted_ms


def with_peak(state: State, seen: Peak, window_ms: int) -> State:
    """What was seen now goes into its part of the window; parts that are too old go."""
    bucket = state.elapsed_ms * BUCKETS // window_ms
    seen = msgspec.structs.replace(seen, bucket=bucket)
    kept = [peak for peak in state.peaks if bucket - BUCKETS <= peak.bucket < bucket]
    same = [peak for peak in state.peaks if peak.bucket == bucket]
    return msgspec.structs.replace(state, peaks=(*kept, highest((*same, seen))))


def highest(peaks: tuple[Peak, ...]) -> Peak:
    """Of each thing the most; of no peaks nothing."""
    return Peak(
        bucket=max((peak.bucket for peak in peaks), default=0),
        level=max((peak.level for peak in peaks), default=0.0),
        burst=max((peak.burst for peak in peaks), default=0.0),
        kv=max((peak.kv for peak in peaks), default=0.0),
        waiting=max((peak.waiting for peak in peaks), default=0.0),
    )
