-- Gateways' leases, and what the sweeper reads. All times are the database's.

-- Need not be flushed: the next is due in a second, and after a crash every silence counts anew.
-- name: assert_lease
WITH soft AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true) AS value)
INSERT INTO gateways (id, region, lease_ms, last_seen, spool_bytes, refused_words)
SELECT :gateway_id, :region, :lease_ms, now(), :spool_bytes, :refused_words
FROM soft WHERE soft.value = 'off'
ON CONFLICT (id) DO UPDATE
SET last_seen = excluded.last_seen, lease_ms = excluded.lease_ms, retired = false,
    spool_bytes = excluded.spool_bytes, refused_words = excluded.refused_words

-- name: retire_lease
UPDATE gateways SET retired = true, spool_bytes = :spool_bytes WHERE id = :gateway_id

-- name: spools_adopted
UPDATE gateways SET spool_bytes = 0 WHERE id = ANY (:gateway_ids)

-- name: clock
SELECT now(), pg_postmaster_start_time()

-- What gateways silent for a full lease still hold. A gateway that we may not have been able to
-- hear is not silent: its silence counts from our own contact with Postgres. One that has no
-- row counts from the reservation itself.
-- name: abandoned
WITH silent AS (
    SELECT r.request_id, r.month, r.gateway_id,
           coalesce(g.lease_ms, :lease_ms) * interval '1 millisecond' AS lease,
           CASE WHEN g.retired THEN '-infinity'::timestamptz
                ELSE greatest(coalesce(g.last_seen, r.opened_at), :contact_since)
           END AS since
    FROM reservations AS r LEFT JOIN gateways AS g ON g.id = r.gateway_id
)
SELECT s.request_id, s.gateway_id,
       EXISTS (SELECT FROM witnesses AS w
               WHERE w.request_id = s.request_id AND w.month = s.month
                 AND w.source = 'journal' AND w.final)
       OR s.since < now() - s.lease - :grace_ms * interval '1 millisecond' AS is_ripe
FROM silent AS s
WHERE s.since < now() - s.lease
ORDER BY is_ripe DESC, s.request_id
LIMIT :limit

-- name: expire
SELECT cause, billed_micro
FROM ledger_expire(:request_ids, (extract(epoch FROM now()) * 1000)::bigint, :billing_causes)

-- Less than the sweeper may be out of contact.
-- name: give_way
SET LOCAL lock_timeout = '500ms'

-- Those whose accounts nobody holds locked at this moment; locked by us from here on.
-- name: of_free_accounts
SELECT r.request_id
FROM reservations AS r JOIN accounts AS a ON a.tenant_id = r.tenant_id
WHERE r.request_id = ANY (:request_ids)
ORDER BY a.tenant_id
FOR NO KEY UPDATE OF a SKIP LOCKED

-- name: forget_refusals
DELETE FROM refusals
WHERE request_id IN (SELECT request_id FROM refusals
                     WHERE at < now() - :kept_s * interval '1 second'
                     ORDER BY at LIMIT :limit)

-- name: forget_gateways
DELETE FROM gateways AS g
WHERE g.last_seen < now() - :kept_s * interval '1 second'
  AND NOT EXISTS (SELECT FROM reservations AS r WHERE r.gateway_id = g.id)
