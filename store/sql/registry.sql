-- name: create_model
INSERT INTO models (name, family) VALUES (:name, :family) ON CONFLICT (name) DO NOTHING;

-- name: model_family
SELECT family FROM models WHERE name = :name;

-- name: create_version
-- No row when this content is registered already.
INSERT INTO model_versions (version, model, context_tokens, manifest, state)
VALUES (:version, :model, :context_tokens, :manifest, :state)
ON CONFLICT (version) DO NOTHING
RETURNING version;

-- name: model_version
SELECT v.version, v.model, m.family, v.context_tokens, v.state, v.manifest,
       CAST(floor(extract(epoch FROM v.created_at) * 1000) AS bigint) AS created_ms
  FROM model_versions v JOIN models m ON m.name = v.model
 WHERE v.version = :version;

-- name: model_versions_page
SELECT v.version, v.model, m.family, v.context_tokens, v.state, v.manifest,
       CAST(floor(extract(epoch FROM v.created_at) * 1000) AS bigint) AS created_ms
  FROM model_versions v JOIN models m ON m.name = v.model
 WHERE v.version > :after AND (:model = '' OR v.model = :model)
 ORDER BY v.version
 LIMIT :limit;

-- name: set_version_state
UPDATE model_versions SET state = :state WHERE version = :version RETURNING version;

-- name: version_in_use
SELECT 1 FROM route_targets t JOIN deployments d ON d.name = t.deployment
 WHERE d.version = :version LIMIT 1;

-- name: provider_in_use
SELECT 1 FROM route_targets WHERE provider = :provider LIMIT 1;

-- name: create_deployment
-- No row when the name is taken.
INSERT INTO deployments (name, version, region) VALUES (:name, :version, :region)
ON CONFLICT (name) DO NOTHING
RETURNING name;

-- name: deployment
SELECT name, version, region, desired_state, replicas_desired, replicas_warm, launcher, spec,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM deployments WHERE name = :name;

-- name: deployments_page
SELECT name, version, region, desired_state, replicas_desired, replicas_warm, launcher, spec,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM deployments WHERE name > :after ORDER BY name LIMIT :limit;

-- name: set_desired_state
UPDATE deployments SET desired_state = :desired_state WHERE name = :name RETURNING name;

-- name: hold_deployment
-- Nobody else changes it until this transaction ends.
SELECT name FROM deployments WHERE name = :name FOR NO KEY UPDATE;

-- name: set_replicas_desired
UPDATE deployments SET replicas_desired = :replicas_desired WHERE name = :name RETURNING name;

-- name: set_replicas_warm
UPDATE deployments SET replicas_warm = :replicas_warm WHERE name = :name;

-- name: set_launching
UPDATE deployments SET launcher = :launcher, spec = :spec WHERE name = :name;

-- name: put_route
INSERT INTO routes (tenant_id, model, alias, targets, fallbacks, max_output_tokens, version)
VALUES (:tenant, :model, :alias, :targets, :fallbacks, :max_output_tokens, :version)
ON CONFLICT (tenant_id, model) DO UPDATE
   SET alias = excluded.alias, targets = excluded.targets, fallbacks = excluded.fallbacks,
       max_output_tokens = excluded.max_output_tokens, version = excluded.version,
       updated_at = now();

-- name: clear_route_targets
DELETE FROM route_targets WHERE tenant_id = :tenant AND model = :model;

-- name: add_route_targets
INSERT INTO route_targets (tenant_id, model, path, deployment, provider)
SELECT :tenant, :model, t.path, nullif(t.deployment, ''), nullif(t.provider, '')
  FROM unnest(CAST(:paths AS text[]), CAST(:deployments AS text[]), CAST(:providers AS text[]))
       AS t (path, deployment, provider);

-- name: delete_route
DELETE FROM routes WHERE tenant_id = :tenant AND model = :model RETURNING model;

-- name: route
SELECT model, tenant_id AS tenant, alias, targets, fallbacks, max_output_tokens, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM routes WHERE tenant_id = :tenant AND model = :model;

-- name: routes_page
SELECT model, tenant_id AS tenant, alias, targets, fallbacks, max_output_tokens, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM routes WHERE tenant_id = :tenant AND model > :after ORDER BY model LIMIT :limit;

-- name: all_routes
SELECT model, tenant_id AS tenant, alias, targets, fallbacks, max_output_tokens, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM routes ORDER BY tenant_id, model;

-- name: put_access
INSERT INTO model_access (tenant_id, key_id, models) VALUES (:tenant, :key, :models)
ON CONFLICT (tenant_id, key_id) DO UPDATE SET models = excluded.models, updated_at = now();

-- name: delete_access
DELETE FROM model_access WHERE tenant_id = :tenant AND key_id = :key RETURNING key_id;

-- name: access
SELECT key_id AS key, models FROM model_access WHERE tenant_id = :tenant ORDER BY key_id;
