"""Ended requests of two sides, written straight into `usage`: what a rollout is judged by."""

import secrets
from typing import Any

from psycopg import AsyncConnection

INSERT = """
INSERT INTO usage (
    request_id, month, tenant_id, key_id, gateway_id, model, version, region, service_class,
    dialect, endpoint, stream, price_id, prompt_tokens, max_tokens, choices, amount_micro,
    reserved_micro, day, cause, settled_by, attempts, metered_prompt_tokens,
    metered_cached_tokens, metered_cache_write_5m_tokens, metered_cache_write_1h_tokens,
    metered_output_tokens, metered_reasoning_tokens, accepted_tokens, delivered_tokens,
    billed_micro, queue_ms, prefill_ms, first_token_ms, inter_token_ms, total_ms, created_ms,
    ended_ms)
SELECT r.id, ledger_month(r.id), %(tenant)s, 'key_1', 'gw_1', %(model)s, %(version)s, %(region)s,
       %(service_class)s, 'openai', '/v1/chat/completions', true, 'price', %(prompt)s, 300, 1,
       0, 0, '2026-01-01', %(cause)s, 'gateway', 1, %(prompt)s, 0, 0, 0, %(output)s, 0,
       %(output)s, %(output)s, %(billed)s, 1, 1, %(first_token)s, %(inter_token)s, 99,
       %(at_ms)s, %(at_ms)s
FROM unnest(%(ids)s::text[]) AS r (id)
"""


async def add_requests(
    conn: AsyncConnection[Any], count: int, *, at_ms: int, **changes: Any
) -> None:
    """So many that are alike, begun in this millisecond."""
    values = {
        "tenant": "ten_1",
        "model": "smol",
        "version": "v1",
        "region": "local",
        "service_class": "standard",
        "prompt": 100,
        "output": 20,
        "billed": 140,
        "cause": "complete",
        "first_token": 50.0,
        "inter_token": 10.0,
    } | changes
    made = f"req_{values['region']}_{at_ms:012x}"
    ids = [made + secrets.token_hex(8) for _ in range(count)]
    await conn.execute(INSERT, {**values, "ids": ids, "at_ms": at_ms})
