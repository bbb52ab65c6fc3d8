"""Each millisecond of an attempt belongs to exactly one phase."""

from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Timings
from worker.phases import Phases

EVENTS = st.lists(
    st.tuples(st.sampled_from(["run", "wait", "token"]), st.integers(0, 1000)), max_size=30
)


@given(EVENTS, st.integers(0, 1000))
def test_a_life_is_the_sum_of_its_phases_and_each_part_is_where_it_was_spent(events, rest):
    phases, now = Phases(0), 0
    expected = {"queue": 0, "prefill": 0, "decode": 0}
    runs = has_token = False
    for event, passed in [*events, ("end", rest)]:
        expected[("decode" if has_token else "prefill") if runs else "queue"] += passed
        now += passed
        match event:
            case "run" | "wait":
                runs = event == "run"
                phases.runs(now, any_choice=runs)
            case "token":
                has_token = True
                phases.token(now)
    told = phases.timings(now)
    assert told == Timings(**{f"{name}_ms": float(spent) for name, spent in expected.items()})
    assert told.queue_ms + told.prefill_ms + told.decode_ms == now
    assert phases.timings(now) == told
