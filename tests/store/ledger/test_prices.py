"""Price versions: immutable, in effect from their moment on, the narrowest first."""

import asyncio
import itertools

import msgspec
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.money import Price
from core.pricing import UNPRICED, ListedPrice, PriceTable, Terms
from store.postgres import Postgres, PostgresConfig
from store.prices import (
    PriceBook,
    PriceConflictError,
    add_price,
    create_book,
    current_price,
    price_by_id,
    price_list,
    seed_prices,
)

pytestmark = [pytest.mark.anyio, pytest.mark.services]


def a_price(price_id: str, *, model: str = "m", effective_ms: int = 0, **changes) -> ListedPrice:
    fields = {"input_micro": 1, "cached_input_micro": 2, "output_micro": 3, "request_micro": 4}
    return ListedPrice(
        model=model, effective_ms=effective_ms, price=Price(id=price_id, **(fields | changes))
    )


OLD = a_price("old", effective_ms=1_000)
NEW = a_price("new", effective_ms=2_000, input_micro=10**15)


async def price_at(conn, model, at_ms, **changes):
    terms = {"book": "list", "tier": "standard", "service_class": "batch"} | changes
    return await current_price(conn, model=model, at_ms=at_ms, **terms)


@pytest.fixture
async def listed(pg):
    async with pg.transaction() as conn:
        await seed_prices(conn, [NEW, OLD, a_price("other", model="n")])


async def test_the_version_in_effect_is_the_last_that_has_begun(pg, listed):
    async with pg.connection() as conn:
        assert await price_at(conn, "m", 999) is None
        assert await price_at(conn, "m", 1_000) == OLD.price
        assert await price_at(conn, "m", 1_999) == OLD.price
        assert await price_at(conn, "m", 2_000) == NEW.price
        assert await price_at(conn, "none", 2_000) is None


async def test_a_past_version_is_found_by_its_id(pg, listed):
    async with pg.connection() as conn:
        assert await price_by_id(conn, "old") == OLD.price
        assert await price_by_id(conn, "none") is None


async def test_seeding_again_changes_nothing(pg, listed):
    async with pg.transaction() as conn:
        await seed_prices(conn, [OLD, NEW])
        prices = await price_list(conn)
    assert [price.price.id for price in prices] == ["old", "new", "other"]


async def test_whose_place_is_taken_hears_by_whom(pg, listed):
    async with pg.transaction() as conn:
        rival = a_price("rival", effective_ms=1_000, output_micro=9)
        assert await add_price(conn, rival) == OLD
        with pytest.raises(PriceConflictError, match="old"):
            await seed_prices(conn, [rival])
        assert await price_by_id(conn, "rival") is None


async def test_there_is_no_price_in_a_book_that_there_is_not(pg):
    lost = ListedPrice(book="none", model="m", effective_ms=0, price=OLD.price)
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        async with pg.transaction() as conn:
            await seed_prices(conn, [msgspec.structs.replace(lost, price=a_price("lost").price)])


async def test_what_costs_nothing_for_want_of_a_price_is_a_version_too(pg):
    async with pg.connection() as conn:
        assert await price_by_id(conn, UNPRICED.id) == UNPRICED
        assert UNPRICED not in [listed.price for listed in await price_list(conn)]


@pytest.mark.parametrize("changes", [{"output_micro": 9}, {"model": "n"}, {"effective_ms": 1}])
async def test_a_version_never_changes(pg, listed, changes):
    with pytest.raises(PriceConflictError, match="old"):
        async with pg.transaction() as conn:
            await seed_prices(conn, [a_price("old", **({"effective_ms": 1_000} | changes))])


async def test_a_usage_row_can_be_priced_as_it_was(pg, listed):
    async with pg.connection() as conn:
        price = await price_by_id(conn, "new")
    assert msgspec.to_builtins(price)["input_micro"] == 10**15


BOOKS, TIERS, CLASSES = ("list", "acme", "other"), ("", "gold", "silver"), ("", "batch")
SCOPES = list(itertools.product(BOOKS, TIERS, CLASSES))


async def both_answers(pg, prices, asked):
    """The prices by the table and by the database, for each of what is asked."""
    pairs = []
    async with pg.transaction() as conn:
        await seed_prices(conn, prices)
        table = PriceTable(prices)
        for (book, tier, group), at_ms in asked:
            request = {"service_class": group, "at_ms": at_ms}
            ours = table.resolve(Terms(book=book, tier=tier), "drawn", **request)
            theirs = await current_price(conn, book=book, model="drawn", tier=tier, **request)
            pairs.append((ours, theirs))
        raise psycopg.Rollback  # prices cannot be deleted
    return pairs


def test_the_database_resolves_as_the_table_does(postgres_url):
    config = PostgresConfig(database_url=postgres_url, application_name="test")
    starts = st.tuples(st.sampled_from(SCOPES), st.integers(0, 3))

    with asyncio.Runner() as runner:
        pg = runner.run(Postgres.open(config))

        async def make_books():
            async with pg.transaction() as conn:
                for book in BOOKS[1:]:
                    await create_book(conn, PriceBook(id=book, description=""))

        @given(st.lists(starts, unique=True, max_size=12), st.lists(starts, min_size=1, max_size=8))
        def resolves_alike(drawn, asked):
            prices = [
                a_price(str(number), model="drawn", effective_ms=at_ms)
                for number, (_, at_ms) in enumerate(drawn)
            ]
            scoped = [
                msgspec.structs.replace(listed, book=book, tier=tier, service_class=group)
                for listed, ((book, tier, group), _) in zip(prices, drawn, strict=True)
            ]
            for ours, theirs in runner.run(both_answers(pg, scoped, asked)):
                assert ours == theirs

        runner.run(make_books())
        resolves_alike()
        runner.run(pg.close())
