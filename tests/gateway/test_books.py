"""Money words when the ledger comes and goes: the pure ledger behind a switch, a real spool."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from core.errors import Code
from core.ledger import Book
from core.metering import (
    AttemptTotals,
    LedgerRefused,
    RequestTimings,
    Reserve,
    Reserved,
    Settle,
    Settled,
    TopUp,
    Witness,
)
from core.money import EndCause, Price
from core.protocol import Usage
from gateway.books import AWAY, Books
from gateway.relay.hold import Hold, HoldLimits, ledger_refusal
from gateway.routing import Size
from gateway.spool import Spool
from store.ledger import LedgerAwayError, LedgerRejectedError, NotReservedError

pytestmark = pytest.mark.anyio

PRICE = Price(id="p", input_micro=1_000_000, cached_input_micro=0, output_micro=1_000_000)


class SwitchedLedger:
    """`core.ledger` as the store offers it. `forgets`: does it, and then cannot say so."""

    def __init__(self) -> None:
        self.book = Book([PRICE])
        self.book.open_account("free", None)
        self.book.open_account("capped", 1_000)
        self.away = False
        self.forgets = False
        self.poison: dict[str, Exception] = {}  # request ids whose words are rejected
        self.reached = 0
        self.pause_s = 0.0

    async def _reach(self, request_id: str) -> None:
        await asyncio.sleep(self.pause_s)
        if self.away:
            raise LedgerAwayError("away")
        self.reached += 1
        if request_id in self.poison:
            raise self.poison[request_id]

    def _forget(self) -> None:
        if self.forgets:
            raise LedgerAwayError("did it answer?")

    async def reserve(self, asked: Reserve) -> Reserved | LedgerRefused:
        await self._reach(asked.request_id)
        answer = self.book.reserve(asked)
        self._forget()
        return answer

    async def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        await self._reach(more.request_id)
        return self.book.top_up(more)

    async def settle(self, word: Settle) -> Settled:
        await self._reach(word.request_id)
        answer = self.book.settle(word)
        if isinstance(answer, LedgerRefused):
            raise NotReservedError(word.request_id)
        self._forget()
        return answer

    async def reconcile(self, witness: Witness) -> Settled | None:
        await self._reach(witness.request_id)
        return self.book.reconcile(witness)


@pytest.fixture
def ledger() -> SwitchedLedger:
    return SwitchedLedger()


@pytest.fixture
async def books(ledger: SwitchedLedger, tmp_path: Path) -> AsyncIterator[Books]:
    spool = Spool(tmp_path, "gw", bytes_max=4_000)
    spool.open()
    yield Books(ledger, spool)
    await spool.close()


def a_reserve(name: str = "req", tenant: str = "free", amount: int = 10) -> Reserve:
    return Reserve(
        request_id=name,
        gateway_id="gw",
        tenant_id=tenant,
        key_id="key",
        amount_micro=amount,
        price_id="p",
        model="m",
        version="v",
        region="local",
        service_class="standard",
        dialect="openai",
        endpoint="chat_completions",
        stream=False,
        prompt_tokens=3,
        max_tokens=7,
        created_ms=1,
    )


def a_settle(name: str = "req", tenant: str = "free") -> Settle:
    usage = Usage(prompt_tokens=3, output_tokens=2)
    return Settle(
        request_id=name,
        tenant_id=tenant,
        cause=EndCause.COMPLETE,
        attempts=(AttemptTotals(attempt=1, replica_id="r", usage=usage),),
        delivered_tokens=2,
        timings=RequestTimings(),
        ended_ms=2,
    )


async def test_with_the_ledger_there_nothing_is_spooled(
    books: Books, ledger: SwitchedLedger
) -> None:
    assert await books.reserve(a_reserve(), hard_capped=False) == Reserved(reserved_micro=10)
    await books.settle(a_settle())
    assert ledger.book.rows["req"].billed_micro == 5
    assert books.spool_bytes == 0


@pytest.mark.parametrize("when", ["before the reserve", "before the settle"])
async def test_what_the_ledger_misses_is_made_up_for(
    books: Books, ledger: SwitchedLedger, when: str
) -> None:
    ledger.away = when == "before the reserve"
    assert await books.reserve(a_reserve(), hard_capped=False) == Reserved(reserved_micro=10)
    ledger.away = True
    await books.settle(a_settle())
    assert books.away
    assert await books.recover() == 0
    ledger.away = False
    assert await books.recover() == (2 if when == "before the reserve" else 1)
    assert ledger.book.rows["req"].billed_micro == 5
    assert (books.away, books.spool_bytes, books.refused_words) == (False, 0, 0)


async def test_a_settlement_does_not_overtake_its_spooled_reservation(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.away = True
    await books.reserve(a_reserve(), hard_capped=False)
    ledger.away = False  # it is back, and the spool not yet replayed
    await books.settle(a_settle())
    assert ledger.book.rows == {}
    await books.recover()
    assert ledger.book.rows["req"].billed_micro == 5
    assert books.refused_words == 0


async def test_hard_capped_tenants_are_refused_and_nothing_stays_held(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.forgets = True
    assert await books.reserve(a_reserve(tenant="capped"), hard_capped=True) == AWAY
    assert ledger.book.accounts["capped"].reserved_micro == 10
    ledger.forgets = False
    assert await books.reserve(a_reserve("two", "capped"), hard_capped=True) == AWAY
    await books.recover()
    assert ledger.book.accounts["capped"].reserved_micro == 0
    assert set(ledger.book.rows) == {"req"}


async def test_a_full_spool_refuses_new_work_and_keeps_room_for_ends(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.away = True
    accepted = 0
    while await books.reserve(a_reserve(f"r{accepted}"), hard_capped=False) != AWAY:
        accepted += 1
    assert 0 < accepted < 20
    for i in range(accepted):
        await books.settle(a_settle(f"r{i}"))
    ledger.away = False
    await books.recover()
    assert [row.cause for row in ledger.book.rows.values()] == [EndCause.COMPLETE] * accepted


async def test_a_settlement_that_fits_nowhere_is_said_and_not_raised(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.away = True
    for i in range(50):
        await books.settle(a_settle(f"r{i}"))
    assert books.spool_bytes <= 4_000


async def test_words_the_ledger_does_not_know_are_counted(
    books: Books, ledger: SwitchedLedger
) -> None:
    await books.settle(a_settle("never reserved"))
    assert books.refused_words == 1


async def test_top_ups_and_checkpoints_wait_for_the_ledger(
    books: Books, ledger: SwitchedLedger
) -> None:
    await books.reserve(a_reserve(tenant="capped"), hard_capped=True)
    more = TopUp(request_id="req", tenant_id="capped", total_micro=20)
    assert await books.top_up(more) == Reserved(reserved_micro=20)
    ledger.away = True
    assert await books.top_up(more) == AWAY
    assert await books.top_up(more) == AWAY
    usage = Usage(output_tokens=1)
    witness = Witness(request_id="req", attempt=1, source="checkpoint", usage=usage, final=False)
    await books.checkpoint([witness])
    ledger.away = False
    await books.recover()
    await books.checkpoint([witness])
    assert ledger.book.heard["req", 1, "checkpoint"].usage == usage
    ledger.away = True
    await books.checkpoint([witness])
    assert books.away


async def test_a_hold_tries_again_while_the_ledger_is_away(
    books: Books, ledger: SwitchedLedger
) -> None:
    hold = a_hold(books, max_tokens=100)
    assert await hold.held() is None
    assert ledger.book.rows["req"].reserved_micro == 43
    ledger.away = True
    assert not await hold.spent(30)
    await asyncio.sleep(0.05)
    assert await hold.spent(39)  # the end of what is held, and no more to be had
    await hold.release(ended_ms=5)
    ledger.away = False
    await books.recover()
    assert ledger.book.accounts["capped"].reserved_micro == 0


def a_hold(books: Books, *, max_tokens: int, choices: int = 1, name: str = "req") -> Hold:
    """At one micro-unit a token, three of them the prompt's; 40 are held at first."""
    size = Size(prompt_tokens=3, max_tokens=max_tokens, choices=choices)
    asked = msgspec.structs.replace(a_reserve(name, "capped"), choices=choices)
    limits = HoldLimits(first_output_tokens=40, answer_wait_s=0.1)
    return Hold(books, asked, price=PRICE, size=size, hard_capped=True, limits=limits)


