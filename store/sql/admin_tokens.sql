-- name: create_token
INSERT INTO admin_tokens (id, digest, user_id, name, permissions, created_by, expires_at)
VALUES (:id, :digest, :user_id, :name, :permissions, :created_by,
        now() + make_interval(secs => :life_s));

-- name: count_tokens
SELECT count(*) FROM admin_tokens
 WHERE user_id IS NOT DISTINCT FROM :user_id AND revoked_at IS NULL
   AND (expires_at IS NULL OR expires_at > now());

-- name: token_by_digest
-- Alive, and its owner too. `stale`: its last use should be written again.
SELECT t.id, t.name, t.permissions, t.user_id, u.email, u.roles AS owner_roles,
       coalesce(t.last_used_at < now() - make_interval(secs => :touch_s), true) AS stale
  FROM admin_tokens t
  LEFT JOIN users u ON u.id = t.user_id
 WHERE t.digest = :digest
   AND t.revoked_at IS NULL
   AND (t.expires_at IS NULL OR t.expires_at > now())
   AND (t.user_id IS NULL OR NOT u.disabled);

-- name: touch_token
UPDATE admin_tokens SET last_used_at = now() WHERE id = :id;

-- name: tokens_page
SELECT id, name, permissions, user_id, created_by,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM expires_at) * 1000) AS bigint) AS expires_ms,
       CAST(floor(extract(epoch FROM last_used_at) * 1000) AS bigint) AS last_used_ms,
       CAST(floor(extract(epoch FROM revoked_at) * 1000) AS bigint) AS revoked_ms
  FROM admin_tokens
 WHERE id > :after AND (:user_id = '' OR user_id = :user_id) AND (:id = '' OR id = :id)
 ORDER BY id
 LIMIT :limit;

-- name: revoke_token
UPDATE admin_tokens
   SET revoked_at = coalesce(revoked_at, now())
 WHERE id = :id AND (:user_id = '' OR user_id = :user_id)
RETURNING id;
