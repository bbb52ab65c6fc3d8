"""Price versions: added and listed. One never changes; a new price is a new version."""

import time
from typing import Annotated

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from control_plane.api.names import END, BookName, ModelName, TierName
from control_plane.api.paging import Filter
from control_plane.errors import ExistsError
from control_plane.services import Services
from core.errors import Code, refuse
from core.money import LEFT_OUT, Price
from core.pricing import ANY, LIST, ListedPrice
from core.protocol import ServiceClass
from store.audit_log import record
from store.postgres import Connection
from store.prices import add_price, other_currency, price_list
from store.tenants import knows_price_book

MICRO_MAX = 10**12  # a million units of the currency for a million tokens
MS_MAX = 2**53 - 1

Micro = Annotated[int, msgspec.Meta(ge=0, le=MICRO_MAX)]
Currency = Annotated[str, msgspec.Meta(pattern=r"^[A-Z]{3}" + END)]
At = Annotated[int, msgspec.Meta(ge=0, le=MS_MAX)]


class CreatePrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Micro-units per million tokens; `request_micro` for each request. In force from now on.

    Null is any tier, any class. Cache writes cost what input does and reasoning what output
    does, unless they are given.
    """

    book: BookName = LIST
    model: ModelName
    tier: TierName | None = None
    service_class: ServiceClass | None = None
    input_micro: Micro
    cached_input_micro: Micro
    cache_write_5m_micro: Micro | None = None
    cache_write_1h_micro: Micro | None = None
    output_micro: Micro
    reasoning_micro: Micro | None = None
    request_micro: Micro = 0
    currency: Currency = "USD"
    effective_ms: At | None = None

    def listed(self, now_ms: int) -> ListedPrice:
        """The version it makes."""
        effective_ms = now_ms if self.effective_ms is None else self.effective_ms
        tier, service_class = self.tier or ANY, self.service_class or ANY
        # Names hold no `@`, and those of books and tiers no `/`: no two scopes make one id.
        scope = f"{self.book}/{tier}/{service_class}"
        within = "" if scope == f"{LIST}//" else f"@{scope}"
        price = Price(
            id=f"{self.model}{within}@{effective_ms}",
            currency=self.currency,
            input_micro=self.input_micro,
            cached_input_micro=self.cached_input_micro,
            cache_write_5m_micro=_given(self.cache_write_5m_micro),
            cache_write_1h_micro=_given(self.cache_write_1h_micro),
            output_micro=self.output_micro,
            reasoning_micro=_given(self.reasoning_micro),
            request_micro=self.request_micro,
        )
        return ListedPrice(
            book=self.book,
            model=self.model,
            tier=tier,
            service_class=service_class,
            effective_ms=effective_ms,
            price=price,
        )


class PriceBody(msgspec.Struct, frozen=True, kw_only=True):
    """A version and the Unix millisecond it starts at; in force until the next of its kind."""

    id: str
    book: str
    model: str
    tier: str | None
    service_class: str | None
    effective_ms: int
    currency: str
    input_micro: int
    cached_input_micro: int
    cache_write_5m_micro: int
    cache_write_1h_micro: int
    output_micro: int
    reasoning_micro: int
    request_micro: int


class PriceList(msgspec.Struct, frozen=True, kw_only=True):
    """By book, model, tier and class, then by start."""

    prices: list[PriceBody]


@post("/prices")
async def create_price(
    services: NamedDependency[Services], actor: NamedDependency[str], data: JSONBody[CreatePrice]
) -> PriceBody:
    """409 when there is a version for just this that starts at that very moment."""
    listed = data.listed(time.time_ns() // 1_000_000)
    async with services.postgres.transaction() as conn:
        if not await knows_price_book(conn, data.book):
            raise refuse(Code.UNPROCESSABLE, f"there is no price book {data.book!r}", param="book")
        standing = await add_price(conn, listed)
        if standing is not None:
            message = f"{data.model!r} has this price from {standing.effective_ms} on"
            raise ExistsError(message, param="effective_ms", existing_id=standing.price.id)
        await _same_currency(conn, data.currency)
        detail = msgspec.to_builtins(listed)
        await record(
            conn, actor=actor, action="price.create", subject=listed.price.id, detail=detail
        )
    return _body(listed)


async def _same_currency(conn: Connection, currency: str) -> None:
    """An account has one balance and one cap, so a system has one currency.

    For after the price is added: whoever adds another waits for us, and then sees it.
    """
    other = await other_currency(conn, currency)
    if other is not None:
        raise refuse(Code.UNPROCESSABLE, f"Prices here are in {other}.", param="currency")


@get("/prices")
async def list_prices(
    services: NamedDependency[Services],
    book: Filter = "",
    model: Filter = "",
    tier: Filter = "",
    service_class: Filter = "",
) -> PriceList:
    """Past, present and future; each filter that is given narrows to exactly that."""
    async with services.postgres.connection() as conn:
        found = await price_list(
            conn, book=book, model=model, tier=tier, service_class=service_class
        )
    return PriceList(prices=[_body(listed) for listed in found])


def _given(rate: int | None) -> int:
    return LEFT_OUT if rate is None else rate


def _body(listed: ListedPrice) -> PriceBody:
    return PriceBody(
        book=listed.book,
        model=listed.model,
        tier=listed.tier or None,
        service_class=listed.service_class or None,
        effective_ms=listed.effective_ms,
        **msgspec.structs.asdict(listed.price),
    )
