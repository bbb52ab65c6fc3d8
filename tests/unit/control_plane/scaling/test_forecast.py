"""What is foreseen: nothing without samples, a ramp ahead of itself, a day from the day before."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scaling.forecast import SLOTS, Forecast, ahead, observe, source

WINDOW_MS = 180_000
ROUND_MS = 5_000


def fed(values, *, season_ms=0, now_ms=0, dt_ms=ROUND_MS):
    forecast = Forecast()
    for value in values:
        forecast = observe(
            forecast, value, dt_ms, window_ms=WINDOW_MS, season_ms=season_ms, now_ms=now_ms
        )
        now_ms += dt_ms
    return forecast, now_ms


def foreseen(forecast, lead_ms, *, season_ms=0, now_ms=0):
    return ahead(forecast, lead_ms, window_ms=WINDOW_MS, season_ms=season_ms, now_ms=now_ms)


def test_nothing_is_foreseen_before_the_first_sample():
    assert foreseen(Forecast(), 60_000) == 0.0
    assert source(Forecast()) == "nothing yet"


@given(value=st.floats(0, 1e6), lead_ms=st.integers(0, 600_000))
def test_what_is_constant_is_foreseen_as_it_is(value, lead_ms):
    forecast, _ = fed([value] * 50)
    assert math.isclose(foreseen(forecast, lead_ms), value, rel_tol=1e-9, abs_tol=1e-9)
    assert source(forecast) == "level and damped trend"


def test_a_ramp_is_foreseen_ahead_of_itself():
    ramp = [10.0 * place for place in range(60)]  # 2 more each second
    forecast, _ = fed(ramp)
    assert foreseen(forecast, 60_000) > ramp[-1]
    assert foreseen(forecast, 60_000) < ramp[-1] + 2 * 60 + 60


def test_a_fall_is_not_foreseen_below_what_is_there_now():
    forecast, _ = fed([1_000.0 - 10 * place for place in range(90)])
    assert foreseen(forecast, 600_000) >= forecast.level


@given(values=st.lists(st.floats(0, 1e6), max_size=30), lead_ms=st.integers(0, 10**7))
def test_no_forecast_is_negative(values, lead_ms):
    assert foreseen(fed(values)[0], lead_ms) >= 0.0


@given(value=st.floats(0, 1e6), again=st.floats(0, 1e6))
def test_a_round_in_no_time_teaches_nothing(value, again):
    forecast, _ = fed([value] * 3)
    same = observe(forecast, again, 0, window_ms=WINDOW_MS, season_ms=0, now_ms=0)
    assert (same.level, same.trend) == (forecast.level, forecast.trend)


def test_a_day_is_foreseen_from_the_days_before():
    day_ms = 7_200_000

    def load(at_ms):
        return 100.0 + (900.0 if at_ms % day_ms >= day_ms // 2 else 0.0)

    steps = 3 * day_ms // ROUND_MS
    learnt, _ = fed([load(ROUND_MS * step) for step in range(steps)], season_ms=day_ms)
    assert source(learnt) == "level, damped trend and season"
    assert len(learnt.season) == SLOTS
    # A night that is as quiet as the others: noon is foreseen when it is within the lead time.
    tonight = msgspec.structs.replace(learnt, level=100.0, trend=0.0)
    noon_ms = day_ms // 2
    assert foreseen(tonight, 30_000, season_ms=day_ms, now_ms=noon_ms - 200_000) < 300
    assert foreseen(tonight, 180_000, season_ms=day_ms, now_ms=noon_ms - 60_000) > 600
