"""The end that a worker is asked for: the earliest deadline holds, whoever asked."""

from hypothesis import given
from hypothesis import strategies as st

from worker.ending import Ending

ASKS = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 1000), st.booleans()), min_size=1, max_size=8
)


def test_nobody_has_asked():
    ending = Ending()
    assert not ending.asked
    assert ending.left_ms(5) == 0
    assert ending.told(5) == ("", None)


def test_what_the_fleet_asked_for_it_need_not_be_told():
    ending = Ending()
    ending.ask("the fleet drains it", within_ms=600, now_ms=1000, by_fleet=True)
    assert (ending.asked, ending.left_ms(1100), ending.told(1100)) == (True, 500, ("", None))
    ending.ask("taken back", within_ms=30, now_ms=1100)
    assert ending.left_ms(1100) == 30
    assert ending.told(1110) == ("taken back", 20)
    assert ending.reason == "the fleet drains it", "the first"


def test_of_its_own_the_earliest_is_told():
    ending = Ending()
    ending.ask("first", within_ms=100, now_ms=0)
    ending.ask("later", within_ms=500, now_ms=0)
    assert ending.told(0) == ("first", 100)
    ending.ask("sooner", within_ms=10, now_ms=0)
    assert ending.told(0) == ("sooner", 10)
    assert ending.told(999) == ("sooner", 0)


@given(asks=ASKS)
def test_the_earliest_deadline_holds_whoever_asked(asks):
    ending = Ending()
    now_ms, earliest_ms = 0, None
    for passed_ms, within_ms, by_fleet in asks:
        now_ms += passed_ms
        ending.ask("x", within_ms=within_ms, now_ms=now_ms, by_fleet=by_fleet)
        deadline_ms = now_ms + within_ms
        earliest_ms = deadline_ms if earliest_ms is None else min(earliest_ms, deadline_ms)
        assert ending.left_ms(now_ms) == max(0, earliest_ms - now_ms)
