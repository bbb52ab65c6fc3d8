-- name: open_session
INSERT INTO sessions (digest, id, user_id, method, address, user_agent, expires_at)
VALUES (:digest, :id, :user_id, :method, :address, :user_agent,
        now() + make_interval(secs => :life_s));

-- name: trim_sessions
-- All but a user's newest.
DELETE FROM sessions
 WHERE user_id = :user_id
   AND id NOT IN (SELECT id FROM sessions WHERE user_id = :user_id
                   ORDER BY created_at DESC, id LIMIT :keep);

-- name: session_by_digest
-- Alive, of a user who may sign in. `stale`: its last sight should be written again.
SELECT s.id, s.user_id, u.email, u.name, u.roles,
       s.seen_at < now() - make_interval(secs => :touch_s) AS stale
  FROM sessions s
  JOIN users u ON u.id = s.user_id
 WHERE s.digest = :digest
   AND NOT u.disabled
   AND s.expires_at > now()
   AND s.seen_at > now() - make_interval(secs => :idle_s);

-- name: touch_session
UPDATE sessions SET seen_at = now() WHERE digest = :digest;

-- name: sessions_page
SELECT s.id, s.user_id, u.email, s.method, s.address, s.user_agent,
       CAST(floor(extract(epoch FROM s.created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM s.seen_at) * 1000) AS bigint) AS seen_ms,
       CAST(floor(extract(epoch FROM s.expires_at) * 1000) AS bigint) AS expires_ms
  FROM sessions s
  JOIN users u ON u.id = s.user_id
 WHERE s.id > :after AND (:user_id = '' OR s.user_id = :user_id)
   AND s.expires_at > now()
   AND s.seen_at > now() - make_interval(secs => :idle_s)
 ORDER BY s.id
 LIMIT :limit;

-- name: end_session
DELETE FROM sessions
 WHERE id = :id AND (:user_id = '' OR user_id = :user_id)
RETURNING user_id;

-- name: end_session_by_digest
DELETE FROM sessions WHERE digest = :digest RETURNING user_id;

-- name: end_sessions
DELETE FROM sessions WHERE user_id = :user_id;

-- name: forget_sessions
DELETE FROM sessions
 WHERE digest IN (
    SELECT digest FROM sessions
     WHERE expires_at < now() OR seen_at < now() - make_interval(secs => :idle_s)
     LIMIT :limit
       FOR UPDATE SKIP LOCKED
 );

-- name: forget_invitations
DELETE FROM invitations WHERE expires_at < now();
