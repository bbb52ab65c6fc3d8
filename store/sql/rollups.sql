-- Sums of usage, brought up to date from the log of its changes: an account's entries, numbered
-- without a gap in commit order, and beside them what each correction changed.
--
-- Nothing here locks what the ledger locks. Whoever moves a position holds its row.

-- name: know_accounts
INSERT INTO rollup_positions (tenant_id)
SELECT a.tenant_id FROM accounts AS a
WHERE a.entries > 0
  AND NOT EXISTS (SELECT FROM rollup_positions AS p WHERE p.tenant_id = a.tenant_id)
ON CONFLICT (tenant_id) DO NOTHING

-- Accounts with changes that are not in the sums yet, the longest neglected first; ours until
-- the transaction ends. What follows is read by later statements, whose snapshots come after.
-- name: take_accounts
SELECT p.tenant_id
FROM rollup_positions AS p JOIN accounts AS a ON a.tenant_id = p.tenant_id
WHERE a.entries > p.seq
ORDER BY p.rolled_at, p.tenant_id
LIMIT :tenants_max
FOR UPDATE OF p SKIP LOCKED

-- Moves the positions of the accounts taken on by at most :entries_max entries in all.
--
-- A request whose row changed counts as it stood after entry `hi`, less what it counted for
-- after entry `lo`. Either is its row as it is now with the later corrections undone, for all
-- of this is one snapshot.
--
-- A latency counts only where the gateway's own word on the end is known. That word is final,
-- so such a request's latencies never change.
-- name: roll_up
WITH batch AS MATERIALIZED (
    SELECT t.tenant_id, t.lo,
           least(t.entries, t.lo + greatest(0, :entries_max - t.before)) AS hi
    FROM (SELECT p.tenant_id, p.seq AS lo, a.entries,
                 coalesce(sum(a.entries - p.seq) OVER (
                     ORDER BY p.rolled_at, p.tenant_id
                     ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)::bigint AS before
          FROM rollup_positions AS p JOIN accounts AS a ON a.tenant_id = p.tenant_id
          WHERE p.tenant_id = ANY (:tenants)) AS t
),
correction AS MATERIALIZED (
    SELECT c.*, b.lo, b.hi
    FROM batch AS b
    CROSS JOIN LATERAL (SELECT * FROM usage_corrections AS c
                        WHERE c.tenant_id = b.tenant_id AND c.seq > b.lo OFFSET 0) AS c
),
changed AS MATERIALIZED (
    SELECT x.tenant_id, x.request_id, x.lo, x.hi, bool_or(x.is_end) AS is_new
    FROM (SELECT b.tenant_id, e.request_id, b.lo, b.hi, true AS is_end
          FROM batch AS b
          CROSS JOIN LATERAL (SELECT e.request_id FROM entries AS e
                              WHERE e.tenant_id = b.tenant_id AND e.seq > b.lo AND e.seq <= b.hi
                                AND e.kind IN ('settle', 'release', 'expire') OFFSET 0) AS e
          UNION ALL
          SELECT c.tenant_id, c.request_id, c.lo, c.hi, false
          FROM correction AS c WHERE c.seq <= c.hi) AS x
    GROUP BY x.tenant_id, x.request_id, x.lo, x.hi
),
side AS MATERIALIZED (
    SELECT tenant_id, request_id, ledger_month(request_id) AS month, 1 AS sign, hi AS seq
    FROM changed
    UNION ALL
    SELECT tenant_id, request_id, ledger_month(request_id), -1, lo
    FROM changed WHERE NOT is_new
),
undone AS MATERIALIZED (
    SELECT s.request_id, s.sign, (array_agg(c.from_cause ORDER BY c.seq))[1] AS cause,
           sum(c.d_prompt) AS prompt, sum(c.d_cached) AS cached, sum(c.d_write_5m) AS write_5m,
           sum(c.d_write_1h) AS write_1h, sum(c.d_output) AS output,
           sum(c.d_reasoning) AS reasoning, sum(c.d_accepted) AS accepted,
           sum(c.d_delivered) AS delivered, sum(c.d_billed) AS billed,
           sum(c.d_adjusted) AS adjusted
    FROM side AS s
    JOIN correction AS c ON c.request_id = s.request_id AND c.tenant_id = s.tenant_id
                        AND c.seq > s.seq
    GROUP BY s.request_id, s.sign
),
-- LIMIT and OFFSET keep each row a search by key, whatever a plan made in advance expects.
state AS MATERIALIZED (
    SELECT s.tenant_id, s.month, s.sign, u.request_id IS NULL AS is_missing,
           u.created_ms, u.key_id, u.model, u.version, u.service_class,
           coalesce(d.cause, u.cause) AS cause,
           u.metered_prompt_tokens - coalesce(d.prompt, 0) AS prompt,
           u.metered_cached_tokens - coalesce(d.cached, 0) AS cached,
           u.metered_cache_write_5m_tokens - coalesce(d.write_5m, 0) AS write_5m,
           u.metered_cache_write_1h_tokens - coalesce(d.write_1h, 0) AS write_1h,
           u.metered_output_tokens - coalesce(d.output, 0) AS output,
           u.metered_reasoning_tokens - coalesce(d.reasoning, 0) AS reasoning,
           u.accepted_tokens - coalesce(d.accepted, 0) AS accepted,
           u.delivered_tokens - coalesce(d.delivered, 0) AS delivered,
           u.billed_micro - coalesce(d.billed, 0) AS billed,
           u.adjusted_micro - coalesce(d.adjusted, 0) AS adjusted,
           usage_latency_us(coalesce(d.cause, u.cause), u.first_token_ms) AS first_token_us,
           usage_latency_us(coalesce(d.cause, u.cause), u.inter_token_ms) AS inter_token_us
    FROM side AS s
    LEFT JOIN undone AS d ON d.request_id = s.request_id AND d.sign = s.sign
    LEFT JOIN LATERAL (SELECT * FROM usage AS u
                       WHERE u.request_id = s.request_id AND u.month = s.month LIMIT 1) AS u
        ON true
),
difference AS (
    SELECT s.tenant_id, w.span_ms, s.created_ms - mod(s.created_ms, w.span_ms) AS starts_ms,
           s.month, s.key_id, s.model, s.version, s.cause, s.service_class,
           sum(s.sign) AS requests,
           sum(s.sign * s.prompt) AS prompt_tokens, sum(s.sign * s.cached) AS cached_tokens,
           sum(s.sign * s.write_5m) AS cache_write_5m_tokens,
           sum(s.sign * s.write_1h) AS cache_write_1h_tokens,
           sum(s.sign * s.output) AS output_tokens, sum(s.sign * s.reasoning) AS reasoning_tokens,
           sum(s.sign * s.accepted) AS accepted_tokens,
           sum(s.sign * s.delivered) AS delivered_tokens,
           sum(s.sign * s.billed) AS billed_micro, sum(s.sign * s.adjusted) AS adjusted_micro,
           coalesce(sum(s.sign) FILTER (WHERE s.first_token_us IS NOT NULL), 0)
               AS first_token_count,
           coalesce(sum(s.sign * s.first_token_us), 0) AS first_token_us,
           coalesce(sum(s.sign) FILTER (WHERE s.inter_token_us IS NOT NULL), 0)
               AS inter_token_count,
           coalesce(sum(s.sign * s.inter_token_us), 0) AS inter_token_us
    FROM state AS s CROSS JOIN (VALUES (3600000::bigint), (86400000)) AS w (span_ms)
    WHERE NOT s.is_missing
    GROUP BY s.tenant_id, w.span_ms, s.created_ms - mod(s.created_ms, w.span_ms), s.month,
             s.key_id, s.model, s.version, s.cause, s.service_class
),
added AS (
    INSERT INTO usage_sums AS t SELECT * FROM difference
    ON CONFLICT (tenant_id, starts_ms, key_id, model, version, cause, service_class, month, span_ms)
    DO UPDATE SET
        requests = t.requests + excluded.requests,
        prompt_tokens = t.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = t.cached_tokens + excluded.cached_tokens,
        cache_write_5m_tokens = t.cache_write_5m_tokens + excluded.cache_write_5m_tokens,
        cache_write_1h_tokens = t.cache_write_1h_tokens + excluded.cache_write_1h_tokens,
        output_tokens = t.output_tokens + excluded.output_tokens,
        reasoning_tokens = t.reasoning_tokens + excluded.reasoning_tokens,
        accepted_tokens = t.accepted_tokens + excluded.accepted_tokens,
        delivered_tokens = t.delivered_tokens + excluded.delivered_tokens,
        billed_micro = t.billed_micro + excluded.billed_micro,
        adjusted_micro = t.adjusted_micro + excluded.adjusted_micro,
        first_token_count = t.first_token_count + excluded.first_token_count,
        first_token_us = t.first_token_us + excluded.first_token_us,
        inter_token_count = t.inter_token_count + excluded.inter_token_count,
        inter_token_us = t.inter_token_us + excluded.inter_token_us
),
moved AS (
    UPDATE rollup_positions AS p SET seq = b.hi, rolled_at = clock_timestamp()
    FROM batch AS b WHERE p.tenant_id = b.tenant_id AND b.hi > b.lo
    RETURNING b.hi - b.lo AS entries
)
SELECT (SELECT coalesce(sum(m.entries), 0) FROM moved AS m)::bigint AS entries,
       (SELECT count(*) FROM changed) AS requests,
       (SELECT count(*) FROM state AS s WHERE s.is_missing AND s.sign > 0) AS missing

-- How far the sums are behind: entries not counted yet, and when the first of them was written.
-- name: freshness
SELECT coalesce(sum(b.entries), 0)::bigint AS entries_behind,
       CAST(floor(extract(epoch FROM coalesce(min(e.at), now())) * 1000) AS bigint)
           AS fresh_as_of_ms
FROM (SELECT a.tenant_id, coalesce(p.seq, 0) + 1 AS next, a.entries - coalesce(p.seq, 0) AS entries
      FROM accounts AS a LEFT JOIN rollup_positions AS p ON p.tenant_id = a.tenant_id
      WHERE (:tenant_id = '' OR a.tenant_id = :tenant_id) AND a.entries > coalesce(p.seq, 0)) AS b
CROSS JOIN LATERAL (SELECT at FROM entries AS e
                    WHERE e.tenant_id = b.tenant_id AND e.seq = b.next LIMIT 1) AS e

-- Taking a tenant's sums anew, in one snapshot. Months whose rows are gone keep theirs.

-- name: one_snapshot
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ

-- name: take_account
SELECT a.entries FROM rollup_positions AS p JOIN accounts AS a ON a.tenant_id = p.tenant_id
WHERE p.tenant_id = :tenant_id FOR UPDATE OF p

-- name: forget_sums
DELETE FROM usage_sums AS t
WHERE t.tenant_id = :tenant_id
  AND NOT EXISTS (SELECT FROM usage_retired AS r
                  WHERE r.tenant_id = t.tenant_id AND r.month = t.month)

-- name: sum_anew
INSERT INTO usage_sums
SELECT * FROM usage_summed AS t
WHERE t.tenant_id = :tenant_id
  AND NOT EXISTS (SELECT FROM usage_retired AS r
                  WHERE r.tenant_id = t.tenant_id AND r.month = t.month)

-- name: move_to
UPDATE rollup_positions SET seq = :seq, rolled_at = clock_timestamp() WHERE tenant_id = :tenant_id

-- Sums that are not what the rows add up to, of a tenant that is not behind.
-- name: differences
WITH kept AS (
    SELECT * FROM usage_sums AS t
    WHERE t.tenant_id = :tenant_id
      -- What has moved away leaves nothing.
      AND (t.requests, t.prompt_tokens, t.cached_tokens, t.cache_write_5m_tokens,
           t.cache_write_1h_tokens, t.output_tokens, t.reasoning_tokens, t.accepted_tokens,
           t.delivered_tokens, t.billed_micro, t.adjusted_micro, t.first_token_count,
           t.first_token_us, t.inter_token_count, t.inter_token_us)
          <> (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
      AND NOT EXISTS (SELECT FROM usage_retired AS r
                      WHERE r.tenant_id = t.tenant_id AND r.month = t.month)
),
counted AS (
    SELECT * FROM usage_summed AS t
    WHERE t.tenant_id = :tenant_id
      AND NOT EXISTS (SELECT FROM usage_retired AS r
                      WHERE r.tenant_id = t.tenant_id AND r.month = t.month)
)
SELECT 'kept' AS side, k.* FROM (TABLE kept EXCEPT ALL TABLE counted) AS k
UNION ALL
SELECT 'counted', c.* FROM (TABLE counted EXCEPT ALL TABLE kept) AS c
