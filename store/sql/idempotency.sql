-- Idempotency keys as they are read; what changes them is in
-- migrations/versions/0010_idempotency.sql, within the ledger's commands.

-- A key that has expired is none, unless its request is still under way.
-- name: find
SELECT k.fingerprint, k.answer, k.is_open
FROM (SELECT i.fingerprint, i.answer, i.expires_at,
             EXISTS (SELECT FROM reservations AS r WHERE r.request_id = i.request_id) AS is_open
      FROM idempotency_keys AS i
      WHERE i.tenant_id = :tenant_id AND i.scope = :scope AND i.key = :key) AS k
WHERE k.expires_at > now() OR k.is_open

-- name: forget
DELETE FROM idempotency_keys AS k
WHERE (k.tenant_id, k.scope, k.key) IN (
    SELECT i.tenant_id, i.scope, i.key FROM idempotency_keys AS i
    WHERE i.expires_at <= now()
      AND NOT EXISTS (SELECT FROM reservations AS r WHERE r.request_id = i.request_id)
    ORDER BY i.expires_at LIMIT :limit
    FOR UPDATE SKIP LOCKED)
  AND k.expires_at <= now()
