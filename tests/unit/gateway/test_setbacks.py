"""How often a request is set back, and how it is paced: decisions on a clock of its own."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.relay.job import BUSY, DIED, GenerationLimits
from gateway.relay.setbacks import NACKS_UNPACED, Setback, Setbacks

LIMITS = GenerationLimits(deaths_max=3, nacked_s=60.0, unsent_s=15.0)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def declined_until_refused(kind):
    """How often it was tried, and for how long."""
    clock = Clock()
    setbacks = Setbacks(LIMITS, clock)
    for tries in range(1, 10_000):
        refusal = setbacks.count(Setback(kind, ""))
        if refusal is not None:
            return refusal, tries, clock.now_s
        clock.now_s += setbacks.pause_s()
    raise AssertionError("a tight loop")


def test_being_declined_is_paced_and_bounded_in_time():
    refusal, tries, lasted_s = declined_until_refused("nack")
    assert refusal is BUSY
    assert LIMITS.nacked_s < lasted_s < LIMITS.nacked_s + LIMITS.pause_max_s * 2
    assert tries < 80


def test_the_first_few_are_declined_without_a_pause():
    setbacks = Setbacks(LIMITS, Clock())
    for _ in range(NACKS_UNPACED):
        assert setbacks.count(Setback("nack", "full")) is None
        assert setbacks.pause_s() == 0.0


def test_the_unreachable_are_tried_for_a_time():
    refusal, tries, lasted_s = declined_until_refused("unsent")
    assert refusal is DIED
    assert LIMITS.unsent_s < lasted_s <= LIMITS.unsent_s + LIMITS.pause_max_s
    assert tries < 25


def test_deaths_errors_and_moves_are_counted_together():
    setbacks = Setbacks(LIMITS, Clock())
    told = [setbacks.count(Setback(kind, "")) for kind in ("death", "moved", "nack", "error")]
    assert told == [None] * 4
    assert setbacks.count(Setback("death", "")) is DIED


def test_another_kind_between_begins_the_wait_anew():
    clock = Clock()
    setbacks = Setbacks(LIMITS, clock)
    setbacks.count(Setback("unsent", ""))
    clock.now_s = 14.0
    setbacks.count(Setback("nack", ""))
    clock.now_s = 20.0
    assert setbacks.count(Setback("unsent", "")) is None


@given(st.lists(st.sampled_from(["nack", "unsent", "moved", "error", "death"]), min_size=1))
def test_no_pause_is_longer_than_its_bound(kinds):
    setbacks = Setbacks(LIMITS, Clock())
    for kind in kinds:
        setbacks.count(Setback(kind, ""))
        assert 0.0 <= setbacks.pause_s() <= LIMITS.pause_max_s