async def test_a_hold_takes_what_there_is_room_for_and_allows_no_more(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.book.set_terms("capped", hard_cap_micro=3 + 20)
    hold = a_hold(books, max_tokens=100)
    assert await hold.held() is None
    assert ledger.book.rows["req"].reserved_micro == 23
    assert not await hold.spent(19)
    assert await hold.spent(20)
    await hold.release(ended_ms=5)


async def test_a_hold_is_refused_when_not_even_a_short_answer_fits(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.book.set_terms("capped", hard_cap_micro=3 + 15)
    refused = await a_hold(books, max_tokens=100).held()
    assert refused == LedgerRefused(
        reason="hard_cap", limit="account.total", hard_cap_micro=18, fits_micro=18
    )
    assert await a_hold(books, max_tokens=15, name="shorter").held() is None


async def test_a_hold_is_topped_up_by_what_is_left_then_asks_only_now_and_then(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.book.set_terms("capped", hard_cap_micro=3 + 50)
    hold = a_hold(books, max_tokens=100)
    assert await hold.held() is None
    assert not await hold.spent(39)  # doubling is refused, ten more are held
    assert ledger.book.rows["req"].reserved_micro == 53
    asked = ledger.reached
    for _ in range(20):
        assert await hold.spent(52)
        await asyncio.sleep(0.001)
    assert ledger.reached == asked
    ledger.book.set_terms("capped", hard_cap_micro=3 + 100)
    async with asyncio.timeout(2):
        while await hold.spent(52):  # noqa: ASYNC110 - a hold has no such event
            await asyncio.sleep(0.01)
    assert ledger.book.rows["req"].reserved_micro == 103
    await hold.release(ended_ms=5)


async def test_an_answer_at_its_end_waits_for_the_top_up_under_way_but_not_for_long(
    books: Books, ledger: SwitchedLedger
) -> None:
    hold = a_hold(books, max_tokens=500)
    assert await hold.held() is None
    ledger.pause_s = 0.02
    assert not await hold.spent(40)
    assert ledger.book.rows["req"].reserved_micro == 83
    ledger.pause_s = 30
    assert await hold.spent(80)
    ledger.pause_s = 0
    await hold.release(ended_ms=5)


async def test_a_rejected_top_up_is_not_repeated(books: Books, ledger: SwitchedLedger) -> None:
    hold = a_hold(books, max_tokens=100)
    assert await hold.held() is None
    ledger.poison["req"] = LedgerRejectedError("22P05")
    before = ledger.reached
    for _ in range(20):
        assert not await hold.spent(36)
        await asyncio.sleep(0.001)
    assert ledger.reached == before + 1
    ledger.poison.clear()
    await hold.release(ended_ms=5)


POISONS = [LedgerRejectedError("22P05"), ValueError("an attempt is reported twice")]


def set_aside(folder: Path) -> list[str]:
    """Requests of the settlements set aside."""
    lines = (folder / "gw.rejected").read_text().splitlines()
    return [json.loads(line)["record"]["settle"]["request_id"] for line in lines]


@pytest.mark.parametrize("poison", POISONS)
async def test_a_rejected_record_holds_up_no_other(
    books: Books, ledger: SwitchedLedger, tmp_path: Path, poison: Exception
) -> None:
    names = ["one", "two", "three"]
    for name in names:
        await books.reserve(a_reserve(name), hard_capped=False)
    ledger.away = True
    for name in names:
        await books.settle(a_settle(name))
    ledger.away = False
    ledger.poison["two"] = poison
    assert await books.recover() == 3
    assert [ledger.book.rows[name].billed_micro for name in names] == [5, 0, 5]
    assert (books.away, books.spool_bytes, books.refused_words) == (False, 0, 1)
    assert set_aside(tmp_path) == ["two"]
    capped = a_reserve("capped", "capped")
    assert await books.reserve(capped, hard_capped=True) == Reserved(reserved_micro=10)


@pytest.mark.parametrize("poison", POISONS)
async def test_a_live_settlement_that_is_rejected_is_set_aside(
    books: Books, ledger: SwitchedLedger, tmp_path: Path, poison: Exception
) -> None:
    ledger.poison["req"] = poison
    await books.settle(a_settle())
    await books.settle(a_settle())
    assert set_aside(tmp_path) == ["req", "req"]
    assert (books.away, books.spool_bytes, books.refused_words) == (False, 0, 2)


async def test_other_words_that_are_rejected_are_refused_and_counted(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.poison["req"] = LedgerRejectedError("22P05")
    assert await books.reserve(a_reserve(), hard_capped=True) == AWAY
    more = TopUp(request_id="req", tenant_id="capped", total_micro=20)
    assert await books.top_up(more) == LedgerRefused(reason="rejected")
    usage = Usage(output_tokens=1)
    witness = Witness(request_id="req", attempt=1, source="checkpoint", usage=usage, final=False)
    await books.checkpoint([witness])
    assert (books.away, books.refused_words) == (False, 3)


async def test_with_nothing_to_replay_the_ledger_is_away_until_it_answers(
    books: Books, ledger: SwitchedLedger
) -> None:
    ledger.away = True
    assert await books.top_up(TopUp(request_id="r", tenant_id="capped", total_micro=2)) == AWAY
    assert books.spool_bytes == 0
    await books.recover()
    await books.adopt()
    assert books.away
    ledger.away = False
    await books.recover()
    assert (books.away, ledger.reached) == (False, 1)
    assert ledger.book.rows == {}


LIMITS = {
    "credit": "Your account's prepaid credit of 2.000001 USD does not cover",
    "account.total": "Your account's budget of 2.000001 USD does not cover",
    "account.day": "Your account's budget of 2.000001 USD for this day (UTC) does not cover",
    "account.month": "Your account's budget of 2.000001 USD for this month (UTC) does not cover",
    "key.total": "This API key's budget of 2.000001 USD does not cover",
    "key.day": "This API key's budget of 2.000001 USD for this day (UTC) does not cover",
    "key.month": "This API key's budget of 2.000001 USD for this month (UTC) does not cover",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_refusal_under_a_limit_says_which_and_all_its_sums(limit: str) -> None:
    refused = LedgerRefused(
        reason="hard_cap",
        limit=limit,
        reserved_micro=300_000,
        posted_micro=1_500_000,
        hard_cap_micro=2_000_001,
        fits_micro=7,
    )
    refusal = ledger_refusal(refused, "USD")
    assert refusal.code is Code.QUOTA
    assert refusal.message == (
        f"{LIMITS[limit]} this request: 1.500000 USD is spent and 0.300000 USD is reserved by "
        "requests under way. A request of at most 0.000007 USD would have fitted."
    )


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("away", Code.UNAVAILABLE),
        ("no_account", Code.INTERNAL),
        ("no_price", Code.INTERNAL),
        ("id_reused", Code.INTERNAL),
    ],
)
def test_every_other_refusal_is_explained(reason: str, code: Code) -> None:
    refusal = ledger_refusal(LedgerRefused(reason=reason), "USD")
    assert refusal.message
    assert refusal.code is code
