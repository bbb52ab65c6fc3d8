-- Partitions of usage by month: made ahead, and dropped when they are old and wholly summed.

-- The server looks for deadlocks after a second: within less we have given way.
-- name: give_way
SET LOCAL lock_timeout = '100ms'

-- name: make_partitions
SELECT ledger_make_partitions(coalesce(:first::date, (now() AT TIME ZONE 'UTC')::date), :months)

-- Months that have a partition and ended at least :kept_months whole months ago, oldest first.
-- name: old_months
SELECT m.month
FROM (SELECT to_date(substring(c.relname FROM '\d{4}m\d{2}$'), 'YYYY"m"MM') AS starts,
             replace(substring(c.relname FROM '\d{4}m\d{2}$'), 'm', '')::integer AS month
      FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
      WHERE i.inhparent = 'usage'::regclass AND c.relname ~ '^usage_y\d{4}m\d{2}$') AS m
WHERE m.starts < date_trunc('month', now() AT TIME ZONE 'UTC')
                 - :kept_months * interval '1 month'
ORDER BY m.month

-- One control plane at a time. The number is any fixed one of ours.
-- name: only_us
SELECT pg_try_advisory_xact_lock(1212498244, 1)

-- What still has to come to the month's sums.
-- name: outstanding
SELECT (SELECT count(*) FROM reservations AS r WHERE r.month = :month) AS open,
       (SELECT count(*)
        FROM accounts AS a LEFT JOIN rollup_positions AS p ON p.tenant_id = a.tenant_id
        CROSS JOIN LATERAL (SELECT e.request_id FROM entries AS e
                            WHERE e.tenant_id = a.tenant_id AND e.seq > coalesce(p.seq, 0)
                            OFFSET 0) AS e
        WHERE a.entries > coalesce(p.seq, 0) AND ledger_month(e.request_id) = :month) AS not_summed

-- Where each account stands, and what the month has come to so far: one snapshot.
-- name: standing
SELECT a.tenant_id, a.entries, coalesce(s.requests, 0)::bigint, coalesce(s.billed_micro, 0)::bigint,
       coalesce(s.adjusted_micro, 0)::bigint
FROM accounts AS a
LEFT JOIN (SELECT t.tenant_id, sum(t.requests) AS requests, sum(t.billed_micro) AS billed_micro,
                  sum(t.adjusted_micro) AS adjusted_micro
           FROM usage_sums AS t WHERE t.span_ms = 86400000 AND t.month = :month
           GROUP BY t.tenant_id) AS s ON s.tenant_id = a.tenant_id

-- name: drop_month
SELECT ledger_drop_month(:month)

-- The token path waits for what follows.
-- name: be_quick
SET LOCAL statement_timeout = '500ms'

-- Accounts to which something of the month has happened since, or for which the rows came to
-- something else than the sums.
-- name: disturbed
SELECT a.tenant_id
FROM accounts AS a
LEFT JOIN unnest(:tenants::text[], :entries::bigint[], :requests::bigint[], :billed::bigint[],
                 :adjusted::bigint[]) AS s (tenant_id, entries, requests, billed, adjusted)
    ON s.tenant_id = a.tenant_id
LEFT JOIN usage_retired AS r ON r.tenant_id = a.tenant_id AND r.month = :month
WHERE (coalesce(r.requests, 0), coalesce(r.billed_micro, 0), coalesce(r.adjusted_micro, 0))
      <> (coalesce(s.requests, 0), coalesce(s.billed, 0), coalesce(s.adjusted, 0))
   OR (a.entries > coalesce(s.entries, 0)
       AND EXISTS (SELECT FROM entries AS e
                   WHERE e.tenant_id = a.tenant_id AND e.seq > coalesce(s.entries, 0)
                     AND ledger_month(e.request_id) = :month))
ORDER BY a.tenant_id LIMIT 20
