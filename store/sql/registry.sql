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
SELECT 1 FROM routes r JOIN deployments d ON d.name = r.deployment
 WHERE d.version = :version LIMIT 1;

-- name: create_deployment
-- No row when the name is taken.
INSERT INTO deployments (name, version, region) VALUES (:name, :version, :region)
ON CONFLICT (name) DO NOTHING
RETURNING name;

-- name: deployment
SELECT name, version, region, desired_state,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM deployments WHERE name = :name;

-- name: deployments_page
SELECT name, version, region, desired_state,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM deployments WHERE name > :after ORDER BY name LIMIT :limit;

-- name: set_desired_state
UPDATE deployments SET desired_state = :desired_state WHERE name = :name RETURNING name;

-- name: put_route
INSERT INTO routes (model, deployment, max_output_tokens, version)
VALUES (:model, :deployment, :max_output_tokens, :version)
ON CONFLICT (model) DO UPDATE
   SET deployment = excluded.deployment, max_output_tokens = excluded.max_output_tokens,
       version = excluded.version, updated_at = now();

-- name: delete_route
DELETE FROM routes WHERE model = :model RETURNING model;

-- name: routes_page
SELECT model, deployment, max_output_tokens, version,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM routes WHERE model > :after ORDER BY model LIMIT :limit;
