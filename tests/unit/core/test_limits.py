"""A tenant's limits: exact, refundable, and never charged by a refusal."""

import copy

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.limits import (
    DEBT_MAX,
    INPUT,
    LIMIT_MAX,
    OUTPUT,
    REQUESTS,
    UNITS,
    Buckets,
    LimitRules,
    admit,
    cancel,
    charge,
    check_versions,
    finish,
    look,
    refilled,
    restore,
    wait_ms,
)
from core.tickets import (
    TENANT_SCOPE,
    Admit,
    Admitted,
    CacheVersions,
    Headroom,
    LimitRefused,
    Limits,
    Output,
    Remaining,
    Scope,
    Stale,
    tightest_rooms,
)

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


def levels(state: Buckets, scope: str = TENANT_SCOPE) -> tuple[int | None, ...]:
    return tuple(state.scopes[scope].levels)


def produce(state: Buckets, ticket: str, total: int, now_ms: int = START_MS) -> None:
    charge(state, (Output(ticket, total),), now_ms, RULES)


def end(state: Buckets, ticket: str, *, read: int, written: int) -> None:
    finish(state, ticket, input_tokens=read, output_total=written, now_ms=START_MS, rules=RULES)


class Story:
    """A tenant in the middle of things, all its tickets still held, and one more request."""

    def __init__(self, limit: Limits, scopes: tuple[Scope, ...]) -> None:
        self.state, self.now_ms, self.limit, self.scopes = Buckets(), START_MS, limit, scopes

    def ask(self, ticket: str, tokens: int, output: int, state: Buckets | None = None) -> object:
        asked = asking(ticket, self.limit, tokens, scopes=self.scopes, output_tokens=output)
        return admit(state or self.state, asked, self.now_ms, RULES)

    def snapshot(self, state: Buckets) -> object:
        """As it is now, and what counts where."""
        for scope in (Scope(name=TENANT_SCOPE, limits=self.limit), *self.scopes):
            cancel(state, "nobody", self.now_ms, RULES)
            charge(state, (Output("passing", 0, (scope.name,)),), self.now_ms, RULES)
            cancel(state, "passing", self.now_ms, RULES)
        return {name: (b.levels, b.held) for name, b in state.scopes.items()}, set(state.held)


@st.composite
def stories(draw) -> Story:
    names = draw(st.lists(st.sampled_from(["key:k", "model:m"]), unique=True))
    story = Story(draw(limits), tuple(Scope(name=name, limits=draw(limits)) for name in names))
    story.ask("first", 0, 0)
    for i in range(draw(st.integers(0, 8))):
        story.ask(f"before{i}", draw(st.integers(0, 2_000)), draw(st.integers(0, 400)))
        if f"before{i}" in story.state.held and draw(st.booleans()):
            produce(story.state, f"before{i}", draw(st.integers(0, 9_000)), story.now_ms)
        story.now_ms += draw(st.integers(0, 400))
    return story


@given(story=stories(), tokens=st.integers(0, 20_000), wait=waits)
def test_a_refusal_charges_nothing_in_any_scope(story, tokens, wait):
    story.now_ms += wait
    before = story.snapshot(copy.deepcopy(story.state))
    assume(isinstance(story.ask("t", tokens, 100), LimitRefused))
    assert story.snapshot(story.state) == before


@given(story=stories(), tokens=st.integers(0, 20_000), wait=waits, produced=st.integers(0, 3_000))
def test_cancel_gives_back_exactly_what_was_charged_in_every_scope(story, tokens, wait, produced):
    untouched = copy.deepcopy(story.state)
    assume(isinstance(story.ask("t", tokens, 100), Admitted))
    produce(story.state, "t", produced, story.now_ms)
    story.now_ms += wait
    cancel(story.state, "t", story.now_ms, RULES)
    cancel(story.state, "t", story.now_ms, RULES)
    assert story.snapshot(story.state) == story.snapshot(untouched)


@given(story=stories(), tokens=st.integers(0, 20_000))
def test_retry_after_is_exact_to_the_millisecond_over_all_scopes(story, tokens):
    story.limit = msgspec.structs.replace(story.limit, concurrency=0)
    story.scopes = tuple(
        Scope(name=s.name, limits=msgspec.structs.replace(s.limits, concurrency=0))
        for s in story.scopes
    )
    refused = story.ask("t", tokens, 100)
    assume(isinstance(refused, LimitRefused))
    assert refused.retry_after_ms > 0
    story.now_ms += refused.retry_after_ms - 1
    assert isinstance(story.ask("t", tokens, 100, copy.deepcopy(story.state)), LimitRefused)
    story.now_ms += 1
    assert isinstance(story.ask("t", tokens, 100), Admitted)


