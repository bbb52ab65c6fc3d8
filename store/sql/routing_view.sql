-- name: served_models
-- Each deployment that a name leads to in this region, under every such name.
SELECT DISTINCT t.model, v.version, d.name AS deployment, m.family, v.context_tokens,
       CAST(floor(extract(epoch FROM v.created_at) * 1000) AS bigint) AS created_ms
  FROM route_targets t
  JOIN deployments d ON d.name = t.deployment
  JOIN model_versions v ON v.version = d.version
  JOIN models m ON m.name = v.model
 WHERE d.region = :region
 ORDER BY t.model, d.name;

-- name: replica_views
-- One that has nothing loaded yet is no replica of which to say that a request never fits it.
SELECT r.deployment, r.replica_id AS replica, r.boot_id, r.url, r.version,
       r.state = 'ready' AND d.desired_state = 'running' AND r.drain_deadline_at IS NULL AS ready,
       r.kv_blocks, r.sequences, r.block_tokens, r.can_resume
  FROM replicas r
  JOIN deployments d ON d.name = r.deployment
 WHERE d.region = :region AND r.version = d.version
   AND r.deployment IN (SELECT deployment FROM route_targets)
   AND (r.kv_blocks > 0 OR r.state NOT IN ('starting', 'loading'))
 ORDER BY r.replica_id;
