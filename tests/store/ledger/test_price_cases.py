"""The same requests as in `tests/unit/core/test_price_cases.py`, resolved and charged by SQL."""

import msgspec
import pytest

from gateway import anthropic, openai
from store.prices import PriceBook, create_book, current_price, seed_prices
from tests.support.price_cases import CASES, PRICES

pytestmark = [pytest.mark.anyio, pytest.mark.services]

CHARGES = """
    SELECT ledger_charge(p, json_populate_record(NULL::token_totals, u.word -> 'usage'))
      FROM json_array_elements(%s::json) WITH ORDINALITY AS u (word, n)
      JOIN prices AS p ON p.id = u.word ->> 'price'
     ORDER BY u.n"""


@pytest.fixture
async def priced(pg):
    async with pg.transaction() as conn:
        await create_book(conn, PriceBook(id="acme", description=""))
        await seed_prices(conn, PRICES)


async def test_the_database_finds_the_price_that_was_meant(pg, priced):
    async with pg.connection() as conn:
        for case in CASES:
            price = await current_price(
                conn,
                book=case.book,
                model=case.model,
                tier=case.tier,
                service_class=case.service_class,
                at_ms=case.at_ms,
            )
            assert price is not None
            assert price.id == case.price, case.name


@pytest.mark.parametrize("dialect", [openai, anthropic], ids=["openai", "anthropic"])
async def test_the_database_charges_what_was_worked_out_by_hand(pg, priced, dialect):
    told = [getattr(case, dialect.__name__.removeprefix("gateway.")) for case in CASES]
    words = [
        {"price": case.price, "usage": dialect.to_usage(body)}
        for case, body in zip(CASES, told, strict=True)
    ]
    async with pg.connection() as conn:
        cursor = await conn.execute(CHARGES, (msgspec.json.encode(words).decode(),))
        charged = [charge for (charge,) in await cursor.fetchall()]
    assert charged == [case.cost for case in CASES]