@given(story=stories())
def test_a_scope_counts_exactly_the_tickets_that_name_it(story):
    for name, bucket in story.state.scopes.items():
        assert bucket.held == sum(name in held.scopes for held in story.state.held.values())


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
    assert levels(state)[INPUT] == 0
    refused = admit(state, asking("t2", limit, tokens), START_MS, RULES)
    assert (refused.reason, refused.retry_after_ms) == ("input_tokens", 60_000)


def test_what_was_really_read_is_charged_in_the_end_even_above_a_whole_bucket():
    state, limit = Buckets(), Limits(input_tokens_per_min=100)
    admit(state, asking("t1", limit, 250), START_MS, RULES)
    end(state, "t1", read=250, written=0)
    refused = admit(state, asking("t2", limit, 1), START_MS, RULES)
    assert refused.retry_after_ms == 60_000 * 151 // 100
    assert refused.headroom.input_tokens == Remaining(limit=100, remaining=0, reset_ms=150_000)


def test_the_estimate_above_what_was_read_comes_back():
    state, limit = Buckets(), Limits(input_tokens_per_min=100)
    admit(state, asking("t1", limit, 80), START_MS, RULES)
    end(state, "t1", read=5, written=0)
    end(state, "t1", read=5, written=0)
    assert levels(state)[INPUT] == 95 * UNITS


def test_reasons_have_an_order_and_the_wait_is_until_all_would_pass():
    limit = Limits(
        requests_per_min=1, input_tokens_per_min=60, output_tokens_per_min=60, concurrency=1
    )
    state = Buckets()
    admit(state, asking("t1", limit, 30), START_MS, RULES)
    produce(state, "t1", 180)
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
    assert levels(state)[REQUESTS] == 0
    assert len(state.held) == 1


def test_output_is_charged_by_absolute_totals():
    state, limit = Buckets(), Limits(output_tokens_per_min=100)
    admit(state, asking("t1", limit), START_MS, RULES)
    for total in (10, 10, 40, 30):
        produce(state, "t1", total)
    assert levels(state)[OUTPUT] == 60 * UNITS
    end(state, "t1", read=0, written=150)
    assert levels(state)[OUTPUT] == -50 * UNITS


def test_a_ticket_nobody_touches_is_let_go_after_its_lease():
    state, limit = Buckets(), Limits(concurrency=1)
    admit(state, asking("t1", limit), START_MS, RULES)
    produce(state, "t1", 0, START_MS + RULES.lease_ms - 1)
    later_ms = START_MS + 2 * RULES.lease_ms - 2
    assert isinstance(admit(state, asking("t2", limit), later_ms, RULES), LimitRefused)
    assert isinstance(admit(state, asking("t2", limit), later_ms + 1, RULES), Admitted)
    assert list(state.held) == ["t2"]


def test_a_ticket_heard_of_without_its_admit_is_held_but_neither_refunds_nor_trues_up():
    limit = Limits(input_tokens_per_min=100, output_tokens_per_min=100, concurrency=1)
    state = Buckets()
    admit(state, asking("other", limit, 50), START_MS, RULES)
    cancel(state, "other", START_MS, RULES)
    produce(state, "t1", 70)
    assert isinstance(admit(state, asking("t2", limit), START_MS, RULES), LimitRefused)
    produce(state, "t1", 80)
    end(state, "t1", read=40, written=80)
    assert levels(state) == (None, 100 * UNITS, 90 * UNITS)


def test_a_changed_limit_holds_at_once_and_a_new_one_starts_full():
    state = Buckets()
    admit(state, asking("t1", Limits(requests_per_min=10)), START_MS, RULES)
    admit(state, asking("t2", Limits(requests_per_min=2)), START_MS, RULES)
    assert levels(state)[REQUESTS] == UNITS
    admit(state, asking("t3", Limits()), START_MS, RULES)
    assert levels(state)[REQUESTS] is None
    answer = admit(state, asking("t4", Limits(requests_per_min=3)), START_MS, RULES)
    assert answer.headroom.requests.remaining == 2
    cancel(state, "t3", START_MS, RULES)
    assert levels(state)[REQUESTS] == 2 * UNITS


