"""Rows as structs: a psycopg row factory that checks what it reads against the type."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from psycopg import AsyncCursor
from psycopg.rows import RowMaker

Row = TypeVar("Row", bound=msgspec.Struct)


def struct_row(kind: type[Row]) -> Callable[[AsyncCursor[Any]], RowMaker[Row]]:
    """Columns become fields by name. Raises msgspec.ValidationError for a row that is no `kind`."""

    def factory(cursor: AsyncCursor[Any]) -> RowMaker[Row]:
        names = [column.name for column in cursor.description or ()]

        def make(values: Any) -> Row:
            return msgspec.convert(dict(zip(names, values, strict=True)), kind)

        return make

    return factory
