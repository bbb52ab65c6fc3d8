-- name: create_tenant
-- No row when the name is taken.
INSERT INTO tenants (id, name, salt, output_policy, overload_output_tokens, weight, price_book,
                     tier, billed, disabled, version)
VALUES (:id, :name, :salt, :output_policy, :overload_output_tokens, :weight, :price_book,
        :tier, :billed, :disabled, :version)
ON CONFLICT (name) DO NOTHING
RETURNING id;

-- name: tenant_by_id
SELECT t.id, t.name, t.salt, t.output_policy, t.overload_output_tokens, t.weight, t.price_book, t.tier, t.billed,
       t.disabled, t.version, a.hard_cap_micro,
       (SELECT jsonb_agg(l.said) FROM limits_said l
         WHERE (l.subject, l.id) IN (('tenant', t.id), ('tier', t.tier), ('tier_key', t.tier))
       ) AS said,
       a.hard_cap_micro IS NOT NULL OR a.prepaid OR EXISTS (
           SELECT FROM caps c
            WHERE c.tenant_id = t.id AND c.key_id = '' AND c.hard_micro IS NOT NULL
       ) AS hard_capped,
       (SELECT m.models FROM model_access m WHERE m.tenant_id = t.id AND m.key_id = '') AS models
  FROM tenants t JOIN accounts a ON a.tenant_id = t.id
 WHERE t.id = :id;

-- name: tenant_id_by_name
SELECT id FROM tenants WHERE name = :name;

-- name: price_book
SELECT id FROM price_books WHERE id = :book;

-- name: tenants_page
-- In order of name, after :after; :name narrows to one where it is given.
SELECT t.id, t.name, t.salt, t.output_policy, t.overload_output_tokens, t.weight, t.price_book, t.tier, t.billed,
       t.disabled, t.version, a.hard_cap_micro,
       (SELECT jsonb_agg(l.said) FROM limits_said l
         WHERE (l.subject, l.id) IN (('tenant', t.id), ('tier', t.tier), ('tier_key', t.tier))
       ) AS said,
       a.hard_cap_micro IS NOT NULL OR a.prepaid OR EXISTS (
           SELECT FROM caps c
            WHERE c.tenant_id = t.id AND c.key_id = '' AND c.hard_micro IS NOT NULL
       ) AS hard_capped,
       (SELECT m.models FROM model_access m WHERE m.tenant_id = t.id AND m.key_id = '') AS models
  FROM tenants t JOIN accounts a ON a.tenant_id = t.id
 WHERE t.name > :after AND (:name = '' OR t.name = :name)
 ORDER BY t.name
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

-- name: tenants_changed_since
SELECT t.id, t.name, t.salt, t.output_policy, t.overload_output_tokens, t.weight, t.price_book, t.tier, t.billed,
       t.disabled, t.version, a.hard_cap_micro,
       (SELECT jsonb_agg(l.said) FROM limits_said l
         WHERE (l.subject, l.id) IN (('tenant', t.id), ('tier', t.tier), ('tier_key', t.tier))
       ) AS said,
       a.hard_cap_micro IS NOT NULL OR a.prepaid OR EXISTS (
           SELECT FROM caps c
            WHERE c.tenant_id = t.id AND c.key_id = '' AND c.hard_micro IS NOT NULL
       ) AS hard_capped,
       (SELECT m.models FROM model_access m WHERE m.tenant_id = t.id AND m.key_id = '') AS models
  FROM tenants t JOIN accounts a ON a.tenant_id = t.id
 WHERE t.version > :since
 ORDER BY t.version
 LIMIT :limit;

-- name: create_key
INSERT INTO api_keys (id, tenant_id, name, public, digest, version)
VALUES (:id, :tenant_id, :name, :public, :digest, :version);

-- name: key_by_digest
SELECT k.id, k.tenant_id, k.name, k.revoked_at IS NOT NULL AS revoked, k.version,
       (SELECT jsonb_agg(l.said) FROM limits_said l
         WHERE l.subject = 'key' AND l.id = k.id) AS said,
       EXISTS (
           SELECT FROM caps c
            WHERE c.tenant_id = k.tenant_id AND c.key_id = k.id AND c.hard_micro IS NOT NULL
       ) AS hard_capped,
       (SELECT m.models FROM model_access m
         WHERE m.tenant_id = k.tenant_id AND m.key_id = k.id) AS models
  FROM api_keys k WHERE k.digest = :digest;

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

-- name: keys_changed_since
SELECT k.id, k.tenant_id, k.name, k.revoked_at IS NOT NULL AS revoked, k.version,
       (SELECT jsonb_agg(l.said) FROM limits_said l
         WHERE l.subject = 'key' AND l.id = k.id) AS said,
       EXISTS (
           SELECT FROM caps c
            WHERE c.tenant_id = k.tenant_id AND c.key_id = k.id AND c.hard_micro IS NOT NULL
       ) AS hard_capped,
       (SELECT m.models FROM model_access m
         WHERE m.tenant_id = k.tenant_id AND m.key_id = k.id) AS models
  FROM api_keys k
 WHERE k.version > :since
 ORDER BY k.version
 LIMIT :limit;
