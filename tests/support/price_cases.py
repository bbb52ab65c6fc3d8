"""Requests in both dialects and what each costs, worked out by hand: a table of literals.

`exact` is the cost before it is rounded, `cost` after; both are of the tokens' parts times
the rates of the version called `price`, and none of them was computed by our code. In
`tests/unit/core/price_cases.json` one line is one request, as each dialect tells its usage.
"""

from pathlib import Path
from typing import Any

import msgspec

from core.money import Price
from core.pricing import ListedPrice, Terms

_PATH = Path(__file__).parents[1] / "unit/core/price_cases.json"


class PriceCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    note: str
    model: str
    book: str
    tier: str
    service_class: str
    at_ms: int
    openai: dict[str, Any]
    anthropic: dict[str, Any]
    price: str
    exact: str
    cost: int

    @property
    def terms(self) -> Terms:
        return Terms(book=self.book, tier=self.tier)

    @property
    def name(self) -> str:
        return f"{self.price}: {self.note}, {self.service_class} at {self.at_ms}"


class _Row(Price, frozen=True, kw_only=True, forbid_unknown_fields=True):
    book: str
    model: str
    tier: str
    service_class: str
    effective_ms: int

    def listed(self) -> ListedPrice:
        rates = {name: getattr(self, name) for name in Price.__struct_fields__}
        return ListedPrice(
            book=self.book,
            model=self.model,
            tier=self.tier,
            service_class=self.service_class,
            effective_ms=self.effective_ms,
            price=Price(**rates),
        )


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prices: list[_Row]
    cases: list[PriceCase]


_table = msgspec.json.decode(_PATH.read_bytes(), type=_Table)
CASES = _table.cases
PRICES = [row.listed() for row in _table.prices]
