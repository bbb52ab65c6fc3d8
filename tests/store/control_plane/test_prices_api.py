"""Price books and prices through the admin API: what is made, what is told, what is refused."""

import secrets

import pytest

from core.pricing import PriceTable, Terms
from store.prices import current_price, price_list
from tests.support.control_plane import assert_refused

pytestmark = [pytest.mark.services, pytest.mark.anyio]

RATES = {"input_micro": 100, "cached_input_micro": 50, "output_micro": 400}


def a_name(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(4)}"


async def a_book(plane) -> str:
    book = await plane.made("/price-books", {"id": a_name("book"), "description": "theirs"})
    return book["id"]


async def test_a_book_is_made_once_and_listed(plane):
    book = await a_book(plane)
    again = await plane.admin("POST", "/price-books", {"id": book})
    assert_refused(again, 409, "conflict", "id")
    assert again.json()["error"]["existing_id"] == book
    assert (await plane.admin("POST", "/price-books", {"id": "list"})).status_code == 409
    listed = (await plane.admin("GET", "/price-books", limit=1000)).json()
    assert {"id": book, "description": "theirs"} in listed["price_books"]
    assert listed["after"] is None
    first = (await plane.admin("GET", "/price-books", limit=1)).json()
    second = (await plane.admin("GET", "/price-books", limit=1, after=first["after"])).json()
    assert first["price_books"] + second["price_books"] == listed["price_books"][:2]
    log = (await plane.admin("GET", "/audit-log")).json()
    made = [line for line in log["records"] if line["subject"] == book]
    assert [line["action"] for line in made] == ["price_book.create"]


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "id"), ({"id": "No Such"}, "id"), ({"id": "b", "tenants": 3}, "tenants")],
)
async def test_what_is_not_a_book_is_refused_by_its_field(plane, body, param):
    assert_refused(await plane.admin("POST", "/price-books", body), 422, "unprocessable", param)


async def test_rates_left_out_are_those_of_input_and_output(plane):
    made = await plane.made("/prices", {"model": a_name("m"), **RATES, "effective_ms": 5})
    assert made == {
        "id": f"{made['model']}@5",
        "book": "list",
        "model": made["model"],
        "tier": None,
        "service_class": None,
        "effective_ms": 5,
        "currency": "USD",
        **RATES,
        "cache_write_5m_micro": 100,
        "cache_write_1h_micro": 100,
        "reasoning_micro": 400,
        "request_micro": 0,
    }
    given = {"cache_write_5m_micro": 0, "cache_write_1h_micro": 7, "reasoning_micro": 0}
    body = {"model": a_name("m"), **RATES, **given, "request_micro": 9}
    made = await plane.made("/prices", body)
    assert made.items() >= body.items()


async def test_a_price_is_for_a_book_a_tier_and_a_class(plane):
    book, model = await a_book(plane), a_name("m")
    scope = {"book": book, "tier": "gold", "service_class": "batch"}
    plain = {"model": model, **RATES, "effective_ms": 5}
    made = [
        await plane.made("/prices", plain),
        await plane.made("/prices", plain | {"book": book}),
        await plane.made("/prices", plain | {"tier": "gold"}),
        await plane.made("/prices", plain | scope),
    ]
    assert [price["id"] for price in made] == [
        f"{model}@5",
        f"{model}@{book}//@5",
        f"{model}@list/gold/@5",
        f"{model}@{book}/gold/batch@5",
    ]
    async with plane.services.postgres.connection() as conn:
        table = PriceTable(await price_list(conn, model=model))
        for terms, service_class, expected in [
            (Terms(), "standard", 0),
            (Terms(book=book), "batch", 1),
            (Terms(tier="gold"), "batch", 2),
            (Terms(book=book, tier="gold"), "batch", 3),
            (Terms(book=book, tier="gold"), "standard", 1),
        ]:
            asked = {"service_class": service_class, "at_ms": 5}
            price = table.resolve(terms, model, **asked)
            assert price.id == made[expected]["id"]
            assert price == await current_price(
                conn, model=model, book=terms.book, tier=terms.tier, **asked
            )

    async def found(**filters):
        answer = await plane.admin("GET", "/prices", model=model, **filters)
        return [price["id"] for price in answer.json()["prices"]]

    assert set(await found()) == {price["id"] for price in made}
    assert await found(book=book) == [made[1]["id"], made[3]["id"]]
    assert set(await found(tier="gold")) == {made[2]["id"], made[3]["id"]}
    assert await found(book="list", tier="gold") == [made[2]["id"]]
    assert await found(service_class="batch") == [made[3]["id"]]
    assert await found(book="none") == []
    again = await plane.admin("POST", "/prices", plain | scope | {"output_micro": 1})
    assert_refused(again, 409, "conflict", "effective_ms")
    assert again.json()["error"]["existing_id"] == made[3]["id"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"book": "none"}, "book"),
        ({"book": "@"}, "book"),
        ({"tier": "Gold/"}, "tier"),
        ({"tier": ""}, "tier"),
        ({"service_class": "fast"}, "service_class"),
        ({"cache_write_5m_micro": -1}, "cache_write_5m_micro"),
        ({"reasoning_micro": 0.5}, "reasoning_micro"),
        ({"cache_write_micro": 1}, "cache_write_micro"),
    ],
)
async def test_what_is_not_a_price_is_refused_by_its_field(plane, changes, param):
    body = {"model": a_name("m"), **RATES, **changes}
    assert_refused(await plane.admin("POST", "/prices", body), 422, "unprocessable", param)
    listed = await plane.admin("GET", "/prices", model=body["model"])
    assert listed.json() == {"prices": []}


async def test_a_refused_currency_leaves_nothing_behind(plane):
    await plane.made("/prices", {"model": a_name("m"), **RATES})
    body = {"model": a_name("m"), **RATES, "currency": "EUR"}
    assert_refused(await plane.admin("POST", "/prices", body), 422, "unprocessable", "currency")
    listed = await plane.admin("GET", "/prices", model=body["model"])
    assert listed.json() == {"prices": []}
