"""A tenant's limits: exact, refundable, and never charged by a refusal."""

import copy

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.limits import (
    DEBT_MAX,
    LIMIT_MAX,
    UNITS,
    Buckets,
    LimitRules,
    admit,
    cancel,
    charge,
    check_versions,
    finish,
    refilled,
    wait_ms,
)
from core.tickets import Admit, Admitted, CacheVersions, LimitRefused, Limits, Remaining, Stale

RULES = LimitRules()
START_MS = 1_700_000_000_000

limits = st.builds(
    Limits,
    requests_per_min=st.sampled_from([0, 1, 7, 600]),
    input_tokens_per_min=st.sampled_from([0, 1, 999, 10_000]),
    output_tokens_per_min=st.sampled_from([0, 13, 5_000]),
    concurrency=st.sampled_from([0, 2, 5]),
)
waits = st.integers(0, 4_000)


def asking(ticket: str, limit: Limits, tokens: int = 10, **changes: object) -> Admit:
    fields = {
        "ticket": ticket,
        "gateway": "gw",
        "tenant": "ten",
        "key": "key",
        "model": "model",
        "versions": CacheVersions(key=1, tenant=1, route=1),
        "limits": limit,
        "input_tokens": tokens,
    }
    return Admit(**(fields | changes))


def levels(state: Buckets) -> tuple[int | None, int | None, int | None]:
    return state.requests, state.input_tokens, state.output_tokens


@st.composite
def used(draw) -> Buckets:
    """A tenant in the middle of things, all its tickets still held."""
    state, now_ms, limit = Buckets(), START_MS, draw(limits)
    for i in range(draw(st.integers(0, 8))):
        admit(state, asking(f"before{i}", limit, draw(st.integers(0, 2_000))), now_ms, RULES)
        if draw(st.booleans()):
            charge(state, ((f"before{i}", draw(st.integers(0, 9_000))),), now_ms, RULES)
        now_ms += draw(st.integers(0, 400))
    return state


@given(state=used(), tokens=st.integers(0, 20_000), wait=waits)
def test_a_refusal_charges_nothing(state, tokens, wait):
    untouched = copy.deepcopy(state)
    asked = asking("t", state.limits, tokens)
    answer = admit(state, asked, state.now_ms + wait, RULES)
    assume(isinstance(answer, LimitRefused))
    cancel(untouched, "nobody", untouched.now_ms + wait)  # only time passes
    assert state == untouched


@given(state=used(), tokens=st.integers(0, 20_000), wait=waits, produced=st.integers(0, 3_000))
def test_cancel_gives_back_exactly_what_was_charged(state, tokens, wait, produced):
    untouched = copy.deepcopy(state)
    answer = admit(state, asking("t", state.limits, tokens), state.now_ms, RULES)
    assume(isinstance(answer, Admitted))
    charge(state, (("t", produced),), state.now_ms, RULES)
    cancel(state, "t", state.now_ms + wait)
    cancel(state, "t", state.now_ms)
    admit(untouched, asking("none", state.limits), untouched.now_ms + wait, RULES)
    cancel(untouched, "none", untouched.now_ms)
    assert levels(state) == levels(untouched)
    assert list(state.held) == list(untouched.held)


@given(state=used(), tokens=st.integers(0, 20_000))
def test_retry_after_is_exact_to_the_millisecond(state, tokens):
    without_slots = Limits(
        requests_per_min=state.limits.requests_per_min,
        input_tokens_per_min=state.limits.input_tokens_per_min,
        output_tokens_per_min=state.limits.output_tokens_per_min,
    )
    asked = asking("t", without_slots, tokens)
    refused = admit(state, asked, state.now_ms, RULES)
    assume(isinstance(refused, LimitRefused))
    assert refused.retry_after_ms > 0
    early = copy.deepcopy(state)
    just_before = admit(early, asked, state.now_ms + refused.retry_after_ms - 1, RULES)
    assert isinstance(just_before, LimitRefused)
    assert isinstance(admit(state, asked, state.now_ms + refused.retry_after_ms, RULES), Admitted)


