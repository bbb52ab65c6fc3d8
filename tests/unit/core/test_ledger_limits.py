"""Caps, credit and floors: what may be held, and what a refusal says."""

from datetime import date

import pytest

from core.caps import FOR_GOOD, Cap, Period, Window, counts, order, posted, window_start
from core.ledger import Book
from core.metering import LedgerRefused, Reserved
from tests.support.ledger_commands import (
    PRICES,
    a_reserve,
    a_settle,
    a_top_up,
    a_usage,
    a_witness,
    an_attempt,
)

LAST_OF_MARCH = date(2026, 3, 31)


@pytest.fixture
def book() -> Book:
    book = Book(PRICES, today=LAST_OF_MARCH)
    book.open_account("ten_1", None)
    return book


def cap(book: Book, period: Period, *, key: str = "", soft: int | None = None, **hard) -> None:
    book.set_cap("ten_1", key, period, soft_micro=soft, hard_micro=hard.get("hard"))


def window(book: Book, period: Period, starts: date, key: str = "") -> Window:
    return book.windows["ten_1", key, period, starts]


class TestWindows:
    def test_begin_with_their_day_their_month_or_never(self):
        assert window_start(Period.DAY, LAST_OF_MARCH) == LAST_OF_MARCH
        assert window_start(Period.MONTH, LAST_OF_MARCH) == date(2026, 3, 1)
        assert window_start(Period.TOTAL, LAST_OF_MARCH) == FOR_GOOD

    def test_a_cap_counts_from_the_window_it_was_set_in(self):
        month = Cap(
            tenant_id="t",
            key_id="key_1",
            period=Period.MONTH,
            soft_micro=None,
            hard_micro=1,
            since=date(2026, 3, 20),
        )
        assert counts(month, key_id="key_1", day=date(2026, 3, 2))
        assert not counts(month, key_id="key_1", day=date(2026, 2, 28))
        assert not counts(month, key_id="key_2", day=LAST_OF_MARCH)
        assert month.limit == "key.month"

    def test_caps_refuse_in_their_order(self):
        caps = [
            Cap(
                tenant_id="t",
                key_id=key,
                period=period,
                soft_micro=None,
                hard_micro=1,
                since=FOR_GOOD,
            )
            for key in ("key_1", "")
            for period in (Period.TOTAL, Period.MONTH, Period.DAY)
        ]
        assert [cap.limit for cap in sorted(caps, key=order)] == [
            "account.day",
            "account.month",
            "account.total",
            "key.day",
            "key.month",
            "key.total",
        ]

    def test_a_soft_cap_is_passed_when_it_is_reached_and_stays_so(self):
        soft = Cap(
            tenant_id="t",
            key_id="",
            period=Period.DAY,
            soft_micro=50,
            hard_micro=None,
            since=FOR_GOOD,
        )
        below = posted(Window(), soft, reserved=100, posted=49)
        assert below == Window(posted_micro=49, reserved_micro=100)
        reached = posted(below, soft, reserved=-100, posted=1)
        assert reached == Window(posted_micro=50, soft_passed=True)
        assert posted(reached, soft, reserved=0, posted=-50).soft_passed


