"""Price versions: immutable, in effect from their moment on."""

import msgspec
import pytest

from core.money import Price
from store.prices import (
    ListedPrice,
    PriceConflictError,
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


@pytest.mark.parametrize("changes", [{"output_micro": 9}, {"model": "n"}, {"effective_ms": 1}])
async def test_a_version_never_changes(pg, listed, changes):
    with pytest.raises(PriceConflictError, match="old"):
        async with pg.transaction() as conn:
            await seed_prices(conn, [a_price("old", **({"effective_ms": 1_000} | changes))])


async def test_a_usage_row_can_be_priced_as_it_was(pg, listed):
    async with pg.connection() as conn:
        price = await price_by_id(conn, "new")
    assert msgspec.to_builtins(price)["input_micro"] == 10**15
