-- name: create_provider
-- No row when the name is taken.
INSERT INTO providers (name, dialect, base_url, key_id, nonce, sealed, settings, version)
VALUES (:name, :dialect, :base_url, :key_id, :nonce, :sealed, :settings, :version)
ON CONFLICT (name) DO NOTHING
RETURNING name;

-- name: replace_provider
UPDATE providers
   SET dialect = :dialect, base_url = :base_url, key_id = :key_id, nonce = :nonce,
       sealed = :sealed, settings = :settings, version = :version, updated_at = now()
 WHERE name = :name
RETURNING name;

-- name: delete_provider
DELETE FROM providers WHERE name = :name RETURNING name;

-- name: provider
SELECT name, dialect, base_url, key_id, nonce, sealed, settings, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM providers
 WHERE name = :name;

-- name: providers_page
SELECT name, dialect, base_url, key_id, nonce, sealed, settings, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM providers
 WHERE name > :after
 ORDER BY name
 LIMIT :limit;

-- name: providers_in_view
SELECT name, dialect, base_url, key_id, nonce, sealed, settings, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM providers
 ORDER BY name;
