"""Usage rows: one for each accepted request, whatever its end. Written only by the ledger."""

import msgspec

from core.money import EndCause
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

PAGE_MAX = 1_000

_sql = load("usage")


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and micro-units are totals; times are Unix or elapsed milliseconds."""

    request_id: str
    tenant_id: str
    key_id: str
    gateway_id: str
    model: str
    version: str
    region: str
    service_class: str
    dialect: str
    endpoint: str
    stream: bool
    price_id: str
    prompt_tokens: int  # as the gateway counted them
    max_tokens: int  # for each choice
    choices: int
    amount_micro: int  # first reserved
    reserved_micro: int  # reserved in all, top-ups included
    state: str  # open | settled
    cause: EndCause | None
    settled_by: str | None  # gateway | sweeper, whose word is provisional
    attempts: int
    metered_prompt_tokens: int
    metered_cached_tokens: int
    metered_output_tokens: int
    accepted_tokens: int  # of the metered output, what the gateway says it accepted
    delivered_tokens: int
    billed_micro: int
    bill_limit_micro: int | None  # what a hard cap has cut the bill to
    queue_ms: float | None
    prefill_ms: float | None
    first_token_ms: float | None
    inter_token_ms: float | None
    total_ms: float | None
    created_ms: int
    ended_ms: int | None


async def usage_of(conn: Connection, request_id: str) -> UsageRow | None:
    """One request's row."""
    async with conn.cursor(row_factory=struct_row(UsageRow)) as cursor:
        await cursor.execute(_sql["usage_of"], {"request_id": request_id})
        return await cursor.fetchone()


async def usage_page(
    conn: Connection, tenant_id: str, *, before_ms: int, before_id: str = "", limit: int = 100
) -> list[UsageRow]:
    """Requests before the row (before_ms, before_id), newest first; the last tells the next page.

    `tenant_id` "" is every tenant.
    """
    statement = "usage_page" if tenant_id else "usage_page_of_all"
    parameters = {
        "tenant_id": tenant_id,
        "before_ms": before_ms,
        "before_id": before_id,
        "limit": min(limit, PAGE_MAX),
    }
    async with conn.cursor(row_factory=struct_row(UsageRow)) as cursor:
        await cursor.execute(_sql[statement], parameters)
        return await cursor.fetchall()
