"""Edges that the scenarios pass by: `make mutants` broke a rule there, and no test fell."""

from datetime import date

import pytest

from core.accounts import EntryKind
from core.caps import Period, Window
from core.ledger import Book, Expire, is_release, release
from core.metering import (
    Adjust,
    Adjusted,
    AdjustmentKind,
    LedgerRefused,
    RequestTimings,
    Reserved,
    Settle,
)
from core.money import EndCause, Price
from core.witnesses import Heard
from tests.support.ledger_commands import (
    PRICES,
    a_reserve,
    a_settle,
    a_top_up,
    a_usage,
    a_witness,
    an_attempt,
)

TODAY = date(2026, 3, 31)
# One micro-unit more than PRICE for a_settle().
DEARER = Price(
    id="price_dearer",
    input_micro=1_000_000,
    cached_input_micro=0,
    output_micro=2_000_000,
    request_micro=1,
)


@pytest.fixture
def book() -> Book:
    book = Book([*PRICES, DEARER], today=TODAY)
    book.open_account("ten_1", None)
    return book


def an_adjust(kind: AdjustmentKind, amount: int = 0, **changes) -> Adjust:
    words = {"id": "adj_1", "tenant_id": "ten_1", "reason": "as agreed", "author": "admin"}
    return Adjust(kind=kind, amount_micro=amount, **(words | changes))


def cap(book: Book, *, hard: int | None = None, soft: int | None = None) -> None:
    book.set_cap("ten_1", "", Period.DAY, soft_micro=soft, hard_micro=hard)


def test_a_cap_that_is_changed_counts_from_the_day_it_was_first_set(book):
    cap(book, hard=100)
    book.today = date(2026, 4, 1)
    cap(book, hard=200)
    changed = book.caps["ten_1", "", Period.DAY]
    assert (changed.since, changed.hard_micro) == (TODAY, 200)


def test_changing_a_cap_counts_nothing(book):
    cap(book, hard=1_000)
    book.reserve(a_reserve("held"))
    book.reserve(a_reserve("billed"))
    book.settle(a_settle("billed"))
    cap(book, soft=51, hard=2_000)
    assert list(book.windows.values()) == [Window(posted_micro=50, reserved_micro=100)]


def test_a_refund_leaves_its_window(book):
    cap(book, hard=1_000)
    book.reserve(a_reserve())
    book.settle(a_settle())
    book.adjust(an_adjust(AdjustmentKind.REFUND, 20, request_id="req_1"))
    assert list(book.windows.values()) == [Window(posted_micro=30)]


def test_a_top_up_may_be_by_one(book):
    book.reserve(a_reserve(amount_micro=100))
    assert book.top_up(a_top_up(total_micro=101)) == Reserved(reserved_micro=101)
    assert book.accounts["ten_1"].reserved_micro == 101


def test_who_is_swept_ended_when_the_sweeper_came(book):
    book.reserve(a_reserve())
    book.expire(Expire(request_id="req_1", ended_ms=9_000))
    assert book.rows["req_1"].ended_ms == 9_000


def test_a_settlement_is_heard_whole_and_is_the_last_word_on_the_cause(book):
    book.reserve(a_reserve())
    book.expire(Expire(request_id="req_1", ended_ms=9_000))
    book.settle(a_settle())
    assert book.heard == {
        ("req_1", 1, "gateway"): Heard(usage=a_usage(), replica_id="rep_1", at_ms=2_000)
    }
    assert book.rows["req_1"].provisional is False


def test_a_witness_is_heard_under_its_own_name(book):
    book.reconcile(a_witness(source="checkpoint", final=False, cause=""))
    assert list(book.heard) == [("req_1", 1, "checkpoint")]


def test_a_late_witness_of_nothing_leaves_a_request_not_started(book):
    book.reserve(a_reserve())
    book.expire(Expire(request_id="req_1", ended_ms=9_000))
    answer = book.reconcile(a_witness(usage=a_usage(0, 0, 0)))
    assert answer.cause is EndCause.NOT_STARTED


def test_a_bill_of_one_is_settled(book):
    book.reserve(a_reserve())
    book.settle(a_settle(attempts=(an_attempt(a_usage(1, 0, 0)),)))
    assert [entry.kind for entry in book.entries] == [EntryKind.RESERVE, EntryKind.SETTLE]
    assert book.accounts["ten_1"].posted_micro == 1


def test_of_what_nobody_spoke_there_was_no_attempt(book):
    book.reserve(a_reserve())
    book.settle(release("req_1", "ten_1", 2_000))
    assert book.rows["req_1"].attempts == 0


def test_an_account_knows_whose_it_is(book):
    assert book.accounts["ten_1"].tenant_id == "ten_1"


def test_no_floor_is_above_the_amount(book):
    with pytest.raises(AssertionError):
        book.reserve(a_reserve(amount_micro=10, floor_micro=11))


def test_a_credits_entry_has_the_credit_and_what_it_came_to(book):
    book.adjust(an_adjust(AdjustmentKind.CREDIT, 30))
    book.adjust(an_adjust(AdjustmentKind.CREDIT, -10, id="adj_2"))
    assert [(e.credit_delta_micro, e.credit_micro) for e in book.entries] == [(30, 30), (-10, 20)]


def test_a_limit_with_just_enough_room_is_in_nobodys_way(book):
    book.adjust(an_adjust(AdjustmentKind.CREDIT, 100))
    book.set_terms("ten_1", hard_cap_micro=99, prepaid=True)
    refused = book.reserve(a_reserve(amount_micro=100))
    assert (refused.limit, refused.fits_micro) == ("account.total", 99)


def test_a_credit_of_nothing_is_refused_to_nobody(book):
    book.reserve(a_reserve())
    book.set_terms("ten_1", hard_cap_micro=None, prepaid=True)
    answer = book.adjust(an_adjust(AdjustmentKind.CREDIT, 0))
    assert answer == Adjusted(entry=2, delta_micro=0, posted_micro=0, credit_micro=0)


def test_an_adjustment_of_one_needs_room_for_one(book):
    book.set_terms("ten_1", hard_cap_micro=0)
    refused = book.adjust(an_adjust(AdjustmentKind.ADJUSTMENT, 1))
    assert refused == LedgerRefused(reason="hard_cap", limit="account.total")


def test_a_price_that_is_dearer_by_one_needs_room_for_one(book):
    book.reserve(a_reserve())
    book.settle(a_settle())
    book.set_terms("ten_1", hard_cap_micro=50)
    word = an_adjust(AdjustmentKind.REPRICE, request_id="req_1", price_id=DEARER.id)
    assert book.adjust(word) == LedgerRefused(
        reason="hard_cap", limit="account.total", posted_micro=50, hard_cap_micro=50
    )


def test_a_release_says_that_nothing_was_done(book):
    assert release("req_1", "ten_1", 2_000) == Settle(
        request_id="req_1",
        tenant_id="ten_1",
        cause=EndCause.NOT_STARTED,
        attempts=(),
        delivered_tokens=0,
        timings=RequestTimings(),
        ended_ms=2_000,
    )


@pytest.mark.parametrize(
    ("cause", "attempts", "releases"),
    [
        (EndCause.NOT_STARTED, (), True),
        (EndCause.NOT_STARTED, (an_attempt(),), False),
        (EndCause.FAILED, (), False),
    ],
)
def test_only_what_never_began_is_a_release(cause, attempts, releases):
    assert is_release(a_settle(cause=cause, attempts=attempts)) is releases
