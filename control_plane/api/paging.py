"""How lists are asked for: a bounded number of rows, after the last one seen."""

from typing import Annotated

from litestar.params import QueryParameter

ROWS_MAX = 1000
ROWS = 100

Limit = Annotated[int, QueryParameter(ge=1, le=ROWS_MAX)]
After = Annotated[str, QueryParameter(max_length=200)]
Filter = Annotated[str, QueryParameter(max_length=200)]
Ms = Annotated[int, QueryParameter(ge=0, le=2**53 - 1)]
MsOrNow = Annotated[int | None, QueryParameter(ge=0, le=2**53 - 1)]
