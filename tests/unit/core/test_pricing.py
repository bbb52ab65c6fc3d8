"""Which version of a price counts: the narrowest that has begun."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.money import Price
from core.pricing import UNPRICED, ListedPrice, PriceTable, Terms


def a_listed(price_id: str, effective_ms: int = 0, **scope) -> ListedPrice:
    price = Price(id=price_id, input_micro=1, cached_input_micro=1, output_micro=1)
    return ListedPrice(**({"model": "m"} | scope), effective_ms=effective_ms, price=price)


# From the widest to the narrowest.
SCOPES = [
    {},
    {"service_class": "batch"},
    {"tier": "gold"},
    {"tier": "gold", "service_class": "batch"},
    {"book": "acme"},
    {"book": "acme", "service_class": "batch"},
    {"book": "acme", "tier": "gold"},
    {"book": "acme", "tier": "gold", "service_class": "batch"},
]
LADDER = [
    a_listed(f"p{step}", effective_ms=100 - step, **scope) for step, scope in enumerate(SCOPES)
]


def price_id(prices, at_ms=100, book="acme", tier="gold"):
    terms = Terms(book=book, tier=tier)
    price = PriceTable(prices).resolve(terms, "m", service_class="batch", at_ms=at_ms)
    return None if price is None else price.id


@pytest.mark.parametrize("step", range(len(LADDER)))
def test_book_comes_before_tier_and_tier_before_class(step):
    # The narrower ones began earlier, so it is not the date that decides.
    assert price_id(LADDER[: step + 1]) == f"p{step}"
    assert price_id(reversed(LADDER[: step + 1])) == f"p{step}"


@pytest.mark.parametrize(
    "scope",
    [{"book": "other"}, {"model": "n"}, {"tier": "silver"}, {"service_class": "interactive"}],
)
def test_a_version_for_somebody_else_does_not_count(scope):
    assert price_id([a_listed("theirs", **scope)]) is None
    assert price_id([a_listed("mine"), a_listed("theirs", effective_ms=50, **scope)]) == "mine"


def test_of_versions_that_fit_equally_well_the_last_that_has_begun_counts():
    prices = [a_listed("old", 10), a_listed("new", 20), a_listed("future", 30)]
    assert [price_id(prices, at_ms=at_ms) for at_ms in (9, 10, 19, 20, 29, 30)] == [
        None, "old", "old", "new", "new", "future",
    ]  # fmt: skip


def test_what_is_still_to_come_hides_nothing():
    prices = [a_listed("list", 10), a_listed("own", 20, book="acme", tier="gold")]
    assert price_id(prices, at_ms=19) == "list"
    assert price_id(prices, at_ms=20) == "own"


def test_the_list_is_everybodys_book():
    prices = [a_listed("list"), a_listed("own", book="acme")]
    assert price_id(prices, book="list") == "list"
    assert price_id(prices, book="new") == "list"


def test_only_who_is_not_billed_may_use_what_has_no_price():
    table = PriceTable([a_listed("list", 10)])
    free = Terms(billed=False)
    asked = {"service_class": "batch", "at_ms": 9}
    assert table.charged(Terms(), "m", **asked) is None
    assert table.charged(free, "m", **asked) == UNPRICED
    assert table.charged(free, "m", service_class="batch", at_ms=10).id == "list"


def test_what_is_charged_is_the_price_of_its_class():
    table = PriceTable([a_listed("any", 10), a_listed("batch", 10, service_class="batch")])
    assert table.charged(Terms(), "m", service_class="batch", at_ms=10).id == "batch"
    assert table.charged(Terms(), "m", service_class="standard", at_ms=10).id == "any"


names = st.sampled_from(["", "a", "b", "list"])
scopes = st.fixed_dictionaries(
    {"book": names, "model": names, "tier": names, "service_class": names}
)


@st.composite
def lists(draw):
    starts = draw(st.lists(st.tuples(scopes, st.integers(0, 5)), max_size=30))
    return [
        a_listed(str(number), at_ms, **scope)
        for number, (scope, at_ms) in enumerate(starts)
        if (scope, at_ms) not in starts[:number]
    ]


def narrowest(prices, asked, at_ms):
    """The rule read aloud, without an index."""

    def fit(listed):
        exact = (getattr(listed, name) == asked[name] for name in ("book", "tier", "service_class"))
        return (*exact, listed.effective_ms)

    fitting = [
        listed
        for listed in prices
        if listed.effective_ms <= at_ms
        and listed.model == asked["model"]
        and listed.book in {asked["book"], "list"}
        and listed.tier in {asked["tier"], ""}
        and listed.service_class in {asked["service_class"], ""}
    ]
    return max(fitting, key=fit).price if fitting else None


@given(lists(), scopes, st.integers(0, 6))
def test_the_table_finds_what_the_rule_says(prices, asked, at_ms):
    found = PriceTable(prices).resolve(
        Terms(book=asked["book"], tier=asked["tier"]),
        asked["model"],
        service_class=asked["service_class"],
        at_ms=at_ms,
    )
    assert found == narrowest(prices, asked, at_ms)
