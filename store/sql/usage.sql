-- Requests as people and their tools read them, open and ended. Only the ledger writes them.

-- Each query is planned for its own filters: those left out ('') then cost nothing.
-- name: plan_for_each
SET LOCAL plan_cache_mode = force_custom_plan

-- name: usage_of
SELECT * FROM requests WHERE request_id = :request_id AND month = ledger_month(:request_id)

-- A page of one tenant's requests, newest first, before the row (before_ms, before_id).
-- name: usage_page_of_tenant
SELECT * FROM requests
WHERE tenant_id = :tenant_id AND created_ms >= :from_ms
  AND (created_ms, request_id) < (:before_ms, :before_id)
ORDER BY created_ms DESC, request_id DESC LIMIT :limit

-- Other filters have no index on the requests themselves, which the token path would have to
-- keep. The sums have: they tell in which hours of which tenants there is something to find.

-- The hours before the one of :before_ms that hold :limit requests to find, or all there are.
-- :by_time, where there is no filter, is for the index of time alone.
-- name: hours_to_search
SELECT coalesce(array_agg(DISTINCT n.starts_ms) FILTER (WHERE n.newer < :limit), '{}') AS hours,
       count(*) < :limit AS are_all
FROM (SELECT h.starts_ms,
             coalesce(sum(h.requests) OVER (
                 ORDER BY h.starts_ms DESC
                 RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS newer
      FROM (SELECT t.starts_ms, t.requests FROM usage_sums AS t
            WHERE t.span_ms = 3600000
              AND CASE WHEN :by_time THEN t.starts_ms + 0 ELSE t.starts_ms END
                  >= :from_ms - 3599999
              AND CASE WHEN :by_time THEN t.starts_ms + 0 ELSE t.starts_ms END
                  < :before_ms - mod(:before_ms, 3600000)
              AND (:tenant_id = '' OR t.tenant_id = :tenant_id)
              AND (:key_id = '' OR t.key_id = :key_id)
              AND (:model = '' OR t.model = :model)
              AND (:version = '' OR t.version = :version)
              AND (:cause = '' OR t.cause = :cause)
              AND t.requests > 0
              AND t.month NOT IN (SELECT r.month FROM usage_retired AS r)
            ORDER BY CASE WHEN :by_time THEN t.starts_ms + 0 ELSE t.starts_ms END DESC
            LIMIT :limit) AS h) AS n

-- What is found in these hours, and among open requests from :open_from_ms on. Each hour is
-- looked up by itself, whatever the planner thinks of how versions and causes lie in time.
-- name: usage_page_found
SELECT * FROM (
    SELECT e.*
    FROM unnest(:hours::bigint[]) AS h (starts_ms)
    CROSS JOIN LATERAL (
        SELECT DISTINCT t.tenant_id, t.month FROM usage_sums AS t
        WHERE t.span_ms = 3600000
          AND CASE WHEN :by_time THEN t.starts_ms + 0 ELSE t.starts_ms END = h.starts_ms
          AND (:tenant_id = '' OR t.tenant_id = :tenant_id)
          AND (:key_id = '' OR t.key_id = :key_id)
          AND (:model = '' OR t.model = :model)
          AND (:version = '' OR t.version = :version)
          AND (:cause = '' OR t.cause = :cause)
          AND t.requests > 0) AS s
    CROSS JOIN LATERAL (
        SELECT * FROM requests AS r
        WHERE r.state = 'settled' AND r.tenant_id = s.tenant_id AND r.month = s.month
          AND r.created_ms >= greatest(h.starts_ms, :from_ms)
          AND r.created_ms < h.starts_ms + 3600000
          AND (r.created_ms, r.request_id) < (:before_ms, :before_id)
          AND (:key_id = '' OR r.key_id = :key_id)
          AND (:model = '' OR r.model = :model)
          AND (:version = '' OR r.version = :version)
          AND (:cause = '' OR r.cause = :cause)
        ORDER BY r.created_ms DESC, r.request_id DESC LIMIT :limit) AS e
    UNION ALL
    SELECT * FROM requests AS r
    WHERE r.state = 'open' AND r.created_ms >= :open_from_ms
      AND (r.created_ms, r.request_id) < (:before_ms, :before_id)
      AND (:tenant_id = '' OR r.tenant_id = :tenant_id)
      AND (:key_id = '' OR r.key_id = :key_id)
      AND (:model = '' OR r.model = :model)
      AND (:version = '' OR r.version = :version)
      AND :cause = '') AS found
ORDER BY created_ms DESC, request_id DESC LIMIT :limit
