"""Suspects and the retry budget as decisions: bounded, and counted once for each life."""

from hypothesis import given
from hypothesis import strategies as st

from core.deaths import DeathRules, Deaths, Listed
from core.retries import RetryBudget, RetryRules

RULES = DeathRules(deaths=2, refuse_ms=1_000, kept_max=2)


def test_one_life_counts_once_however_many_requests_it_served():
    deaths = Deaths(RULES)
    assert [deaths.record("fp", boot, 10) for boot in ("b1", "b1", "b2", "b1", "b3")] == [
        1,
        1,
        2,
        2,
        2,
    ]


def test_a_suspect_is_forgotten_after_its_time():
    deaths = Deaths(RULES)
    deaths.record("fp", "b1", 0)
    deaths.record("fp", "b2", 500)
    assert deaths.listed(1_499) == (Listed("fp", 2, 1),)
    assert deaths.listed(1_500) == ()
    assert deaths.record("fp", "b3", 1_500) == 1


def test_an_answer_clears_a_suspect_and_not_one_that_is_refused():
    deaths = Deaths(RULES)
    deaths.absolve("nobody")
    deaths.record("fp", "b1", 0)
    deaths.absolve("fp")
    assert deaths.listed(0) == ()
    deaths.record("fp", "b1", 0)
    deaths.record("fp", "b2", 0)
    deaths.absolve("fp")
    assert [one.deaths for one in deaths.listed(0)] == [2]
    deaths.forget("fp")
    deaths.forget("nobody")
    assert deaths.listed(0) == ()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz"), st.integers(0, 400))))
def test_the_list_is_bounded_and_whoever_is_next_to_go_goes_first(history):
    deaths, now_ms = Deaths(RULES), 0
    for name, boot_id, wait_ms in history:
        now_ms += wait_ms
        assert 1 <= deaths.record(name, boot_id, now_ms) <= RULES.deaths
        listed = deaths.listed(now_ms)
        assert name in [one.fingerprint for one in listed]
        assert len(listed) <= RULES.kept_max
        assert all(0 < one.left_ms <= RULES.refuse_ms for one in listed)


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 20), st.integers(0, 5))),
    st.integers(0, 10),
)
def test_retries_never_pass_the_floor_and_their_share_of_two_windows(history, floor):
    rules = RetryRules(window_ms=1_000, permille=200, floor=floor)
    budget, now_ms, asked, taken = RetryBudget(rules), 0, [], []
    for wait_ms, requests, wanted in history:
        now_ms += wait_ms
        asked.append((now_ms, requests))
        if budget.spend(requests=requests, wanted=wanted, now_ms=now_ms):
            taken.append((now_ms, wanted))
        recent = sum(n for at, n in taken if at >= budget.retries.start_ms)
        lately = sum(n for at, n in asked if at > now_ms - 2 * rules.window_ms)
        assert recent <= floor + lately // 5