def test_cancelling_what_was_charged_to_limits_since_lifted():
    state = Buckets()
    limit = Limits(requests_per_min=5, input_tokens_per_min=5, output_tokens_per_min=5)
    admit(state, asking("t1", limit, 1), START_MS, RULES)
    admit(state, asking("t2", Limits()), START_MS, RULES)
    cancel(state, "t1", START_MS, RULES)
    end(state, "t2", read=9, written=9)
    assert levels(state) == (None, None, None)


def test_the_clock_never_goes_back():
    state, limit = Buckets(), Limits(requests_per_min=1)
    admit(state, asking("t1", limit), START_MS, RULES)
    refused = admit(state, asking("t2", limit), START_MS - 50_000, RULES)
    assert refused.retry_after_ms == 60_000


def test_limits_and_debts_are_bounded_so_that_every_level_is_exact_in_a_double():
    state = Buckets()
    admit(state, asking("t1", Limits(output_tokens_per_min=10**15)), START_MS, RULES)
    assert state.scopes[TENANT_SCOPE].per_min[OUTPUT] == LIMIT_MAX
    produce(state, "t1", 10**15)
    assert levels(state)[OUTPUT] == -DEBT_MAX
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


KEY = Scope(name="key:k", limits=Limits(requests_per_min=2, concurrency=1))
MODEL = Scope(name="model:m", limits=Limits(input_tokens_per_min=60))


def test_the_first_scope_in_the_way_is_named_and_the_wait_is_until_none_is():
    state, limit = Buckets(), Limits(requests_per_min=60)
    first = asking("t1", limit, 60, scopes=(KEY, MODEL))
    assert isinstance(admit(state, first, START_MS, RULES), Admitted)
    refused = admit(state, asking("t2", limit, 30, scopes=(KEY, MODEL)), START_MS, RULES)
    assert (refused.scope, refused.reason) == ("key:k", "concurrency")
    assert refused.retry_after_ms == 30_000  # for half of the model's input
    other = asking("t3", limit, 30, scopes=(MODEL,))
    refused = admit(state, other, START_MS, RULES)
    assert (refused.scope, refused.reason) == ("model:m", "input_tokens")
    unbound = asking("t4", limit, 30)
    assert isinstance(admit(state, unbound, START_MS, RULES), Admitted)


def test_finish_trues_up_in_every_scope():
    state, limit = Buckets(), Limits(input_tokens_per_min=1_000, output_tokens_per_min=1_000)
    scope = Scope(name="model:m", limits=Limits(input_tokens_per_min=50, output_tokens_per_min=70))
    asked = asking("t1", limit, 100, scopes=(scope,), output_tokens=500)
    admit(state, asked, START_MS, RULES)
    assert levels(state) == (None, 900 * UNITS, (1_000 - RULES.output_hold_tokens) * UNITS)
    assert levels(state, "model:m") == (None, 0, 0)
    end(state, "t1", read=40, written=10)
    assert levels(state) == (None, 960 * UNITS, 990 * UNITS)
    assert levels(state, "model:m") == (None, 10 * UNITS, 60 * UNITS)


def test_what_is_held_of_an_answer_is_bounded_and_used_up_first():
    state, limit = Buckets(), Limits(output_tokens_per_min=1_000)
    admit(state, asking("t1", limit, output_tokens=64_000), START_MS, RULES)
    assert levels(state)[OUTPUT] == (1_000 - RULES.output_hold_tokens) * UNITS
    produce(state, "t1", RULES.output_hold_tokens)
    assert levels(state)[OUTPUT] == (1_000 - RULES.output_hold_tokens) * UNITS
    produce(state, "t1", 300)
    assert levels(state)[OUTPUT] == 700 * UNITS


def test_an_answer_takes_what_is_left_and_never_waits_for_more_than_a_token():
    state, limit = Buckets(), Limits(output_tokens_per_min=100)
    for ticket, left in (("t1", 20), ("t2", 0)):
        asked = asking(ticket, limit, output_tokens=80)
        assert isinstance(admit(state, asked, START_MS, RULES), Admitted)
        assert levels(state)[OUTPUT] == left * UNITS
    refused = admit(state, asking("t3", limit, output_tokens=80), START_MS, RULES)
    assert (refused.reason, refused.retry_after_ms) == ("output_tokens", 600)


def test_a_limit_that_comes_while_an_answer_runs_counts_all_of_it():
    state = Buckets()
    admit(state, asking("t1", Limits()), START_MS, RULES)
    produce(state, "t1", 30)
    admit(state, asking("t2", Limits(output_tokens_per_min=100)), START_MS, RULES)
    produce(state, "t1", 40)
    assert levels(state)[OUTPUT] == 60 * UNITS


