"""The breaker: what opens it, what does not, and that it always lets traffic back."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.tickets import ReplicaView
from gateway import replica_health
from gateway.breaker import Breaker, BreakerRules
from gateway.replica_health import ReplicaHealth

RULES = BreakerRules()


def opened(at_ms=0, rules=RULES):
    breaker = Breaker(rules)
    for _ in range(rules.failures):
        breaker.failed(at_ms, at_ms)
    assert breaker.is_open
    return breaker


def test_it_opens_at_the_third_failure_and_not_before():
    breaker = Breaker(RULES)
    for number in range(RULES.failures):
        assert breaker.allows(number)
        breaker.failed(number, number)
    assert not breaker.allows(RULES.failures)


def test_failures_far_apart_do_not_open_it():
    breaker = Breaker(RULES)
    for number in range(20):
        breaker.failed(0, number * RULES.window_ms)
    assert not breaker.is_open


def test_a_minority_of_failures_does_not_open_it():
    breaker = Breaker(RULES)
    for number in range(30):
        breaker.finished(number)
        breaker.finished(number)
        breaker.failed(number, number)
    assert not breaker.is_open


def test_half_open_lets_one_request_through_at_a_time():
    breaker = opened()
    half = RULES.open_ms
    assert not breaker.allows(half - 1)
    assert breaker.allows(half)
    assert not breaker.allows(half + RULES.probe_ms - 1)
    assert breaker.allows(half + RULES.probe_ms)


def test_half_open_closes_after_successes():
    # sglang #31206: half-open never closes.
    breaker = opened()
    begun = RULES.open_ms
    for number in range(RULES.successes):
        assert breaker.is_open, number
        breaker.got_on(begun)
    assert not breaker.is_open
    assert breaker.is_idle(begun)


def test_each_failed_probe_doubles_the_wait_up_to_its_bound():
    breaker, now, waits = opened(), 0, []
    for _ in range(6):
        start = now
        while not breaker.allows(now):
            now += 1
        waits.append(now - start)
        breaker.failed(now, now)
    assert waits == [1_000, 2_000, 4_000, 8_000, 8_000, 8_000]


def test_what_was_under_way_when_it_opened_neither_closes_nor_reopens_it():
    breaker = opened(at_ms=5_000)
    for _ in range(10):
        breaker.got_on(4_999)
        breaker.failed(4_999, 5_900)
    assert breaker.is_open
    assert breaker.allows(5_000 + RULES.open_ms)


def test_one_that_gives_a_token_and_fails_stays_away_for_longer_each_time():
    breaker, now = opened(), 0
    for wait_ms in (1_000, 2_000, 4_000):
        assert not breaker.allows(now + wait_ms - 1)
        now += wait_ms
        assert breaker.allows(now)
        for _ in range(RULES.successes):
            breaker.got_on(now)
        for _ in range(RULES.failures):
            breaker.failed(now, now)
        assert breaker.is_open


def test_a_finished_attempt_makes_the_next_opening_short_again():
    breaker = opened()
    breaker.failed(1_000, 1_000)
    for _ in range(RULES.successes):
        breaker.got_on(3_000)
    breaker.finished(3_100)
    for _ in range(RULES.failures):
        breaker.failed(3_200, 3_200)
    assert breaker.allows(3_200 + RULES.open_ms)


@given(st.lists(st.sampled_from(["failed", "got_on", "finished"]), max_size=60))
def test_whatever_happened_a_request_is_let_through_within_the_longest_pause(events):
    breaker, now = Breaker(RULES), 0
    for event in events:
        now += 100
        match event:
            case "failed":
                breaker.failed(now, now)
            case "got_on":
                breaker.got_on(now)
            case _:
                breaker.finished(now)
    assert breaker.allows(now + RULES.open_ms_max)


def test_without_traffic_nobody_is_said_to_fail_for_ever():
    # A gateway that is taken out of rotation because all fail would never hear of recovery.
    breaker = opened(at_ms=5_000)
    assert breaker.is_failing(5_000 + RULES.window_ms - 1)
    assert not breaker.is_failing(5_000 + RULES.window_ms)
    assert breaker.is_open


# The gateway's breakers.


def a_view(replica, boot_id):
    return ReplicaView(
        replica=replica,
        boot_id=boot_id,
        url="http://x",
        version="v",
        ready=True,
        kv_blocks=1,
        sequences=1,
    )


def test_a_new_life_begins_with_a_clean_slate():
    now = [0]
    health = ReplicaHealth(RULES, lambda: now[0])
    watch = health.watch("boot_1")
    for _ in range(RULES.failures):
        watch.failed()
    assert health.shunned([a_view("r1", "boot_1"), a_view("r2", "boot_2")]) == {"r1"}
    assert (health.is_failing("boot_1"), health.open_count) == (True, 1)
    assert health.shunned([a_view("r1", "boot_9")]) == frozenset()
    health.keep(["boot_1"])
    assert health.is_failing("boot_1")
    health.keep(["boot_9"])
    assert not health.is_failing("boot_1")
    assert health.shunned([a_view("r1", "boot_1")]) == frozenset()


def test_the_healthy_cost_nothing_and_are_not_kept():
    now = [0]
    health = ReplicaHealth(RULES, lambda: now[0])
    watch = health.watch("boot_1")
    watch.got_on()
    watch.finished()
    health.keep([])
    assert health._breakers == {}
    watch.failed()
    now[0] = 2 * RULES.window_ms
    health.keep(["boot_1"])
    assert health._breakers == {}


def test_lives_are_bounded(monkeypatch):
    monkeypatch.setattr(replica_health, "LIVES_MAX", 2)
    health = ReplicaHealth(RULES, lambda: 0)
    for number in range(5):
        health.watch(f"boot_{number}").failed()
    assert len(health._breakers) == 2


def test_a_watch_tells_of_its_first_token_once():
    health = ReplicaHealth(RULES, lambda: 0)
    for _ in range(RULES.failures):
        health.watch("boot").failed()
    one, other = health.watch("boot"), health.watch("boot")
    for _ in range(5):
        one.got_on()
    assert health.is_failing("boot")
    other.got_on()
    assert not health.is_failing("boot")
    other.finished()


class Outages(RuleBasedStateMachine):
    """Replicas that fail and recover at random: what is passed over is what fails lately."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.health = ReplicaHealth(RULES, lambda: self.now)
        self.well = {"a": True, "b": True}

    @rule(name=st.sampled_from("ab"), well=st.booleans())
    def turns(self, name, well):
        self.well[name] = well

    @rule(wait_ms=st.integers(0, 3_000), name=st.sampled_from("ab"))
    def asks(self, wait_ms, name):
        self.now += wait_ms
        if name in self.health.shunned([a_view(name, name)]):
            return
        watch = self.health.watch(name)
        if self.well[name]:
            watch.got_on()
            watch.finished()
        else:
            watch.failed()

    @rule(name=st.sampled_from("ab"))
    def recovers_within_seconds(self, name):
        self.well[name] = True
        until = self.now + RULES.open_ms_max + RULES.successes * RULES.probe_ms
        while (breaker := self.health._breakers.get(name)) and breaker.is_open:
            assert self.now <= until
            self.asks(50, name)

    @invariant()
    def never_more_than_there_are(self):
        assert self.health.open_count <= len(self.well)


TestOutages = Outages.TestCase