@given(limit=st.integers(1, 500), gaps=st.lists(st.integers(0, 30_000), max_size=200))
def test_no_history_passes_more_than_a_bucket_and_its_refill(limit, gaps):
    state, now_ms, passed = Buckets(), START_MS, 0
    for i, gap in enumerate(gaps):
        now_ms += gap
        answer = admit(state, asking(f"t{i}", Limits(requests_per_min=limit)), now_ms, RULES)
        passed += isinstance(answer, Admitted)
    most = limit * UNITS + (now_ms - START_MS) * limit
    assert passed * UNITS <= most


def test_refilling_a_millisecond_at_a_time_drifts_by_nothing():
    one_by_one = 0
    for _ in range(60_000):
        one_by_one = refilled(one_by_one, 7, 1)
    assert one_by_one == refilled(0, 7, 60_000) == 7 * UNITS


@pytest.mark.parametrize("tokens", [100, 101, 50_000])
def test_a_first_request_is_not_refused_for_its_size(tokens):
    state = Buckets()
    limit = Limits(input_tokens_per_min=100)
    assert isinstance(admit(state, asking("t1", limit, tokens), START_MS, RULES), Admitted)
    assert state.input_tokens == 0
    refused = admit(state, asking("t2", limit, tokens), START_MS, RULES)
    assert (refused.reason, refused.retry_after_ms) == ("input_tokens", 60_000)


def test_what_was_really_read_is_charged_in_the_end_even_above_a_whole_bucket():
    state, limit = Buckets(), Limits(input_tokens_per_min=100)
    admit(state, asking("t1", limit, 250), START_MS, RULES)
    finish(state, "t1", input_tokens=250, output_total=0, now_ms=START_MS)
    refused = admit(state, asking("t2", limit, 1), START_MS, RULES)
    assert refused.retry_after_ms == 60_000 * 151 // 100
    assert refused.headroom.input_tokens == Remaining(limit=100, remaining=0, reset_ms=150_000)


def test_the_estimate_above_what_was_read_comes_back():
    state, limit = Buckets(), Limits(input_tokens_per_min=100)
    admit(state, asking("t1", limit, 80), START_MS, RULES)
    finish(state, "t1", input_tokens=5, output_total=0, now_ms=START_MS)
    finish(state, "t1", input_tokens=5, output_total=0, now_ms=START_MS)
    assert state.input_tokens == 95 * UNITS


def test_reasons_have_an_order_and_the_wait_is_until_all_would_pass():
    limit = Limits(
        requests_per_min=1, input_tokens_per_min=60, output_tokens_per_min=60, concurrency=1
    )
    state = Buckets()
    admit(state, asking("t1", limit, 30), START_MS, RULES)
    charge(state, (("t1", 180),), START_MS, RULES)
    refused = admit(state, asking("t2", limit, 60), START_MS, RULES)
    assert refused.reason == "requests"
    assert refused.retry_after_ms == 121_000  # output: 120 in debt, and one to start with
    unlimited = Limits(concurrency=1)
    refused = admit(state, asking("t2", unlimited, 60), START_MS, RULES)
    assert (refused.reason, refused.retry_after_ms) == (
        "concurrency",
        RULES.concurrency_retry_ms,
    )


def test_the_same_ticket_again_is_charged_once():
    state, limit = Buckets(), Limits(requests_per_min=1, concurrency=1)
    for _ in range(3):
        assert isinstance(admit(state, asking("t1", limit), START_MS, RULES), Admitted)
    assert state.requests == 0
    assert len(state.held) == 1


def test_output_is_charged_by_absolute_totals():
    state, limit = Buckets(), Limits(output_tokens_per_min=100)
    admit(state, asking("t1", limit), START_MS, RULES)
    for total in (10, 10, 40, 30):
        charge(state, (("t1", total),), START_MS, RULES)
    assert state.output_tokens == 60 * UNITS
    finish(state, "t1", input_tokens=0, output_total=150, now_ms=START_MS)
    assert state.output_tokens == -50 * UNITS


