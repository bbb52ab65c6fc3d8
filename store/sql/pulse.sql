-- The last minutes as a picture of the fleet: what ended, how soon, at what price.

-- Points of :step_ms from :from_ms on, by when requests ended; empty ones are left out. Who asked
-- anything is found by the sums of the hours, their requests by the index of each tenant.
-- Requests that began more than :long_ms before the picture are not looked for.
-- name: pulse
SELECT u.ended_ms - mod(u.ended_ms, :step_ms) AS at_ms,
       count(*) AS requests,
       count(*) FILTER (WHERE u.cause IN ('complete', 'length')) AS good,
       count(*) FILTER (WHERE u.cause IN ('failed', 'expired', 'lost', 'not_started')) AS failed,
       count(*) FILTER (WHERE u.cause = 'filtered') AS filtered,
       sum(u.metered_prompt_tokens)::bigint AS prompt_tokens,
       sum(u.metered_cached_tokens)::bigint AS cached_tokens,
       sum(u.metered_output_tokens)::bigint AS output_tokens,
       sum(u.billed_micro + u.adjusted_micro)::bigint AS cost_micro,
       percentile_disc(0.5) WITHIN GROUP (ORDER BY u.first_token_ms) AS ttft_ms_p50,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY u.first_token_ms) AS ttft_ms_p95,
       percentile_disc(0.5) WITHIN GROUP (ORDER BY u.inter_token_ms) AS itl_ms_p50,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY u.inter_token_ms) AS itl_ms_p95,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY u.queue_ms) AS queue_ms_p95
FROM (SELECT DISTINCT t.tenant_id FROM usage_sums AS t
      WHERE t.span_ms = 3600000 AND t.requests > 0
        AND t.starts_ms + 0 > :from_ms - :long_ms - 3600000) AS s
CROSS JOIN LATERAL (
    SELECT * FROM usage AS r
    WHERE r.tenant_id = s.tenant_id AND r.created_ms >= :from_ms - :long_ms
      AND r.ended_ms >= :from_ms
      AND r.month >= to_char(to_timestamp((:from_ms - :long_ms) / 1000.0) AT TIME ZONE 'UTC',
                             'YYYYMM')::integer) AS u
WHERE :model = '' OR u.model = :model
GROUP BY at_ms ORDER BY at_ms
