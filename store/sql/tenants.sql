-- name: create_tenant
-- No row when the name is taken.
INSERT INTO tenants (id, name, salt, output_policy, overload_output_tokens, weight, price_book,
                     tier, billed, disabled, version)
VALUES (:id, :name, :salt, :output_policy, :overload_output_tokens, :weight, :price_book,
        :tier, :billed, :disabled, :version)
ON CONFLICT (name) DO NOTHING
RETURNING id;

-- name: tenant_by_id
SELECT * FROM tenant_rows WHERE id = :id;

-- name: tenant_id_by_name
SELECT id FROM tenants WHERE name = :name;

-- name: price_book
SELECT id FROM price_books WHERE id = :book;

-- name: tenants_page
-- In order of name, after :after; :name narrows to one where it is given.
SELECT * FROM tenant_rows
 WHERE name > :after AND (:name = '' OR name = :name)
 ORDER BY name
 LIMIT :limit;

-- name: lock_tenant
SELECT id FROM tenants WHERE id = :id FOR UPDATE;

-- name: update_tenant
UPDATE tenants
   SET output_policy = :output_policy, overload_output_tokens = :overload_output_tokens,
       weight = :weight, price_book = :price_book, tier = :tier, billed = :billed,
       disabled = :disabled, version = :version, updated_at = now()
 WHERE id = :id;

-- name: touch_tenant
UPDATE tenants SET version = :version WHERE id = :id;

-- name: create_key
INSERT INTO api_keys (id, tenant_id, name, public, digest, version)
VALUES (:id, :tenant_id, :name, :public, :digest, :version);

-- name: key_by_digest
-- All that a gateway caches of it, in one round trip.
SELECT to_jsonb(k) AS key,
       to_jsonb(t) || jsonb_build_object(
           'salt', encode(t.salt, 'base64'), 'safety', to_jsonb(s) - 'tenant_id') AS tenant,
       (SELECT jsonb_agg(jsonb_build_object('name', p.name, 'version', p.version, 'rules', p.rules))
          FROM safety_policies p WHERE p.name = s.name AND p.version = s.version) AS policies
  FROM api_keys a
  JOIN key_rows k ON k.id = a.id
  JOIN tenant_rows t ON t.id = k.tenant_id
  LEFT JOIN safety_held s ON s.tenant_id = t.id
 WHERE a.digest = :digest;

-- name: key_by_id
SELECT id, tenant_id, name, public, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM revoked_at) * 1000) AS bigint) AS revoked_ms
  FROM api_keys WHERE id = :id;

-- name: touch_key
UPDATE api_keys SET version = :version WHERE id = :id;

-- name: keys_of_tenant
SELECT id, tenant_id, name, public, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM revoked_at) * 1000) AS bigint) AS revoked_ms
  FROM api_keys
 WHERE tenant_id = :tenant_id AND id > :after
 ORDER BY id
 LIMIT :limit;

-- name: revoke_key
-- Revoking twice keeps the first time.
UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()), version = :version
 WHERE id = :id
RETURNING id, tenant_id, name, public, version,
          CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms,
          CAST(floor(extract(epoch FROM revoked_at) * 1000) AS bigint) AS revoked_ms;

-- name: changed_since
-- By one snapshot: whoever has seen the clock has seen every row up to it. A policy is told once,
-- however many of these tenants have it.
WITH changed_keys AS (
    SELECT * FROM key_rows WHERE version > :since ORDER BY version LIMIT :limit
), changed_tenants AS (
    SELECT * FROM tenant_rows WHERE version > :since ORDER BY version LIMIT :limit
), held AS (
    SELECT * FROM safety_held WHERE tenant_id IN (SELECT id FROM changed_tenants)
)
SELECT (SELECT value FROM change_clock WHERE stream = 'tenancy') AS version,
       (SELECT jsonb_agg(to_jsonb(k) ORDER BY k.version) FROM changed_keys k) AS keys,
       (SELECT jsonb_agg(
           to_jsonb(t) || jsonb_build_object(
               'salt', encode(t.salt, 'base64'), 'safety', to_jsonb(s) - 'tenant_id')
            ORDER BY t.version)
          FROM changed_tenants t LEFT JOIN held s ON s.tenant_id = t.id) AS tenants,
       (SELECT jsonb_agg(jsonb_build_object('name', p.name, 'version', p.version, 'rules', p.rules))
          FROM safety_policies p
         WHERE (p.name, p.version) IN (SELECT name, version FROM held)) AS policies;