def test_a_ticket_nobody_touches_is_let_go_after_its_lease():
    state, limit = Buckets(), Limits(concurrency=1)
    admit(state, asking("t1", limit), START_MS, RULES)
    charge(state, (("t1", 0),), START_MS + RULES.lease_ms - 1, RULES)
    later_ms = START_MS + 2 * RULES.lease_ms - 2
    assert isinstance(admit(state, asking("t2", limit), later_ms, RULES), LimitRefused)
    assert isinstance(admit(state, asking("t2", limit), later_ms + 1, RULES), Admitted)
    assert list(state.held) == ["t2"]


def test_a_ticket_heard_of_without_its_admit_is_held_but_neither_refunds_nor_trues_up():
    limit = Limits(input_tokens_per_min=100, output_tokens_per_min=100, concurrency=1)
    state = Buckets()
    admit(state, asking("other", limit, 50), START_MS, RULES)
    cancel(state, "other", START_MS)
    charge(state, (("t1", 70),), START_MS, RULES)
    assert levels(state) == (None, 100 * UNITS, 100 * UNITS)
    assert isinstance(admit(state, asking("t2", limit), START_MS, RULES), LimitRefused)
    charge(state, (("t1", 80),), START_MS, RULES)
    finish(state, "t1", input_tokens=40, output_total=80, now_ms=START_MS)
    assert levels(state) == (None, 100 * UNITS, 90 * UNITS)


def test_a_changed_limit_holds_at_once_and_a_new_one_starts_full():
    state = Buckets()
    admit(state, asking("t1", Limits(requests_per_min=10)), START_MS, RULES)
    admit(state, asking("t2", Limits(requests_per_min=2)), START_MS, RULES)
    assert state.requests == UNITS
    admit(state, asking("t3", Limits()), START_MS, RULES)
    assert state.requests is None
    answer = admit(state, asking("t4", Limits(requests_per_min=3)), START_MS, RULES)
    assert answer.headroom.requests.remaining == 2
    cancel(state, "t3", START_MS)
    assert state.requests == 2 * UNITS


def test_cancelling_what_was_charged_to_limits_since_lifted():
    state = Buckets()
    limit = Limits(requests_per_min=5, input_tokens_per_min=5, output_tokens_per_min=5)
    admit(state, asking("t1", limit, 1), START_MS, RULES)
    admit(state, asking("t2", Limits()), START_MS, RULES)
    cancel(state, "t1", START_MS)
    finish(state, "t2", input_tokens=9, output_total=9, now_ms=START_MS)
    assert levels(state) == (None, None, None)


def test_the_clock_never_goes_back():
    state, limit = Buckets(), Limits(requests_per_min=1)
    admit(state, asking("t1", limit), START_MS, RULES)
    refused = admit(state, asking("t2", limit), START_MS - 50_000, RULES)
    assert refused.retry_after_ms == 60_000


def test_limits_and_debts_are_bounded_so_that_every_level_is_exact_in_a_double():
    state = Buckets()
    admit(state, asking("t1", Limits(output_tokens_per_min=10**15)), START_MS, RULES)
    assert state.limits.output_tokens_per_min == LIMIT_MAX
    charge(state, (("t1", 10**15),), START_MS, RULES)
    assert state.output_tokens == -DEBT_MAX
    assert LIMIT_MAX * UNITS + DEBT_MAX < 2**53


def test_waiting_for_what_is_there_takes_no_time():
    assert wait_ms(10, 10, 3) == 0
    assert wait_ms(10, 11, 3) == 1
    assert wait_ms(-10, 11, 3) == 7


def test_older_versions_than_pushed_are_stale_and_unknown_ones_are_not():
    asked = asking("t", Limits(), versions=CacheVersions(key=2, tenant=2, route=2))
    assert check_versions({}, asked) is None
    assert check_versions({"tenant": 2, "key:key": 1, "route:model": 2}, asked) is None
    assert check_versions({"tenant": 3, "key:other": 9}, asked) == Stale(tenant=True)
    assert check_versions({"key:key": 3, "route:model": 3}, asked) == Stale(key=True, route=True)
