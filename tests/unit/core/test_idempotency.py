"""Who may answer an idempotency key, and whose bills its answer takes back."""

import msgspec
import pytest

from core.idempotency import SUPERSEDED_MAX, Claim, Kept, KeyRow, claimed, refused
from core.ledger import Book, Expire
from core.metering import LedgerRefused, Reserve, Reserved
from core.money import EndCause
from tests.support.ledger_commands import PRICES, a_reserve, a_settle

CLAIM = Claim(scope="POST /", key="k", fingerprint="f", kept_s=10)
ROW = KeyRow(fingerprint="f", request_id="r1", generation=1, expires_ms=5_000)
TENANT = "ten_1"


def a_book() -> Book:
    book = Book(PRICES)
    book.open_account(TENANT, None)
    return book


def keyed(request_id: str) -> Reserve:
    return a_reserve(request_id, claim=CLAIM)


ANOTHER = KeyRow(fingerprint="g", request_id="r1", generation=1, expires_ms=5_000)
DONE = KeyRow(fingerprint="f", request_id="r1", generation=1, answer=b"", expires_ms=5_000)


@pytest.mark.parametrize(
    ("row", "when_closed", "expected"),
    [
        (None, None, None),
        (ROW, None, "key_open"),
        (ANOTHER, "key_reused", "key_reused"),
        (DONE, "key_done", "key_done"),
    ],
)
def test_refusals_come_in_their_order(
    row: KeyRow | None, when_closed: str | None, expected: str | None
) -> None:
    assert refused(row, CLAIM, is_open=True, now_ms=0) == expected
    assert refused(row, CLAIM, is_open=True, now_ms=5_000) == expected
    assert refused(row, CLAIM, is_open=False, now_ms=4_999) == when_closed
    assert refused(row, CLAIM, is_open=False, now_ms=5_000) is None


def test_a_claim_on_an_expired_key_begins_anew() -> None:
    row = claimed(ROW, CLAIM, "r2", may_cost=True, now_ms=5_000)
    assert row == KeyRow(fingerprint="f", request_id="r2", generation=1, expires_ms=15_000)


def test_what_an_answer_may_take_back_is_bounded() -> None:
    row: KeyRow | None = None
    for n in range(SUPERSEDED_MAX + 5):
        row = claimed(row, CLAIM, f"r{n}", may_cost=n != SUPERSEDED_MAX, now_ms=0)
    assert row is not None
    assert row.generation == SUPERSEDED_MAX + 5
    assert len(row.superseded) == SUPERSEDED_MAX
    assert row.superseded[-1] == f"r{SUPERSEDED_MAX + 3}"
    assert f"r{SUPERSEDED_MAX - 1}" not in row.superseded  # it cost nothing


def test_a_request_without_a_key_has_none_to_answer() -> None:
    book = a_book()
    book.reserve(a_reserve("r1"))
    book.settle(a_settle("r1", kept=Kept(scope="POST /", key="k", answer=b"")))
    assert book._keys.rows == {}


def test_a_cancelled_attempt_is_paid_until_its_successor_answers() -> None:
    book = a_book()
    book.reserve(keyed("r1"))
    assert book.reserve(keyed("r2")) == LedgerRefused(reason="key_open")
    book.settle(a_settle("r1", cause=EndCause.CLIENT_CANCELLED))
    assert book.accounts[TENANT].posted_micro == 50
    assert book.reserve(keyed("r3")) == Reserved(reserved_micro=100)
    kept = Kept(scope="POST /", key="k", answer=b"whole")
    book.settle(a_settle("r3", kept=kept))
    assert book.accounts[TENANT].posted_micro == 50
    assert book.rows["r1"].net_micro == 0
    book.settle(a_settle("r3", kept=kept))  # again: no more than once
    assert book.accounts[TENANT].posted_micro == 50


def test_a_failed_attempt_has_nothing_to_take_back_and_a_lost_one_has() -> None:
    book = a_book()
    book.reserve(keyed("r1"))
    book.settle(a_settle("r1", cause=EndCause.FAILED))
    book.reserve(keyed("r2"))
    book.expire(Expire(request_id="r2", ended_ms=0))
    book.reserve(keyed("r3"))
    assert next(iter(book._keys.rows.values())).superseded == ("r2",)
    book.settle(a_settle("r3", kept=Kept(scope="POST /", key="k", answer=b"")))
    assert book.accounts[TENANT].posted_micro == 50


def test_a_request_that_goes_on_elsewhere_keeps_its_key_and_takes_back_what_has_ended() -> None:
    book = a_book()
    ours = msgspec.structs.replace(CLAIM, holder="h")
    for name in ("r1", "r2"):
        assert book.reserve(a_reserve(name, claim=ours)) == Reserved(reserved_micro=100)
    book.settle(a_settle("r2", kept=Kept(scope="POST /", key="k", answer=b"")))
    assert book.rows["r1"].bill_limit_micro is None  # still open: its holder lets it go
    book.settle(a_settle("r1", cause=EndCause.FAILED))
    assert book.accounts[TENANT].posted_micro == 50
