-- Scaling policies, what scalers remember and decided, and what they see of the fleet.

-- name: lock_policies
-- Two policies that overlap must not pass each other.
SELECT pg_advisory_xact_lock(hashtext('scaling_policies'));

-- name: put_scaling_policy
INSERT INTO scaling_policies AS p (target, deployment, model, body)
VALUES (:target, :deployment, :model, :body)
ON CONFLICT (target) DO UPDATE
   SET body = excluded.body, version = p.version + 1, updated_at = now()
RETURNING version;

-- name: delete_scaling_policy
DELETE FROM scaling_policies WHERE target = :target RETURNING target;

-- name: scaling_policy
SELECT target, body, version,
       CAST(floor(extract(epoch FROM updated_at) * 1000) AS bigint) AS updated_ms
  FROM scaling_policies WHERE target = :target;

-- name: scaling_policies_page
SELECT target, body, version,
       CAST(floor(extract(epoch FROM updated_at) * 1000) AS bigint) AS updated_ms
  FROM scaling_policies WHERE target > :after ORDER BY target LIMIT :limit;

-- name: scaling_policies_of_model
SELECT target, body, version,
       CAST(floor(extract(epoch FROM updated_at) * 1000) AS bigint) AS updated_ms
  FROM scaling_policies WHERE model = :model ORDER BY target;

-- name: governed
-- Each running deployment with the policy that governs it.
SELECT d.name AS deployment, d.version, d.region, d.replicas_desired, d.replicas_warm, p.body, s.state,
       (SELECT count(*) FROM deployments e
         WHERE e.version = d.version AND e.region = d.region AND e.desired_state = 'running')
           AS sharing
  FROM scaling_policies p
  JOIN model_versions v ON v.model = p.model
  JOIN deployments d ON d.version = v.version AND (p.deployment IS NULL OR p.deployment = d.name)
  LEFT JOIN scaling_states s ON s.deployment = d.name
 WHERE d.desired_state = 'running' AND d.name > :after
 ORDER BY d.name
 LIMIT :limit;

-- name: hold_governed
-- What a decision rests on, unchanged until the transaction ends; no row when nothing governs it.
SELECT d.replicas_desired, d.replicas_warm, p.body
  FROM deployments d
  JOIN model_versions v ON v.version = d.version
  JOIN scaling_policies p ON p.model = v.model
       AND (p.deployment IS NULL OR p.deployment = d.name)
 WHERE d.name = :deployment AND d.desired_state = 'running'
   FOR NO KEY UPDATE OF d FOR SHARE OF p;

-- name: governing
-- The target of the policy that governs a deployment.
SELECT p.target
  FROM deployments d
  JOIN model_versions v ON v.version = d.version
  JOIN scaling_policies p ON p.model = v.model
       AND (p.deployment IS NULL OR p.deployment = d.name)
 WHERE d.name = :deployment;

-- name: governable
-- The running deployments of a model, or one of them, whatever governs them.
SELECT d.name AS deployment, d.version, d.region, d.replicas_desired, d.replicas_warm, s.state,
       CAST(NULL AS jsonb) AS body,
       (SELECT count(*) FROM deployments e
         WHERE e.version = d.version AND e.region = d.region AND e.desired_state = 'running')
           AS sharing
  FROM deployments d
  JOIN model_versions v ON v.version = d.version AND v.model = :model
  LEFT JOIN scaling_states s ON s.deployment = d.name
 WHERE d.desired_state = 'running' AND (:deployment = '' OR d.name = :deployment)
 ORDER BY d.name
 LIMIT :limit;

-- name: scaling_now
-- One clock for all control planes: the server's.
SELECT CAST(floor(extract(epoch FROM clock_timestamp()) * 1000) AS bigint);

-- name: scaling_replicas
-- A launch that no replica has told of yet is one that comes, since its last start. A boot that
-- was ready before and wakes is not late, whenever it began.
SELECT coalesce(r.replica_id, l.replica_id) AS replica,
       CASE WHEN l.stop_reason <> '' OR r.drain_reason <> '' THEN 'draining'
            ELSE coalesce(r.state, 'starting') END AS state,
       CAST(CASE WHEN r.ready_at IS NOT NULL THEN 0
                 ELSE floor(extract(epoch FROM clock_timestamp()
                     - coalesce(r.started_at, r.registered_at, l.started_at, l.retry_at,
                                l.asked_at)) * 1000) END AS bigint)
           AS coming_ms,
       CAST(floor(extract(epoch FROM clock_timestamp() - r.last_beat_at) * 1000) AS bigint)
           AS silent_ms,
       r.kv_blocks, r.kv_blocks_free, r.running, r.sequences
  FROM (SELECT * FROM replicas
         WHERE deployment = :deployment AND state NOT IN ('stopped', 'lost')) r
  FULL JOIN (SELECT * FROM launches WHERE deployment = :deployment) l
    ON l.replica_id = r.replica_id
 ORDER BY 1;

