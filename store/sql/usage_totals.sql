-- Totals from the sums, at any level of detail. Each call is planned for its own filters and
-- groups: those left out cost nothing.

-- name: room_for_groups
SET LOCAL work_mem = '64MB'

-- Groups in order, after the one whose key is given (:after_ms -1: from the first). A bucket is
-- a 'span', as summed, or a 'day' of hours, or a 'month', of which :bounds_ms are the starts.
-- name: usage_totals
SELECT g.bucket_ms, g.tenant_id, g.key_id, g.model, g.version, g.cause, g.service_class,
       sum(g.requests)::bigint AS requests,
       sum(g.prompt_tokens)::bigint AS prompt_tokens,
       sum(g.cached_tokens)::bigint AS cached_tokens,
       sum(g.cache_write_5m_tokens)::bigint AS cache_write_5m_tokens,
       sum(g.cache_write_1h_tokens)::bigint AS cache_write_1h_tokens,
       sum(g.output_tokens)::bigint AS output_tokens,
       sum(g.reasoning_tokens)::bigint AS reasoning_tokens,
       sum(g.accepted_tokens)::bigint AS accepted_tokens,
       sum(g.delivered_tokens)::bigint AS delivered_tokens,
       sum(g.billed_micro)::bigint AS billed_micro,
       sum(g.adjusted_micro)::bigint AS adjusted_micro,
       sum(g.first_token_count)::bigint AS first_token_count,
       sum(g.first_token_us)::bigint AS first_token_us,
       sum(g.inter_token_count)::bigint AS inter_token_count,
       sum(g.inter_token_us)::bigint AS inter_token_us
FROM (SELECT CASE :bucket::text
                 WHEN 'span' THEN t.starts_ms
                 WHEN 'day' THEN t.starts_ms - mod(t.starts_ms, 86400000)
                 WHEN 'month' THEN
                     (:bounds_ms::bigint[])[width_bucket(t.starts_ms, :bounds_ms::bigint[])]
                 ELSE 0 END AS bucket_ms,
             CASE WHEN :by_tenant THEN t.tenant_id ELSE '' END AS tenant_id,
             CASE WHEN :by_key THEN t.key_id ELSE '' END AS key_id,
             CASE WHEN :by_model THEN t.model ELSE '' END AS model,
             CASE WHEN :by_version THEN t.version ELSE '' END AS version,
             CASE WHEN :by_cause THEN t.cause ELSE '' END AS cause,
             CASE WHEN :by_class THEN t.service_class ELSE '' END AS service_class,
             t.requests, t.prompt_tokens, t.cached_tokens, t.cache_write_5m_tokens,
             t.cache_write_1h_tokens, t.output_tokens, t.reasoning_tokens, t.accepted_tokens,
             t.delivered_tokens, t.billed_micro, t.adjusted_micro, t.first_token_count,
             t.first_token_us, t.inter_token_count, t.inter_token_us
      FROM usage_sums AS t
      WHERE t.span_ms = :span_ms
        -- For the index of time alone, which hours have as an expression.
        AND CASE WHEN :by_time THEN t.starts_ms + 0 ELSE t.starts_ms END >= :from_ms
        AND CASE WHEN :by_time THEN t.starts_ms + 0 ELSE t.starts_ms END < :to_ms
        AND (:tenant_id = '' OR t.tenant_id = :tenant_id)
        AND (:key_id = '' OR t.key_id = :key_id)
        AND (:model = '' OR t.model = :model)
        AND (:version = '' OR t.version = :version)
        AND (:cause = '' OR t.cause = :cause)
        AND t.requests > 0) AS g
WHERE :after_ms < 0
   OR (g.bucket_ms, g.tenant_id, g.key_id, g.model, g.version, g.cause, g.service_class)
      > (:after_ms, :after_tenant, :after_key, :after_model, :after_version, :after_cause,
         :after_class)
GROUP BY g.bucket_ms, g.tenant_id, g.key_id, g.model, g.version, g.cause, g.service_class
ORDER BY g.bucket_ms, g.tenant_id, g.key_id, g.model, g.version, g.cause, g.service_class
LIMIT :limit
