-- What an operator in doubt reads beside `ledger_audit.sql`: who holds what, and what is new.

-- name: open_reservations
-- Those of the most silent gateways first, so that a bounded list shows what is wrong.
SELECT r.request_id, r.tenant_id, r.gateway_id, r.reserved_micro,
       CAST(extract(epoch FROM clock_timestamp() - r.opened_at) * 1000 AS bigint) AS age_ms,
       g.lease_ms,
       CAST(extract(epoch FROM clock_timestamp() - g.last_seen) * 1000 AS bigint)
           AS gateway_silent_ms
  FROM reservations r LEFT JOIN gateways g ON g.id = r.gateway_id
 ORDER BY g.id IS NOT NULL, g.last_seen, r.opened_at
 LIMIT :limit;

-- name: oldest_reservation
SELECT request_id, gateway_id,
       CAST(extract(epoch FROM clock_timestamp() - opened_at) * 1000 AS bigint) AS age_ms
  FROM reservations ORDER BY opened_at LIMIT 1;

-- name: leases
SELECT g.id, g.region, g.lease_ms, g.retired,
       CAST(extract(epoch FROM clock_timestamp() - g.last_seen) * 1000 AS bigint) AS silent_ms,
       (SELECT count(*) FROM reservations r WHERE r.gateway_id = g.id) AS reservations
  FROM gateways g
 ORDER BY 6 DESC, g.last_seen DESC
 LIMIT :limit;

-- name: orphans
-- Requests that witnesses speak of and nobody reserved.
SELECT count(DISTINCT w.request_id) FROM witnesses w
 WHERE NOT EXISTS (SELECT 1 FROM usage u WHERE u.request_id = w.request_id);

