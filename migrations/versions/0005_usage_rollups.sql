-- Sums of ended requests, by the hour and by the day, and how far they are.
--
-- A request belongs to the hour in which it was reserved and to the month of its id, for good:
-- what is learnt of it later changes the same sums. Times are Unix milliseconds of the start of
-- an hour or a day, UTC. Latencies are whole microseconds, so that they add up to the same in
-- any order.

CREATE TABLE usage_sums (
    tenant_id             text NOT NULL,
    span_ms               bigint NOT NULL,
    starts_ms             bigint NOT NULL,
    month                 integer NOT NULL, -- of the partition of `usage` that holds the rows
    key_id                text NOT NULL,
    model                 text NOT NULL,
    version               text NOT NULL,
    cause                 text NOT NULL,
    service_class         text NOT NULL,
    requests              bigint NOT NULL,
    prompt_tokens         bigint NOT NULL,
    cached_tokens         bigint NOT NULL,
    cache_write_5m_tokens bigint NOT NULL,
    cache_write_1h_tokens bigint NOT NULL,
    output_tokens         bigint NOT NULL,
    reasoning_tokens      bigint NOT NULL,
    accepted_tokens       bigint NOT NULL,
    delivered_tokens      bigint NOT NULL,
    billed_micro          bigint NOT NULL,
    adjusted_micro        bigint NOT NULL,
    first_token_count     bigint NOT NULL,
    first_token_us        bigint NOT NULL,
    inter_token_count     bigint NOT NULL,
    inter_token_us        bigint NOT NULL,
    PRIMARY KEY (tenant_id, starts_ms, key_id, model, version, cause, service_class, month, span_ms)
) PARTITION BY LIST (span_ms);

-- What operators filter by. No indexed column is ever updated, so that the sums of the current
-- hour are rewritten in place.
CREATE INDEX usage_sums_key_id_starts_ms_idx ON usage_sums (key_id, starts_ms);

CREATE TABLE usage_hourly PARTITION OF usage_sums FOR VALUES IN (3600000) WITH (fillfactor = 80);
CREATE TABLE usage_daily PARTITION OF usage_sums FOR VALUES IN (86400000) WITH (fillfactor = 80);

CREATE INDEX usage_daily_starts_ms_idx ON usage_daily (starts_ms);

-- Hours also tell where requests of a kind are to be found. Time alone is indexed as an
-- expression, for those who ask for nothing else: a planner that could would walk back through
-- all hours in the hope of meeting a version that was given up long ago.
CREATE INDEX usage_hourly_time_idx ON usage_hourly ((starts_ms + 0));
CREATE INDEX usage_hourly_model_starts_ms_idx ON usage_hourly (model, starts_ms);
CREATE INDEX usage_hourly_version_starts_ms_idx ON usage_hourly (version, starts_ms);
CREATE INDEX usage_hourly_cause_starts_ms_idx ON usage_hourly (cause, starts_ms);

-- Up to which entry of an account the sums are: its entries are the log of its usage's changes,
-- numbered without a gap in the order of their commits.
CREATE TABLE rollup_positions (
    tenant_id text PRIMARY KEY,
    seq       bigint NOT NULL DEFAULT 0,
    rolled_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

-- A latency counts only where the gateway's own word on the end is known. That word is final,
-- so the latencies of a request that counts never change. What no clock can have measured is
-- left out.
CREATE FUNCTION usage_latency_us(p_cause text, p_ms double precision)
RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_cause NOT IN ('lost', 'not_started') AND p_ms BETWEEN 0 AND 1e9
                THEN round(p_ms * 1000)::bigint END
$$;

-- The sums as they would be if they were taken now, from the rows.
CREATE VIEW usage_summed AS
SELECT u.tenant_id, s.span_ms, u.created_ms - mod(u.created_ms, s.span_ms) AS starts_ms, u.month,
       u.key_id, u.model, u.version, u.cause, u.service_class,
       count(*) AS requests,
       sum(u.metered_prompt_tokens)::bigint AS prompt_tokens,
       sum(u.metered_cached_tokens)::bigint AS cached_tokens,
       sum(u.metered_cache_write_5m_tokens)::bigint AS cache_write_5m_tokens,
       sum(u.metered_cache_write_1h_tokens)::bigint AS cache_write_1h_tokens,
       sum(u.metered_output_tokens)::bigint AS output_tokens,
       sum(u.metered_reasoning_tokens)::bigint AS reasoning_tokens,
       sum(u.accepted_tokens)::bigint AS accepted_tokens,
       sum(u.delivered_tokens)::bigint AS delivered_tokens,
       sum(u.billed_micro)::bigint AS billed_micro,
       sum(u.adjusted_micro)::bigint AS adjusted_micro,
       count(l.first_token_us) AS first_token_count,
       coalesce(sum(l.first_token_us), 0)::bigint AS first_token_us,
       count(l.inter_token_us) AS inter_token_count,
       coalesce(sum(l.inter_token_us), 0)::bigint AS inter_token_us
FROM usage AS u
CROSS JOIN (VALUES (3600000::bigint), (86400000)) AS s (span_ms)
CROSS JOIN LATERAL (SELECT usage_latency_us(u.cause, u.first_token_ms) AS first_token_us,
                           usage_latency_us(u.cause, u.inter_token_ms) AS inter_token_us) AS l
GROUP BY u.tenant_id, s.span_ms, u.created_ms - mod(u.created_ms, s.span_ms), u.month, u.key_id,
         u.model, u.version, u.cause, u.service_class;
