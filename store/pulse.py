"""The last minutes as a picture of the fleet, read from the requests that ended in them."""

import msgspec

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

# Of a request that ends in the picture: how long before it may have begun.
LONG_MS = 600_000

_sql = load("pulse")
_requests = load("usage")


class PulsePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What ended in `step_ms` from `at_ms` on. A latency is null where none was measured."""

    at_ms: int
    requests: int
    good: int  # whole answers, or cut by the length that was asked for
    failed: int  # ours: no answer, or none in time
    filtered: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_micro: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    itl_ms_p50: float | None
    itl_ms_p95: float | None
    queue_ms_p95: float | None


async def pulse(
    conn: Connection, *, from_ms: int, step_ms: int, model: str = ""
) -> list[PulsePoint]:
    """Points in order of time, those without a request left out."""
    values = {"from_ms": from_ms, "step_ms": step_ms, "long_ms": LONG_MS, "model": model}
    async with conn.transaction():
        await conn.execute(_requests["plan_for_each"])
        async with conn.cursor(row_factory=struct_row(PulsePoint)) as cursor:
            await cursor.execute(_sql["pulse"], values)
            return await cursor.fetchall()
