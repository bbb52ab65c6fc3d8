"""Price books: names for what some tenants pay instead of list prices. Made, never removed."""

from typing import Annotated

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from control_plane.api.names import BookName
from control_plane.api.paging import ROWS, After, Limit
from control_plane.errors import ExistsError
from control_plane.services import Services
from store.audit_log import record
from store.prices import PriceBook, create_book, price_books_page

Description = Annotated[str, msgspec.Meta(max_length=500)]


class CreatePriceBook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A book without prices: whoever has it pays list prices until it has some."""

    id: BookName
    description: Description = ""


class PriceBookList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of id; `after` asks for the next ones, null at the end."""

    price_books: list[PriceBook]
    after: str | None


@post("/price-books")
async def create_price_book(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    data: JSONBody[CreatePriceBook],
) -> PriceBook:
    """409 when the id is taken, as `list` always is."""
    book = PriceBook(id=data.id, description=data.description)
    async with services.postgres.transaction() as conn:
        if not await create_book(conn, book):
            message = f"a price book {data.id!r} exists"
            raise ExistsError(message, param="id", existing_id=data.id)
        detail = msgspec.to_builtins(data)
        await record(conn, actor=actor, action="price_book.create", subject=book.id, detail=detail)
    return book


@get("/price-books")
async def list_price_books(
    services: NamedDependency[Services], after: After = "", limit: Limit = ROWS
) -> PriceBookList:
    """All of them."""
    async with services.postgres.connection() as conn:
        books = await price_books_page(conn, after=after, limit=limit)
    last = books[-1].id if len(books) == limit else None
    return PriceBookList(price_books=books, after=last)
