"""What operators may do to an account, each by an entry of its own."""

import pytest
from msgspec.structs import replace

from core.accounts import Entry, EntryKind
from core.caps import Period
from core.ledger import TAKEN_BACK, Book
from core.metering import Adjust, Adjusted, AdjustmentKind, LedgerRefused
from core.money import EndCause
from tests.support.ledger_commands import ODD_PRICE, PRICES, a_reserve, a_settle, a_usage, a_witness


@pytest.fixture
def book() -> Book:
    book = Book(PRICES)
    book.open_account("ten_1", None)
    book.reserve(a_reserve())
    book.settle(a_settle())  # billed 50
    return book


def an_adjust(kind: AdjustmentKind, amount: int = 0, **changes) -> Adjust:
    word = Adjust(
        id="adj_1",
        tenant_id="ten_1",
        kind=kind,
        amount_micro=amount,
        reason="as agreed",
        author="admin",
    )
    if kind in (AdjustmentKind.REFUND, AdjustmentKind.REPRICE):
        word = replace(word, request_id="req_1")
    return replace(word, **changes)


def a_credit(amount: int = 100, **changes) -> Adjust:
    return an_adjust(AdjustmentKind.CREDIT, amount, **changes)


def a_refund(amount: int, **changes) -> Adjust:
    return an_adjust(AdjustmentKind.REFUND, amount, **changes)


def a_reprice(price_id: str, **changes) -> Adjust:
    return an_adjust(AdjustmentKind.REPRICE, price_id=price_id, **changes)


class TestAnyOfThem:
    def test_has_one_effect_however_often_it_is_said(self, book):
        first = book.adjust(a_credit())
        assert first == Adjusted(entry=3, delta_micro=100, posted_micro=50, credit_micro=100)
        assert book.adjust(a_credit()) == first
        assert book.accounts["ten_1"].credit_micro == 100

    def test_of_a_taken_id_is_refused_with_other_words(self, book):
        book.adjust(a_credit())
        for other in (a_credit(101), a_credit(reason="another")):
            assert book.adjust(other) == LedgerRefused(reason="id_reused")

    def test_of_no_account_is_refused_and_may_come_again(self, book):
        word = a_credit(tenant_id="ten_2")
        assert book.adjust(word) == LedgerRefused(reason="no_account")
        book.open_account("ten_2", None)
        assert book.adjust(word).credit_micro == 100

    def test_is_an_entry_with_its_reason_and_author(self, book):
        book.adjust(a_refund(20))
        assert book.entries[-1] == Entry(
            tenant_id="ten_1",
            seq=3,
            request_id="req_1",
            kind=EntryKind.REFUND,
            reserved_delta_micro=0,
            posted_delta_micro=-20,
            reserved_micro=0,
            posted_micro=30,
            adjustment_id="adj_1",
            reason="as agreed",
            author="admin",
        )


class TestCredit:
    def test_goes_back_down_to_what_is_used(self, book):
        book.adjust(a_credit(80, id="in"))
        book.set_terms("ten_1", hard_cap_micro=None, prepaid=True)
        book.reserve(a_reserve("b", amount_micro=10))
        assert book.adjust(a_credit(-21, id="too much")) == LedgerRefused(
            reason="too_much",
            limit="credit",
            reserved_micro=10,
            posted_micro=50,
            hard_cap_micro=80,
            fits_micro=20,
        )
        assert book.adjust(a_credit(-20, id="out")).credit_micro == 60

    def test_in_debt_nothing_goes_back_and_anything_comes_in(self, book):
        book.set_terms("ten_1", hard_cap_micro=None, prepaid=True)
        assert book.adjust(a_credit(-1)).fits_micro == 0
        assert book.adjust(a_credit(10, id="in")).credit_micro == 10

    def test_of_a_post_paid_account_may_be_anything(self, book):
        assert book.adjust(a_credit(-5)).credit_micro == -5


