"""How much work will arrive when a replica that is started now is ready.

Holt's linear method with a damped trend (Holt 1957; Gardner and McKenzie 1985), on the rate of
arriving work: a level and a trend, each smoothed over time rather than over samples, so that
rounds may be late. With a season, an additive term by time of day (Winters 1960), learnt as the
smoothed difference from the level of that season. The invariant: no forecast is negative, and
without a sample there is none.
"""

import math

import msgspec

LEVEL_PART = 4  # of the stable window, that the level is smoothed over
SLOTS = 96  # of a season: quarters of an hour in a day
SEASON_SMOOTHING = 0.3  # of what a slot is off, each time it comes round
DAMPING_WINDOWS = 1.0  # a trend is worth 1/e after so many stable windows
STEPS = 8  # looked at within the lead time


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """`trend` is a second's change of the level, which is work a second."""

    samples: int = 0
    level: float = 0.0
    trend: float = 0.0
    mean: float = 0.0  # over a season, that its slots are measured from
    season: tuple[float, ...] = ()
    slot: int = -1  # the one we are in
    slot_sum: float = 0.0
    slot_count: int = 0


def observe(
    forecast: Forecast, value: float, dt_ms: int, *, window_ms: int, season_ms: int, now_ms: int
) -> Forecast:
    """With one more sample, `dt_ms` after the last one."""
    if forecast.samples == 0:
        started = Forecast(samples=1, level=value, mean=value)
        return _in_season(started, value, season_ms, dt_ms, now_ms)
    dt_s = dt_ms / 1000
    share = _share(dt_ms, window_ms / LEVEL_PART)
    foreseen = forecast.level + forecast.trend * dt_s
    level = foreseen + share * (value - foreseen)
    slope = (level - forecast.level) / dt_s if dt_s else forecast.trend
    trend = forecast.trend + _share(dt_ms, window_ms) * (slope - forecast.trend)
    moved = msgspec.structs.replace(
        forecast, samples=forecast.samples + 1, level=max(0.0, level), trend=trend
    )
    return _in_season(moved, value, season_ms, dt_ms, now_ms)


def ahead(
    forecast: Forecast, lead_ms: int, *, window_ms: int, season_ms: int, now_ms: int
) -> float:
    """The most that is expected at any moment from now until then, work a second."""
    return max(
        _at(forecast, lead_ms * step // STEPS, window_ms, season_ms, now_ms)
        for step in range(STEPS + 1)
    )


def source(forecast: Forecast) -> str:
    """By what it foresees, for people."""
    if forecast.samples == 0:
        return "nothing yet"
    return "level, damped trend and season" if any(forecast.season) else "level and damped trend"


def _at(forecast: Forecast, lead_ms: int, window_ms: int, season_ms: int, now_ms: int) -> float:
    damping_ms = DAMPING_WINDOWS * window_ms
    # The integral of a trend that dies away.
    worth_s = damping_ms * -math.expm1(-lead_ms / damping_ms) / 1000
    value = forecast.level + forecast.trend * worth_s
    if season_ms and forecast.season:
        here = forecast.season[_slot(now_ms, season_ms)]
        value += forecast.season[_slot(now_ms + lead_ms, season_ms)] - here
    return max(0.0, value)


def _in_season(
    forecast: Forecast, value: float, season_ms: int, dt_ms: int, now_ms: int
) -> Forecast:
    """A slot is learnt when it ends, from the mean of what was seen in it."""
    if not season_ms:
        return forecast
    slot = _slot(now_ms, season_ms)
    mean = forecast.mean + _share(dt_ms, season_ms) * (value - forecast.mean)
    if slot == forecast.slot:
        return msgspec.structs.replace(
            forecast,
            mean=mean,
            slot_sum=forecast.slot_sum + value,
            slot_count=forecast.slot_count + 1,
        )
    season = list(forecast.season or (0.0,) * SLOTS)
    if forecast.slot_count:
        off = forecast.slot_sum / forecast.slot_count - mean - season[forecast.slot]
        season[forecast.slot] += off * (SEASON_SMOOTHING if season[forecast.slot] else 1.0)
    return msgspec.structs.replace(
        forecast, mean=mean, season=tuple(season), slot=slot, slot_sum=value, slot_count=1
    )


def _slot(now_ms: int, season_ms: int) -> int:
    return now_ms % season_ms * SLOTS // season_ms


def _share(dt_ms: int, window_ms: float) -> float:
    """What a new sample counts for, after so long."""
    return -math.expm1(-dt_ms / window_ms)