class TestCaps:
    def test_by_day_refuses_today_and_not_tomorrow(self, book):
        cap(book, Period.DAY, hard=150)
        assert book.reserve(a_reserve("a")) == Reserved(reserved_micro=100)
        assert book.reserve(a_reserve("b")) == LedgerRefused(
            reason="hard_cap",
            limit="account.day",
            reserved_micro=100,
            hard_cap_micro=150,
            fits_micro=50,
        )
        book.today = date(2026, 4, 1)
        assert book.reserve(a_reserve("c")) == Reserved(reserved_micro=100)

    def test_a_soft_one_refuses_nothing_and_cuts_nothing(self, book):
        cap(book, Period.DAY, soft=10)
        book.reserve(a_reserve(amount_micro=20))
        assert book.settle(a_settle()).billed_micro == 50
        assert window(book, Period.DAY, LAST_OF_MARCH).soft_passed

    def test_of_a_key_leaves_the_others_alone(self, book):
        cap(book, Period.TOTAL, key="key_1", hard=100)
        book.reserve(a_reserve("a"))
        assert book.reserve(a_reserve("b")).limit == "key.total"
        assert book.reserve(a_reserve("c", key_id="key_2")) == Reserved(reserved_micro=100)

    def test_a_refusal_names_the_first_limit_and_what_fits_under_all(self, book):
        book.set_terms("ten_1", hard_cap_micro=90)
        cap(book, Period.MONTH, hard=80)
        cap(book, Period.MONTH, key="key_1", hard=20)
        refused = book.reserve(a_reserve())
        assert (refused.limit, refused.hard_cap_micro) == ("account.total", 90)
        assert refused.fits_micro == 20

    def test_a_request_counts_in_the_day_it_was_reserved_on(self, book):
        cap(book, Period.DAY, hard=1_000)
        book.reserve(a_reserve())
        book.today = date(2026, 4, 1)
        book.settle(a_settle())
        assert window(book, Period.DAY, LAST_OF_MARCH) == Window(posted_micro=50)
        assert len(book.windows) == 1

    def test_one_set_late_starts_from_what_its_window_holds_already(self, book):
        book.reserve(a_reserve("a"))
        book.settle(a_settle("a"))
        book.reserve(a_reserve("b", key_id="key_2"))
        book.today = date(2026, 4, 1)
        book.reserve(a_reserve("c"))
        cap(book, Period.MONTH, hard=1_000)
        cap(book, Period.TOTAL, soft=50, hard=1_000)
        cap(book, Period.TOTAL, key="key_2", hard=1_000)
        assert window(book, Period.MONTH, date(2026, 4, 1)) == Window(reserved_micro=100)
        assert window(book, Period.TOTAL, FOR_GOOD) == Window(
            posted_micro=50, reserved_micro=200, soft_passed=True
        )
        assert window(book, Period.TOTAL, FOR_GOOD, "key_2") == Window(reserved_micro=100)

    def test_a_request_from_before_a_cap_is_not_under_it(self, book):
        book.reserve(a_reserve())
        book.today = date(2026, 4, 1)
        cap(book, Period.DAY, hard=10)
        book.settle(a_settle())
        assert book.rows["req_1"].billed_micro == 50
        assert window(book, Period.DAY, date(2026, 4, 1)) == Window()

    def test_changing_one_keeps_its_counters_and_looks_at_the_soft_cap_anew(self, book):
        cap(book, Period.DAY, hard=1_000)
        book.reserve(a_reserve())
        book.settle(a_settle())
        book.today = date(2026, 4, 1)
        cap(book, Period.DAY, soft=10, hard=1_000)
        assert window(book, Period.DAY, LAST_OF_MARCH) == Window(posted_micro=50)
        book.today = LAST_OF_MARCH
        cap(book, Period.DAY, soft=50)
        assert window(book, Period.DAY, LAST_OF_MARCH).soft_passed

    def test_without_one_there_are_no_counters(self, book):
        cap(book, Period.DAY, hard=10)
        cap(book, Period.MONTH, hard=10_000)
        book.remove_cap("ten_1", "", Period.DAY)
        book.remove_cap("ten_1", "", Period.DAY)
        assert book.reserve(a_reserve()) == Reserved(reserved_micro=100)
        assert [place[2] for place in book.windows] == [Period.MONTH]

    def test_cuts_a_bill_to_what_is_held_and_a_late_rise_to_the_room(self, book):
        cap(book, Period.DAY, hard=110)
        book.reserve(a_reserve("a", amount_micro=40))
        assert book.settle(a_settle("a")).billed_micro == 40
        book.reserve(a_reserve("b", amount_micro=70, max_tokens=100))
        usage = a_usage(10, 0, 20)
        book.settle(a_settle("b", attempts=(an_attempt(usage),)))
        book.reserve(a_reserve("c", amount_micro=15))
        more = a_usage(40, 0, 20)
        assert book.reconcile(a_witness("b", usage=more)).billed_micro == 55


class TestPrepaid:
    def test_holds_no_more_than_its_credit(self, book):
        book.accounts["ten_1"] = book.accounts["ten_1"].__class__(
            tenant_id="ten_1", hard_cap_micro=None, prepaid=True, credit_micro=120
        )
        assert book.reserve(a_reserve("a")) == Reserved(reserved_micro=100)
        refused = book.reserve(a_reserve("b"))
        assert (refused.limit, refused.hard_cap_micro, refused.fits_micro) == ("credit", 120, 20)


class TestFloor:
    def test_less_is_held_where_there_is_less(self, book):
        book.set_terms("ten_1", hard_cap_micro=130)
        book.reserve(a_reserve("a"))
        asked = a_reserve("b", floor_micro=30)
        assert book.reserve(asked) == Reserved(reserved_micro=30)
        assert book.reserve(asked) == Reserved(reserved_micro=30)
        assert book.entries[-1].reserved_delta_micro == 30

    def test_under_it_nothing_is(self, book):
        book.set_terms("ten_1", hard_cap_micro=130)
        book.reserve(a_reserve("a"))
        assert book.reserve(a_reserve("b", floor_micro=31)).fits_micro == 30
        assert book.accounts["ten_1"].reserved_micro == 100

    def test_a_top_up_takes_what_there_is(self, book):
        book.set_terms("ten_1", hard_cap_micro=130)
        book.reserve(a_reserve())
        assert book.top_up(a_top_up(total_micro=200, floor_micro=131)).fits_micro == 30
        more = a_top_up(total_micro=200, floor_micro=101)
        assert book.top_up(more) == Reserved(reserved_micro=130)
        assert book.top_up(more) == Reserved(reserved_micro=130)

    def test_a_top_up_that_may_be_nothing_never_lowers(self, book):
        book.set_terms("ten_1", hard_cap_micro=100)
        book.reserve(a_reserve())
        assert book.top_up(a_top_up(total_micro=200, floor_micro=0)) == Reserved(reserved_micro=100)
        assert len(book.entries) == 1
        book.set_terms("ten_1", hard_cap_micro=60)
        assert book.top_up(a_top_up(total_micro=200, floor_micro=0)).fits_micro == 0
