-- Responses kept for `previous_response_id`. Every statement names the tenant: another's is none.

-- A change of a tenant's policy waits for what is being kept, and what comes after sees it. The
-- first number is any fixed one of ours.
-- name: keeping
SELECT pg_advisory_xact_lock_shared(1212498245, hashtext(:tenant_id));

-- name: changing
SELECT pg_advisory_xact_lock(1212498245, hashtext(:tenant_id));

-- No row when the tenant has said that nothing is to be kept. Repeating it changes nothing.
-- name: keep_response
INSERT INTO responses (id, tenant_id, previous_id, expires_at, key_id, nonce, body, bytes)
SELECT :id, :tenant_id, :previous_id, now() + :kept_s * interval '1 second', :key_id, :nonce,
       :body, :bytes
WHERE NOT EXISTS (SELECT FROM response_policies AS p
                  WHERE p.tenant_id = :tenant_id AND NOT p.keep)
ON CONFLICT (id) DO UPDATE SET id = excluded.id WHERE responses.tenant_id = excluded.tenant_id
RETURNING id;

-- name: response_by_id
SELECT id, tenant_id, previous_id, key_id, nonce, body, bytes, 1::bigint AS place, bytes AS so_far
FROM responses
WHERE id = :id AND tenant_id = :tenant_id AND expires_at > now();

-- A response and what came before it, newest first, until one is missing or there is too much.
-- name: response_chain
WITH RECURSIVE chain AS (
    SELECT r.id, r.tenant_id, r.previous_id, r.key_id, r.nonce, r.body, r.bytes, 1::bigint AS place,
           r.bytes AS so_far
    FROM responses AS r
    WHERE r.id = :id AND r.tenant_id = :tenant_id AND r.expires_at > now()
    UNION ALL
    SELECT r.id, r.tenant_id, r.previous_id, r.key_id, r.nonce, r.body, r.bytes, c.place + 1,
           c.so_far + r.bytes
    FROM chain AS c JOIN responses AS r ON r.id = c.previous_id
    WHERE r.tenant_id = :tenant_id AND r.expires_at > now()
      AND c.place < :count_max AND c.so_far <= :bytes_max
)
SELECT id, tenant_id, previous_id, key_id, nonce, body, bytes, place, so_far FROM chain ORDER BY place;

-- name: delete_response
DELETE FROM responses
WHERE id = :id AND tenant_id = :tenant_id AND expires_at > now()
RETURNING id;

-- In pieces, so that no statement holds many rows; two at once take different ones.
-- name: delete_expired
DELETE FROM responses
WHERE id IN (SELECT id FROM responses WHERE expires_at <= now()
             ORDER BY expires_at LIMIT :count_max FOR UPDATE SKIP LOCKED)
RETURNING id;

-- name: put_policy
INSERT INTO response_policies (tenant_id, keep) VALUES (:tenant_id, :keep)
ON CONFLICT (tenant_id) DO UPDATE SET keep = excluded.keep, updated_at = now();

-- name: policy
SELECT keep FROM response_policies WHERE tenant_id = :tenant_id;

-- name: forget_tenant
DELETE FROM responses WHERE tenant_id = :tenant_id RETURNING id;
