"""The ledger's rules, one scenario each; `test_ledger_machine` looks for what these miss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.accounts import EntryKind
from core.ledger import Book, Expire, release
from core.metering import LedgerRefused, Reserved, Settle, Settled
from core.money import EndCause
from core.protocol import Usage
from core.witnesses import Heard, accepted_tokens, heard_from, merge, metered
from tests.support.ledger_commands import (
    PRICES,
    a_reserve,
    a_settle,
    a_top_up,
    a_usage,
    a_witness,
    an_attempt,
)
from tests.support.ledger_strategies import settles, witnesses

HARD_CAP = 1_000
NOTHING = Usage()


@pytest.fixture
def book() -> Book:
    book = Book(PRICES)
    book.open_account("ten_1", HARD_CAP)
    book.open_account("ten_2", None)
    return book


def kinds(book: Book) -> list[str]:
    return [entry.kind.value for entry in book.entries]


def an_expire(request_id="req_1"):
    return Expire(request_id=request_id, ended_ms=9_000)


class TestReserve:
    def test_holds_the_amount(self, book):
        assert book.reserve(a_reserve(amount_micro=100)) == Reserved(reserved_micro=100)
        assert book.accounts["ten_1"].reserved_micro == 100
        assert kinds(book) == ["reserve"]

    def test_again_with_the_same_fields_answers_the_same_and_does_nothing(self, book):
        first = book.reserve(a_reserve())
        assert book.reserve(a_reserve()) == first
        assert kinds(book) == ["reserve"]

    @pytest.mark.parametrize(
        "changes", [{"amount_micro": 1}, {"tenant_id": "ten_2"}, {"key_id": "key_9"}]
    )
    def test_again_with_other_fields_is_refused(self, book, changes):
        book.reserve(a_reserve())
        assert book.reserve(a_reserve(**changes)) == LedgerRefused(reason="id_reused")
        assert kinds(book) == ["reserve"]

    def test_up_to_the_hard_cap_and_not_over_it(self, book):
        assert book.reserve(a_reserve("a", amount_micro=HARD_CAP)) == Reserved(
            reserved_micro=HARD_CAP
        )
        assert book.reserve(a_reserve("b", amount_micro=1)) == LedgerRefused(
            reason="hard_cap",
            limit="account.total",
            reserved_micro=HARD_CAP,
            hard_cap_micro=HARD_CAP,
        )

    def test_what_was_refused_stays_refused_though_there_is_room_now(self, book):
        book.reserve(a_reserve("a", amount_micro=HARD_CAP))
        refused = book.reserve(a_reserve("b", amount_micro=1))
        book.settle(release("a", "ten_1", 2_000))
        assert book.reserve(a_reserve("b", amount_micro=1)) == refused
        assert isinstance(book.reserve(a_reserve("c", amount_micro=1)), Reserved)

    def test_without_a_cap_anything_goes(self, book):
        assert isinstance(book.reserve(a_reserve(tenant_id="ten_2", amount_micro=10**12)), Reserved)

    def test_needs_an_account_before_a_price(self, book):
        asked = a_reserve("a", tenant_id="ten_9", price_id="none")
        assert book.reserve(asked) == LedgerRefused(reason="no_account")
        assert book.reserve(a_reserve("b", price_id="none")) == LedgerRefused(reason="no_price")

    def test_needs_a_price_before_room(self, book):
        asked = a_reserve(price_id="none", amount_micro=10**9)
        assert book.reserve(asked) == LedgerRefused(reason="no_price")

    def test_opening_an_account_twice_keeps_it(self, book):
        book.reserve(a_reserve())
        book.open_account("ten_1", None)
        assert book.accounts["ten_1"].hard_cap_micro == HARD_CAP
        assert book.accounts["ten_1"].reserved_micro == 100

    def test_a_lowered_cap_refuses_even_nothing_and_takes_nothing_back(self, book):
        book.reserve(a_reserve("a", amount_micro=500))
        book.set_terms("ten_1", hard_cap_micro=400)
        assert isinstance(book.reserve(a_reserve("b", amount_micro=0)), LedgerRefused)
        assert book.accounts["ten_1"].reserved_micro == 500


class TestTopUp:
    def test_raises_to_a_total(self, book):
        book.reserve(a_reserve(amount_micro=100))
        assert book.top_up(a_top_up(total_micro=250)) == Reserved(reserved_micro=250)
        assert book.accounts["ten_1"].reserved_micro == 250
        assert book.reserve(a_reserve(amount_micro=100)) == Reserved(reserved_micro=250)

    def test_again_or_lower_changes_nothing(self, book):
        book.reserve(a_reserve(amount_micro=100))
        book.top_up(a_top_up(total_micro=250))
        assert book.top_up(a_top_up(total_micro=250)) == Reserved(reserved_micro=250)
        assert book.top_up(a_top_up(total_micro=50)) == Reserved(reserved_micro=250)
        assert kinds(book) == ["reserve", "top_up"]

    def test_over_the_cap_is_refused_and_may_be_asked_again(self, book):
        book.reserve(a_reserve("a", amount_micro=600))
        book.reserve(a_reserve("b", amount_micro=400))
        assert book.top_up(a_top_up("a", total_micro=700)) == LedgerRefused(
            reason="hard_cap",
            limit="account.total",
            reserved_micro=HARD_CAP,
            hard_cap_micro=HARD_CAP,
        )
        book.settle(release("b", "ten_1", 2_000))
        assert book.top_up(a_top_up("a", total_micro=700)) == Reserved(reserved_micro=700)

    def test_needs_an_open_request_of_this_tenant(self, book):
        assert book.top_up(a_top_up()) == LedgerRefused(reason="not_open")
        book.reserve(a_reserve())
        assert book.top_up(a_top_up(tenant_id="ten_2")) == LedgerRefused(reason="not_open")
        book.settle(a_settle())
        assert book.top_up(a_top_up()) == LedgerRefused(reason="not_open")


class TestSettle:
    def test_posts_the_bill_and_frees_the_rest(self, book):
        book.reserve(a_reserve(amount_micro=100))
        settled = book.settle(a_settle(attempts=(an_attempt(a_usage(10, 0, 20)),)))
        assert settled == Settled(
            billed_micro=50, metered=a_usage(10, 0, 20), cause=EndCause.COMPLETE
        )
        account = book.accounts["ten_1"]
        assert (account.reserved_micro, account.posted_micro) == (0, 50)
        assert kinds(book) == ["reserve", "settle"]

    def test_again_changes_nothing_and_the_first_cause_holds(self, book):
        book.reserve(a_reserve())
        first = book.settle(a_settle(delivered_tokens=20))
        assert book.settle(a_settle()) == first
        assert book.settle(a_settle(cause=EndCause.FAILED, delivered_tokens=1)) == first
        assert kinds(book) == ["reserve", "settle"]
        assert book.rows["req_1"].delivered_tokens == 20

    def test_a_bill_over_the_reservation_is_overage_without_a_cap(self, book):
        book.reserve(a_reserve(tenant_id="ten_2", amount_micro=30))
        word = a_settle(tenant_id="ten_2", attempts=(an_attempt(a_usage(10, 0, 20)),))
        book.settle(word)
        assert [(e.kind, e.reserved_delta_micro, e.posted_delta_micro) for e in book.entries] == [
            (EntryKind.RESERVE, 30, 0),
            (EntryKind.SETTLE, -30, 30),
            (EntryKind.OVERAGE, 0, 20),
        ]

    def test_our_failure_is_metered_and_not_billed(self, book):
        book.reserve(a_reserve())
        settled = book.settle(a_settle(cause=EndCause.FAILED))
        assert settled == Settled(billed_micro=0, metered=a_usage(), cause=EndCause.FAILED)
        assert kinds(book) == ["reserve", "release"]

    def test_of_what_was_never_reserved_is_refused(self, book):
        assert book.settle(a_settle()) == LedgerRefused(reason="not_open")
        book.reserve(a_reserve())
        assert book.settle(a_settle(tenant_id="ten_2")) == LedgerRefused(reason="not_open")
        assert book.settle(release("req_1", "ten_2", 1)) == LedgerRefused(reason="not_open")

    def test_a_release_before_its_reserve_closes_the_id(self, book):
        nothing = Settled(billed_micro=0, metered=NOTHING, cause=EndCause.NOT_STARTED)
        assert book.settle(release("req_1", "ten_1", 1)) == nothing
        assert book.reserve(a_reserve()) == LedgerRefused(reason="not_open")
        assert book.entries == []

    def test_keeps_what_the_gateway_saw(self, book):
        book.reserve(a_reserve())
        word = a_settle(delivered_tokens=7, ended_ms=4_321)
        book.settle(word)
        row = book.rows["req_1"]
        assert (row.delivered_tokens, row.ended_ms, row.timings) == (7, 4_321, word.timings)

    def test_several_attempts_add_their_output_and_count_the_prompt_once(self, book):
        book.reserve(a_reserve())
        attempts = (
            an_attempt(a_usage(10, 0, 5), attempt=1),
            an_attempt(a_usage(10, 8, 15), attempt=2),
        )
        settled = book.settle(a_settle(attempts=attempts))
        assert settled.metered == a_usage(10, 8, 20)
        assert book.rows["req_1"].attempts == 2


class TestBill:
    """Whatever our faults made of it, it stays within bounds."""

    def test_is_for_what_the_gateway_accepted_of_each_attempt(self, book):
        book.reserve(a_reserve(max_tokens=84, choices=3))
        book.reconcile(a_witness(attempt=1, usage=a_usage(10, 0, 81)))
        book.reconcile(a_witness(attempt=2, usage=a_usage(10, 0, 7)))  # never heard of there
        attempts = (
            an_attempt(a_usage(10, 0, 1), attempt=1),
            an_attempt(a_usage(10, 0, 4), attempt=3),
        )
        settled = book.settle(a_settle(attempts=attempts))
        assert settled.metered == a_usage(10, 0, 92)
        assert settled.billed_micro == 10 + 2 * 5
        assert book.rows["req_1"].accepted_tokens == 5

    def test_never_counts_more_output_than_was_asked_for(self, book):
        book.reserve(a_reserve(amount_micro=1_000, max_tokens=6, choices=2))
        settled = book.settle(a_settle(attempts=(an_attempt(a_usage(10, 0, 40)),)))
        assert (settled.billed_micro, settled.metered.output_tokens) == (10 + 2 * 12, 40)

    def test_of_a_lost_request_is_for_what_witnesses_say_within_what_was_asked(self, book):
        book.reserve(a_reserve(max_tokens=30))
        book.reconcile(a_witness(attempt=1, usage=a_usage(10, 0, 20)))
        book.reconcile(a_witness(attempt=2, usage=a_usage(10, 0, 20)))
        settled = book.expire(an_expire())
        assert (settled.billed_micro, settled.metered.output_tokens) == (10 + 2 * 30, 40)


@st.composite
def words_of_one_request(draw):
    """A settlement or a sweep, or both, and witnesses, some of them twice."""
    ends = [draw(settles()), an_expire("r1")]
    about = draw(st.lists(witnesses(), max_size=5))
    spoken = draw(st.sampled_from([ends, ends[:1], ends[1:]])) + about
    spoken = [replace(word, request_id="r1") for word in spoken]
    spoken = [
        replace(word, tenant_id="ten_2") if isinstance(word, Settle) else word for word in spoken
    ]
    return spoken + draw(st.lists(st.sampled_from(spoken), max_size=3))


@given(words_of_one_request(), st.randoms())
def test_a_bill_without_a_cap_does_not_depend_on_the_order_of_words(spoken, random):
    assert bill_after(spoken) == bill_after(random.sample(spoken, len(spoken)))


def bill_after(spoken):
    book = Book(PRICES)
    book.open_account("ten_2", None)
    book.reserve(a_reserve("r1", tenant_id="ten_2", amount_micro=40, choices=2))
    for word in spoken:
        match word:
            case Settle():
                book.settle(word)
            case Expire():
                book.expire(word)
            case _:
                book.reconcile(word)
    row = book.rows["r1"]
    assert book.accounts["ten_2"].posted_micro == row.billed_micro
    return row.cause, row.billed_micro, row.metered, row.accepted_tokens


class TestBillUnderAHardCap:
    def test_is_no_more_than_was_held(self, book):
        book.reserve(a_reserve(amount_micro=20))
        book.top_up(a_top_up(total_micro=30))
        settled = book.settle(a_settle())
        assert (settled.billed_micro, settled.metered) == (30, a_usage())
        assert book.settle(a_settle()) == settled
        assert kinds(book) == ["reserve", "top_up", "settle"]
        assert book.rows["req_1"].bill_limit_micro == 30

    def test_is_corrected_up_to_what_was_held_and_no_further(self, book):
        book.reserve(a_reserve(amount_micro=30))
        book.expire(an_expire())
        checkpoint = a_witness(source="checkpoint", final=False, cause="")
        assert book.reconcile(checkpoint).billed_micro == 30
        assert book.reconcile(a_witness(usage=a_usage(10, 0, 5))).billed_micro == 20

    def test_is_corrected_only_into_what_room_is_left_and_for_good(self, book):
        book.reserve(a_reserve("a", amount_micro=100))
        book.expire(an_expire("a"))
        book.reserve(a_reserve("b", amount_micro=HARD_CAP - 10))
        assert book.reconcile(a_witness("a")).billed_micro == 10
        assert book.accounts["ten_1"].posted_micro == 10
        book.settle(release("b", "ten_1", 2_000))
        assert book.reconcile(a_witness("a")).billed_micro == 10

    def test_falls_before_it_is_limited(self, book):
        book.reserve(a_reserve(amount_micro=100))
        book.settle(a_settle())
        book.set_terms("ten_1", hard_cap_micro=0)
        assert book.settle(a_settle()).billed_micro == 50
        assert book.reconcile(a_witness(usage=a_usage(10, 0, 5))).billed_micro == 20

    def test_that_was_posted_before_there_was_a_cap_stays(self, book):
        book.reserve(a_reserve(tenant_id="ten_2", amount_micro=30))
        settled = book.settle(a_settle(tenant_id="ten_2"))
        assert settled.billed_micro == 50
        book.set_terms("ten_2", hard_cap_micro=40)
        assert book.settle(a_settle(tenant_id="ten_2")) == settled
        assert book.rows["req_1"].bill_limit_micro is None
        more = a_settle(tenant_id="ten_2", attempts=(an_attempt(a_usage(10, 0, 25)),))
        assert book.settle(more).billed_micro == 50
        assert book.rows["req_1"].bill_limit_micro == 50


class TestExpire:
    def test_without_a_witness_frees_it_for_nothing(self, book):
        book.reserve(a_reserve())
        assert book.expire(an_expire()) == Settled(
            billed_micro=0, metered=NOTHING, cause=EndCause.NOT_STARTED
        )
        assert kinds(book) == ["reserve", "expire"]

    def test_bills_what_witnesses_heard_of(self, book):
        book.reserve(a_reserve())
        assert book.reconcile(a_witness(source="checkpoint", final=False, cause="")) is None
        assert book.expire(an_expire()) == Settled(
            billed_micro=50, metered=a_usage(), cause=EndCause.LOST
        )
        assert kinds(book) == ["reserve", "settle"]

    def test_a_late_witness_raises_not_started_to_lost(self, book):
        book.reserve(a_reserve())
        book.expire(an_expire())
        assert book.reconcile(a_witness()).cause is EndCause.LOST
        assert kinds(book) == ["reserve", "expire", "correction"]
        assert book.accounts["ten_1"].posted_micro == 50

    def test_yields_to_the_gateways_own_word(self, book):
        book.reserve(a_reserve())
        book.reconcile(a_witness())
        book.expire(an_expire())
        assert book.settle(a_settle(cause=EndCause.FAILED)).cause is EndCause.FAILED
        assert book.accounts["ten_1"].posted_micro == 0
        assert book.settle(a_settle(cause=EndCause.COMPLETE)).cause is EndCause.FAILED

    def test_changes_nothing_that_has_ended(self, book):
        book.reserve(a_reserve())
        book.settle(a_settle())
        before = book.rows["req_1"]
        assert book.expire(an_expire()) == LedgerRefused(reason="not_open")
        assert book.rows["req_1"] == before

    def test_of_what_was_never_reserved_is_refused(self, book):
        assert book.expire(an_expire()) == LedgerRefused(reason="not_open")


class TestReconcile:
    def test_before_the_end_is_counted_at_the_end(self, book):
        book.reserve(a_reserve())
        assert book.reconcile(a_witness(usage=a_usage(10, 0, 25))) is None
        assert book.settle(a_settle()).metered == a_usage(10, 0, 25)

    def test_of_an_unknown_request_is_kept_for_it(self, book):
        assert book.reconcile(a_witness(usage=a_usage(10, 0, 25))) is None
        book.reserve(a_reserve())
        assert book.settle(a_settle()).metered == a_usage(10, 0, 25)

    def test_posts_only_the_difference_however_often(self, book):
        book.reserve(a_reserve())
        book.reconcile(a_witness(source="checkpoint", final=False, cause=""))
        book.expire(an_expire())
        for _ in range(3):
            settled = book.reconcile(a_witness(usage=a_usage(10, 0, 25)))
            assert settled.billed_micro == 60
        assert kinds(book) == ["reserve", "settle", "correction"]

    def test_what_the_gateway_never_accepted_is_metered_and_not_billed(self, book):
        book.reserve(a_reserve())
        book.settle(a_settle())
        settled = book.reconcile(a_witness(usage=a_usage(10, 0, 25)))
        assert settled == Settled(
            billed_micro=50, metered=a_usage(10, 0, 25), cause=EndCause.COMPLETE
        )
        assert kinds(book) == ["reserve", "settle", "correction"]
        assert book.entries[-1].posted_delta_micro == 0

    def test_the_journals_own_last_word_corrects_downwards(self, book):
        book.reserve(a_reserve())
        book.settle(a_settle())
        assert book.reconcile(a_witness(usage=a_usage(10, 0, 5))).billed_micro == 20
        assert book.entries[-1].posted_delta_micro == -30

    def test_a_journal_that_its_worker_did_not_live_to_end_is_a_lower_bound(self, book):
        book.reserve(a_reserve())
        book.settle(a_settle())
        word = a_witness(usage=a_usage(10, 0, 5), cause="lost")
        assert book.reconcile(word).metered == a_usage(10, 0, 20)

    def test_after_our_failure_is_metered_and_not_billed(self, book):
        book.reserve(a_reserve())
        book.settle(a_settle(cause=EndCause.FAILED, attempts=()))
        settled = book.reconcile(a_witness())
        assert settled == Settled(billed_micro=0, metered=a_usage(), cause=EndCause.FAILED)


@st.composite
def words(draw):
    prompt = draw(st.integers(0, 5))
    return Heard(
        usage=Usage(
            prompt_tokens=prompt,
            cached_tokens=draw(st.integers(0, prompt)),
            output_tokens=draw(st.integers(0, 5)),
        ),
        exact=draw(st.booleans()),
        final=draw(st.booleans()),
        cause=draw(st.sampled_from(["", "complete", "lost"])),
        replica_id=draw(st.sampled_from(["", "rep_1", "rep_2"])),
        at_ms=draw(st.integers(0, 3)),
    )


class TestMerge:
    @given(words(), words())
    def test_order_does_not_matter(self, a, b):
        assert merge(a, b) == merge(b, a)

    @given(words(), words(), words())
    def test_grouping_does_not_matter(self, a, b, c):
        assert merge(merge(a, b), c) == merge(a, merge(b, c))

    @given(words(), words())
    def test_repetition_does_not_matter(self, a, b):
        assert merge(a, a) == a
        assert merge(merge(a, b), b) == merge(a, b)

    def test_only_a_journal_that_saw_the_end_is_exact(self):
        assert heard_from(a_witness()).exact
        assert not heard_from(a_witness(cause="lost")).exact
        assert not heard_from(a_witness(final=False, cause="")).exact
        assert not heard_from(a_witness(source="checkpoint")).exact


SOURCES = ["gateway", "journal", "checkpoint"]
said = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(SOURCES), words()),
    max_size=6,
    unique_by=lambda word: word[:2],
)


class TestAccepted:
    def test_of_nothing_is_nothing(self):
        assert accepted_tokens([]) == 0

    @given(said, st.randoms())
    def test_does_not_depend_on_order(self, words, random):
        shuffled = list(words)
        random.shuffle(shuffled)
        assert accepted_tokens(shuffled) == accepted_tokens(words)

    @given(said)
    def test_is_the_gateways_word_within_what_was_metered(self, words):
        accepted = accepted_tokens(words)
        assert accepted <= metered(words).output_tokens
        own = [word.usage.output_tokens for _, source, word in words if source == "gateway"]
        assert accepted <= sum(own)
        if not any(word.exact for _, _, word in words):
            assert accepted == sum(own)


class TestMetered:
    def test_of_nothing_is_nothing(self):
        assert metered([]) == NOTHING

    @given(said, st.randoms())
    def test_does_not_depend_on_order(self, witnesses, random):
        shuffled = list(witnesses)
        random.shuffle(shuffled)
        assert metered(shuffled) == metered(witnesses)

    @given(said)
    def test_never_has_more_cached_than_prompt(self, witnesses):
        usage = metered(witnesses)
        assert 0 <= usage.cached_tokens <= usage.prompt_tokens

    @given(said)
    def test_without_an_exact_word_is_at_least_what_anyone_said(self, witnesses):
        witnesses = [word for word in witnesses if not word[2].exact]
        usage = metered(witnesses)
        assert all(word.usage.output_tokens <= usage.output_tokens for _, _, word in witnesses)
        assert all(word.usage.prompt_tokens <= usage.prompt_tokens for _, _, word in witnesses)