def test_a_ticket_past_its_lease_is_let_go_of_wherever_it_counted():
    few = LimitRules(lapsed_max=1)
    state, scope = Buckets(), Scope(name="key:k", limits=Limits(concurrency=9))
    for ticket in ("a", "b", "c"):
        admit(state, asking(ticket, Limits(), scopes=(scope,)), START_MS, RULES)
    late_ms = START_MS + RULES.lease_ms
    cancel(state, "nobody", late_ms, few)
    assert list(state.held) == ["b", "c"]
    charge(state, (Output("c", 5),), late_ms, few)  # lets go of b, and finds c too late
    assert list(state.held) == ["c"]
    assert not state.held["c"].charged
    assert (state.scopes[TENANT_SCOPE].held, state.scopes["key:k"].held) == (1, 0)


def test_scopes_as_good_as_new_are_forgotten_and_those_that_hold_are_not():
    state, limit = Buckets(), Limits(requests_per_min=1)
    admit(state, asking("t1", limit, scopes=(KEY, MODEL)), START_MS, RULES)
    for now_ms in range(START_MS, START_MS + 80_000, 4_000):
        produce(state, "t1", 0, now_ms)
        assert set(state.scopes) == {TENANT_SCOPE, "key:k", "model:m"}
    cancel(state, "t1", now_ms, RULES)
    cancel(state, "nobody", now_ms + 60_000, RULES)
    assert state.scopes == {}


def test_the_tightest_bucket_of_all_scopes_is_told():
    wide = Headroom(requests=Remaining(limit=60, remaining=50, reset_ms=1_000))
    narrow = Headroom(
        requests=Remaining(limit=5, remaining=4, reset_ms=12_000),
        input_tokens=Remaining(limit=9, remaining=9),
    )
    assert tightest_rooms((wide,)) is wide
    assert tightest_rooms((wide, narrow)) == narrow
    assert tightest_rooms((wide, Headroom())) == wide


@given(story=stories(), gone_ms=st.integers(0, 90_000))
def test_a_scope_restored_from_what_was_told_has_no_more_than_it_had(story, gone_ms):
    answer = story.ask("t", 10, 10)
    restored = Buckets()
    for scope, room in zip(
        (Scope(name=TENANT_SCOPE, limits=story.limit), *story.scopes), answer.rooms, strict=True
    ):
        restore(restored, scope, room, story.now_ms, RULES)
    for name, bucket in restored.scopes.items():
        theirs = story.state.scopes[name]
        for mine, level, limit in zip(bucket.levels, theirs.levels, bucket.per_min, strict=True):
            assert (mine is None) == (level is None)
            assert mine is None or level - limit < mine <= level
    restore(restored, Scope(name="key:k", limits=Limits()), Headroom(), story.now_ms, RULES)
    restore(restored, KEY, Headroom(), story.now_ms, RULES)


@given(limit=limits, asked=st.lists(st.integers(0, 900), max_size=6), later_ms=waits)
def test_who_looks_sees_what_the_next_would_find_and_changes_nothing(limit, asked, later_ms):
    state = Buckets()
    for n, tokens in enumerate(asked):
        admit(state, asking(str(n), limit, tokens), START_MS, RULES)
    now_ms = START_MS + later_ms
    before = copy.deepcopy(state)
    (seen,) = look(state, (Scope(name=TENANT_SCOPE, limits=limit),), now_ms, RULES)
    assert state == before
    answer = admit(state, asking("next", limit, 0), now_ms, RULES)
    if isinstance(answer, LimitRefused):
        assert seen.room == answer.rooms[0]
        assert seen.held == state.scopes[TENANT_SCOPE].held
    else:
        assert seen.held == state.scopes[TENANT_SCOPE].held - 1
        left = answer.rooms[0].requests.remaining
        assert seen.room.requests.remaining - (limit.requests_per_min > 0) in {left, left - 1}


def test_who_looks_counts_no_ticket_past_its_lease() -> None:
    state, limit = Buckets(), Limits(concurrency=2)
    admit(state, asking("a", limit), START_MS, RULES)
    scopes = (Scope(name=TENANT_SCOPE, limits=limit),)
    (during,) = look(state, scopes, START_MS + RULES.lease_ms - 1, RULES)
    (after,) = look(state, scopes, START_MS + RULES.lease_ms, RULES)
    assert (during.held, after.held) == (1, 0)
    assert look(Buckets(), scopes, START_MS, RULES)[0].held == 0
