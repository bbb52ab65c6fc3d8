"""Many ended requests at once, written straight into their partitions, for `usage_queries`.

Tenants are drawn by Zipf's law (the n-th makes one n-th of the first's requests), each with two
keys and mostly one model; one request in sixteen ends in some other way than complete. There
are no entries for them: the sums are taken from the rows.
"""

from datetime import UTC, datetime
from typing import Any

import psycopg

from core.money import Price

PRICE = Price(
    id="price_bench", input_micro=1_000_000, cached_input_micro=100_000, output_micro=2_000_000
)

PARTITIONS = "SELECT ledger_make_partitions(to_date(%(month)s::text, 'YYYYMM'), 1)"

REQUESTS = """
INSERT INTO usage (
    request_id, month, tenant_id, key_id, gateway_id, model, version, region, service_class,
    dialect, endpoint, stream, price_id, prompt_tokens, max_tokens, choices, amount_micro,
    reserved_micro, day, cause, settled_by, attempts, metered_prompt_tokens,
    metered_cached_tokens, metered_cache_write_5m_tokens, metered_cache_write_1h_tokens,
    metered_output_tokens, metered_reasoning_tokens, accepted_tokens, delivered_tokens,
    billed_micro, queue_ms, prefill_ms, first_token_ms, inter_token_ms, total_ms, created_ms,
    ended_ms)
SELECT 'req_local_' || lpad(to_hex(r.at_ms), 12, '0') || left(md5(r.n::text), 16),
       %(month)s, t.tenant_id, 'key_' || t.rank || '_' || t.key, 'gw_bench',
       'model_' || t.model, 'v' || %(month)s %% 2 || '_of_model_' || t.model, 'local',
       CASE t.key WHEN 0 THEN 'standard' ELSE 'batch' END,
       'openai', '/v1/chat/completions', true, 'price_bench', r.prompt, 300, 1, 1600, 1600,
       to_timestamp(r.at_ms / 1000)::date,
       CASE WHEN r.c < 0.940 THEN 'complete' WHEN r.c < 0.970 THEN 'length'
            WHEN r.c < 0.990 THEN 'client_cancelled' WHEN r.c < 0.999 THEN 'failed'
            ELSE 'expired' END,
       'gateway', 1, r.prompt, r.prompt / 2, 0, 0, r.output, 0, r.output, r.output,
       r.prompt - r.prompt / 2 + r.prompt / 20 + 2 * r.output, 1, 10, 20 + r.a * 100,
       5 + r.b * 10, 1000, r.at_ms, r.at_ms + 1000
FROM (SELECT n, %(from_ms)s + n * (%(to_ms)s - %(from_ms)s) / %(rows)s AS at_ms,
             floor(exp(random() * ln(%(tenants)s::float + 1)))::int AS rank,
             random() AS a, random() AS b, random() AS c,
             50 + (random() * 1000)::int AS prompt, 1 + (random() * 299)::int AS output
      FROM generate_series(0, %(rows)s::bigint - 1) AS n) AS r
CROSS JOIN LATERAL (SELECT 'ten_' || lpad(r.rank::text, 24, '0') AS tenant_id, r.rank,
                           (r.a < 0.2)::int AS key, (r.rank + (r.b < 0.1)::int) %% 4 AS model)
           AS t
"""

SUMS = "INSERT INTO usage_sums SELECT * FROM usage_summed WHERE month = %(month)s"


def tenant_name(rank: int) -> str:
    """The tenant with the rank-th most requests, from 1."""
    return f"ten_{rank:024d}"


def fill_month(
    conn: psycopg.Connection[tuple[Any, ...]], month: int, *, rows: int, tenants: int
) -> None:
    """So many requests, spread evenly over the month (yyyymm), and their sums."""
    year, number = divmod(month, 100)
    starts = datetime(year, number, 1, tzinfo=UTC)
    ends = datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)
    values = {
        "month": month,
        "rows": rows,
        "tenants": tenants,
        "from_ms": int(starts.timestamp()) * 1000,
        "to_ms": int(ends.timestamp()) * 1000,
    }
    for statement in (PARTITIONS, REQUESTS, SUMS):
        conn.execute(statement, values)
