-- name: create_user
INSERT INTO users (id, email, name, password, roles, source)
VALUES (:id, :email, :name, :password, :roles, :source)
ON CONFLICT (email) DO NOTHING
RETURNING id;

-- name: user_by_id
SELECT u.id, u.email, u.name, u.password, u.roles, u.source, u.disabled, u.version,
       CAST(floor(extract(epoch FROM u.created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM u.signed_in_at) * 1000) AS bigint) AS signed_in_ms,
       coalesce(a.failures, 0) AS failures, coalesce(a.until_ms, 0) AS locked_until_ms,
       EXISTS (SELECT 1 FROM invitations i
                WHERE i.user_id = u.id AND i.expires_at > now()) AS invited
  FROM users u
  LEFT JOIN sign_in_attempts a ON a.name = 'user:' || u.id
 WHERE u.id = :id;

-- name: user_id_by_email
SELECT id FROM users WHERE email = :email;

-- name: users_page
-- In order of email, after :after; :email narrows where it is given.
SELECT u.id, u.email, u.name, u.password, u.roles, u.source, u.disabled, u.version,
       CAST(floor(extract(epoch FROM u.created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM u.signed_in_at) * 1000) AS bigint) AS signed_in_ms,
       coalesce(a.failures, 0) AS failures, coalesce(a.until_ms, 0) AS locked_until_ms,
       EXISTS (SELECT 1 FROM invitations i
                WHERE i.user_id = u.id AND i.expires_at > now()) AS invited
  FROM users u
  LEFT JOIN sign_in_attempts a ON a.name = 'user:' || u.id
 WHERE u.email > :after AND (:email = '' OR u.email = :email)
 ORDER BY u.email
 LIMIT :limit;

-- name: lock_user
SELECT 1 FROM users WHERE id = :id FOR UPDATE;

-- name: change_user
UPDATE users
   SET name = :name, roles = :roles, disabled = :disabled, version = version + 1,
       updated_at = now()
 WHERE id = :id;

-- name: set_password
UPDATE users
   SET password = :password, version = version + 1, updated_at = now()
 WHERE id = :id;

-- name: rehash
-- The same password, hashed as hashes are made now.
UPDATE users SET password = :password WHERE id = :id AND password = :before;

-- name: signed_in
UPDATE users SET signed_in_at = now() WHERE id = :id;

-- name: user_of_identity
SELECT user_id FROM user_identities WHERE issuer = :issuer AND subject = :subject;

-- name: add_identity
INSERT INTO user_identities (issuer, subject, user_id)
VALUES (:issuer, :subject, :user_id);

-- name: subject_of
SELECT subject FROM user_identities WHERE user_id = :user_id AND issuer = :issuer;

-- name: forget_identities
DELETE FROM user_identities WHERE user_id = :user_id;

-- name: invite
-- One for each user: a new one takes the place of the old.
INSERT INTO invitations (user_id, digest, expires_at)
VALUES (:user_id, :digest, now() + make_interval(secs => :life_s))
ON CONFLICT (user_id) DO UPDATE
   SET digest = excluded.digest, created_at = now(), expires_at = excluded.expires_at;

-- name: take_invitation
DELETE FROM invitations WHERE digest = :digest RETURNING user_id, expires_at > now();

-- name: user_of_invitation
SELECT user_id FROM invitations WHERE digest = :digest AND expires_at > now();

-- name: drop_invitation
DELETE FROM invitations WHERE user_id = :user_id;