class TestRefund:
    def test_gives_back_up_to_what_the_request_costs(self, book):
        assert book.adjust(a_refund(20, id="part")).posted_micro == 30
        refused = book.adjust(a_refund(31, id="over"))
        assert refused == LedgerRefused(reason="too_much", fits_micro=30)
        assert book.adjust(a_refund(30, id="rest")).posted_micro == 0
        row = book.rows["req_1"]
        assert (row.billed_micro, row.adjusted_micro, row.net_micro) == (50, -50, 0)

    def test_of_an_open_a_strange_or_a_foreign_request_is_refused(self, book):
        book.reserve(a_reserve("open"))
        book.open_account("ten_2", None)
        for changes in ({"request_id": "open"}, {"request_id": "req_9"}, {"tenant_id": "ten_2"}):
            assert book.adjust(a_refund(1, **changes)) == LedgerRefused(reason="no_request")

    def test_after_a_bill_has_fallen_under_it_there_is_nothing_left(self, book):
        book.adjust(a_refund(50, id="all"))
        book.reconcile(a_witness(usage=a_usage(10, 0, 0)))
        assert book.rows["req_1"].net_micro == 0
        assert book.adjust(a_refund(1, id="more")) == LedgerRefused(reason="too_much")

    def test_of_more_than_the_bill_has_fallen_to_is_taken_back_as_far(self, book):
        book.set_cap("ten_1", "", Period.TOTAL, soft_micro=None, hard_micro=500)
        book.adjust(a_refund(30))
        book.reconcile(a_witness(usage=a_usage(10, 0, 5)))
        row = book.rows["req_1"]
        assert (row.billed_micro, row.adjusted_micro) == (20, -20)
        fall, back = book.entries[-2:]
        assert (fall.kind, fall.posted_delta_micro, fall.reason) == ("correction", -30, "")
        assert (back.kind, back.posted_delta_micro, back.reason) == ("refund", 10, TAKEN_BACK)
        assert (back.adjustment_id, back.author, back.posted_micro) == ("", "", 0)
        assert [window.posted_micro for window in book.windows.values()] == [0]

    def test_of_all_that_the_bill_has_fallen_to_stays(self, book):
        book.adjust(a_refund(20))
        book.reconcile(a_witness(usage=a_usage(10, 0, 5)))
        assert book.rows["req_1"].net_micro == 0
        assert book.entries[-1].kind is EntryKind.CORRECTION


class TestAdjustment:
    def test_for_the_tenant_or_against(self, book):
        assert book.adjust(an_adjust(AdjustmentKind.ADJUSTMENT, -80)).posted_micro == -30
        other = an_adjust(AdjustmentKind.ADJUSTMENT, 100, id="adj_2")
        assert book.adjust(other).posted_micro == 70

    def test_against_stays_within_the_accounts_limits(self, book):
        book.set_terms("ten_1", hard_cap_micro=60)
        refused = book.adjust(an_adjust(AdjustmentKind.ADJUSTMENT, 11))
        assert (refused.reason, refused.limit, refused.fits_micro) == (
            "hard_cap",
            "account.total",
            10,
        )
        assert book.adjust(an_adjust(AdjustmentKind.ADJUSTMENT, 10)).posted_micro == 60


class TestReprice:
    def test_posts_the_difference_and_keeps_the_rows_price(self, book):
        # 10 · 0.333333 + 20 · 1.499999, rounded, and 5 for the request.
        answer = book.adjust(a_reprice(ODD_PRICE.id))
        assert answer.delta_micro == 38 - 50
        row = book.rows["req_1"]
        assert (row.asked.price_id, row.billed_micro, row.adjusted_micro) == ("price_test", 50, -12)

    def test_back_undoes_a_refund_too(self, book):
        book.adjust(a_refund(30, id="refund"))
        assert book.adjust(a_reprice("price_test")).delta_micro == 30

    def test_at_no_price_or_of_no_request_is_refused(self, book):
        assert book.adjust(a_reprice("price_none")) == LedgerRefused(reason="no_price")
        lost = a_reprice("price_test", request_id="req_9")
        assert book.adjust(lost) == LedgerRefused(reason="no_request")

    def test_upwards_stays_within_the_limits(self, book):
        book.adjust(a_refund(30, id="refund"))
        book.set_terms("ten_1", hard_cap_micro=49)
        refused = book.adjust(a_reprice("price_test"))
        assert (refused.reason, refused.fits_micro) == ("hard_cap", 29)

    def test_upwards_stays_within_the_caps_of_its_window(self, book):
        book.adjust(a_refund(30, id="refund"))
        book.set_cap("ten_1", "", Period.DAY, soft_micro=None, hard_micro=49)
        refused = book.adjust(a_reprice("price_test"))
        assert (refused.limit, refused.fits_micro) == ("account.day", 29)

    def test_of_what_is_not_billed_costs_nothing(self, book):
        book.reserve(a_reserve("failed"))
        book.settle(a_settle("failed", cause=EndCause.FAILED))
        assert book.adjust(a_reprice(ODD_PRICE.id, request_id="failed")).delta_micro == 0