-- name: cold_starts
-- The middle one of the last eight of this version.
SELECT CAST(percentile_disc(0.5) WITHIN GROUP (ORDER BY s.took_ms) AS bigint) AS took_ms,
       CAST(floor(extract(epoch FROM clock_timestamp() - max(s.ready_at)) * 1000) AS bigint)
           AS age_ms
  FROM (SELECT r.ready_at, extract(epoch FROM r.ready_at - r.started_at) * 1000 AS took_ms
          FROM replicas r
         WHERE r.version = :version AND r.ready_at IS NOT NULL AND r.started_at IS NOT NULL
         ORDER BY r.ready_at DESC
         LIMIT 8) s;

-- name: traffic
-- Requests of a version in a region since :long_ms, found by their ids, which begin with their
-- time. What is open has no tokens but its prompt's; the window is from :since_ms on.
WITH ended AS (
    SELECT u.created_ms, u.ended_ms, u.metered_prompt_tokens AS prompt,
           u.metered_prompt_tokens - u.metered_cached_tokens AS uncached,
           u.metered_output_tokens AS output, u.first_token_ms
      FROM usage u
     WHERE u.request_id >= :first_id AND u.request_id < :last_id AND u.created_ms >= :long_ms
       AND u.version = :version AND u.region = :region
), begun AS (
    SELECT r.created_ms, r.prompt_tokens FROM reservations r
     WHERE r.request_id >= :window_id AND r.request_id < :last_id AND r.created_ms >= :since_ms
       AND r.version = :version AND r.region = :region
)
SELECT (SELECT count(*) FROM begun)
           + count(*) FILTER (WHERE e.created_ms >= :since_ms) AS arrived,
       CAST((SELECT coalesce(sum(b.prompt_tokens), 0) FROM begun b)
           + coalesce(sum(e.prompt) FILTER (WHERE e.created_ms >= :since_ms), 0) AS bigint)
           AS arrived_prompt,
       count(*) AS ended,
       CAST(coalesce(sum(e.prompt), 0) AS bigint) AS prompt,
       CAST(coalesce(sum(e.uncached), 0) AS bigint) AS uncached,
       CAST(coalesce(sum(e.output), 0) AS bigint) AS output,
       CAST(coalesce(sum(e.uncached) FILTER (WHERE e.ended_ms >= :since_ms), 0) AS bigint)
           AS served_uncached,
       CAST(coalesce(sum(e.output) FILTER (WHERE e.ended_ms >= :since_ms), 0) AS bigint)
           AS served_output,
       percentile_disc(0.95) WITHIN GROUP (ORDER BY e.first_token_ms)
           FILTER (WHERE e.ended_ms >= :since_ms) AS ttft_ms
  FROM ended e;

-- name: keep_scaling_state
INSERT INTO scaling_states AS s (deployment, state, decision)
VALUES (:deployment, :state, :decision)
ON CONFLICT (deployment) DO UPDATE
   SET state = excluded.state, decision = excluded.decision, decided_at = now(),
       told_at = CASE WHEN :told THEN now() ELSE s.told_at END;

-- name: scaling_said
-- The last word on a deployment, and how long ago one was put among the decisions.
SELECT decision,
       CAST(floor(extract(epoch FROM now() - told_at) * 1000) AS bigint) AS told_ms_ago
  FROM scaling_states WHERE deployment = :deployment FOR UPDATE;

-- name: tell_scaling_decision
INSERT INTO scaling_decisions (deployment, before, desired, wake, start, stop, reasons, alarms)
VALUES (:deployment, :before, :desired, :wake, :start, :stop, :reasons, :alarms);

-- name: scaling_decisions_page
-- Newest first, before :before; of all deployments, or of one.
SELECT id, deployment, before, desired, wake, start, stop, reasons, alarms,
       CAST(floor(extract(epoch FROM at) * 1000) AS bigint) AS at_ms
  FROM scaling_decisions
 WHERE id < :before AND (:deployment = '' OR deployment = :deployment)
 ORDER BY id DESC
 LIMIT :limit;

-- name: forget_scaling_decisions
-- Those that are too old among the :limit oldest, which are found by the primary key.
DELETE FROM scaling_decisions WHERE id IN (
    SELECT o.id FROM (SELECT id, at FROM scaling_decisions ORDER BY id LIMIT :limit) o
     WHERE o.at < now() - :kept_ms * interval '1 millisecond');

-- name: cut_scaling_decisions
-- All of a deployment but its newest :kept_max, at most :limit at once.
DELETE FROM scaling_decisions WHERE id IN (
    SELECT id FROM scaling_decisions
     WHERE deployment = :deployment
       AND id <= (SELECT id FROM scaling_decisions WHERE deployment = :deployment
                   ORDER BY id DESC LIMIT 1 OFFSET :kept_max)
     ORDER BY id LIMIT :limit);
