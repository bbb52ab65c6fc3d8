"""Price versions: added and listed. One never changes; a new price is a new version."""

import time
from typing import Annotated

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from control_plane.api.names import ModelName
from control_plane.auth import ADMIN
from control_plane.errors import ExistsError
from control_plane.services import Services
from core.errors import Code, refuse
from core.money import Price
from store.audit_log import record
from store.postgres import Connection
from store.prices import ListedPrice, price_by_id, price_list, seed_prices

MICRO_MAX = 10**12  # a million units of the currency for a million tokens
MS_MAX = 2**53 - 1

Micro = Annotated[int, msgspec.Meta(ge=0, le=MICRO_MAX)]
Currency = Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]
At = Annotated[int, msgspec.Meta(ge=0, le=MS_MAX)]


class CreatePrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Micro-units per million tokens; `request_micro` for each request. In force from now on."""

    model: ModelName
    input_micro: Micro
    cached_input_micro: Micro
    output_micro: Micro
    request_micro: Micro = 0
    currency: Currency = "USD"
    effective_ms: At | None = None


class PriceBody(msgspec.Struct, frozen=True, kw_only=True):
    """A version and the Unix millisecond it starts at; in force until the model's next."""

    id: str
    model: str
    effective_ms: int
    currency: str
    input_micro: int
    cached_input_micro: int
    output_micro: int
    request_micro: int
    cache_write_5m_micro: int
    cache_write_1h_micro: int
    reasoning_micro: int


class PriceList(msgspec.Struct, frozen=True, kw_only=True):
    """By model, then by start."""

    prices: list[PriceBody]


@post("/prices")
async def create_price(
    services: NamedDependency[Services], data: JSONBody[CreatePrice]
) -> PriceBody:
    """409 when the model has a version that starts at that very moment."""
    effective_ms = data.effective_ms
    if effective_ms is None:
        effective_ms = time.time_ns() // 1_000_000
    price = Price(
        id=f"{data.model}@{effective_ms}",
        currency=data.currency,
        input_micro=data.input_micro,
        cached_input_micro=data.cached_input_micro,
        output_micro=data.output_micro,
        request_micro=data.request_micro,
    )
    listed = ListedPrice(model=data.model, effective_ms=effective_ms, price=price)
    async with services.postgres.transaction() as conn:
        if await price_by_id(conn, price.id) is not None:
            message = f"{data.model!r} has a price from {effective_ms} on"
            raise ExistsError(message, param="effective_ms", existing_id=price.id)
        await _same_currency(conn, price.currency)
        await seed_prices(conn, [listed])
        detail = msgspec.to_builtins(listed)
        await record(conn, actor=ADMIN, action="price.create", subject=price.id, detail=detail)
    return _body(listed)


async def _same_currency(conn: Connection, currency: str) -> None:
    """An account has one balance and one cap, so a system has one currency."""
    others = {listed.price.currency for listed in await price_list(conn)} - {currency}
    if others:
        message = f"Prices here are in {others.pop()}."
        raise refuse(Code.UNPROCESSABLE, message, param="currency")


@get("/prices")
async def list_prices(services: NamedDependency[Services]) -> PriceList:
    """Past, present and future."""
    async with services.postgres.connection() as conn:
        return PriceList(prices=[_body(listed) for listed in await price_list(conn)])


def _body(listed: ListedPrice) -> PriceBody:
    fields = msgspec.structs.asdict(listed.price)
    return PriceBody(model=listed.model, effective_ms=listed.effective_ms, **fields)
