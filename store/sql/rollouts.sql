-- Rollouts: where each stands, what moved it, and what is measured of both sides.

-- name: create_rollout
-- No row when the name is taken, or another rollout moves the same public name.
INSERT INTO rollouts (name, tenant_id, model, region, stable, canary, stable_version,
                      canary_version, asked, body, wanted, state, ended, closed, created_by)
VALUES (:name, :tenant, :model, :region, :stable, :canary, :stable_version, :canary_version,
        :asked, :body, :wanted, :state, :ended, :closed, :created_by)
ON CONFLICT DO NOTHING
RETURNING name;

-- name: rollout
SELECT name, tenant_id AS tenant, model, region, stable, canary, stable_version, canary_version,
       asked, body, wanted, state, ended, closed, version, revision, created_by,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM updated_at) * 1000) AS bigint) AS updated_ms
  FROM rollouts WHERE name = :name;

-- name: hold_rollout
-- Nobody else moves it until this transaction ends.
SELECT revision FROM rollouts WHERE name = :name FOR NO KEY UPDATE;

-- name: open_rollouts
SELECT name, tenant_id AS tenant, model, region, stable, canary, stable_version, canary_version,
       asked, body, wanted, state, ended, closed, version, revision, created_by,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM updated_at) * 1000) AS bigint) AS updated_ms
  FROM rollouts WHERE NOT closed ORDER BY created_at, name LIMIT :limit;

-- name: rollouts_page
SELECT name, tenant_id AS tenant, model, region, stable, canary, stable_version, canary_version,
       asked, body, wanted, state, ended, closed, version, revision, created_by,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms,
       CAST(floor(extract(epoch FROM updated_at) * 1000) AS bigint) AS updated_ms
  FROM rollouts
 WHERE name > :after AND (:model = '' OR model = :model)
   AND (:state = '' OR state = :state) AND (NOT :open OR NOT closed)
 ORDER BY name LIMIT :limit;

-- name: keep_rollout
-- No row when somebody else has moved it since.
UPDATE rollouts
   SET body = :body, wanted = :wanted, state = :state, ended = :ended, closed = :closed,
       version = version + CAST(CAST(:moved AS boolean) AS integer), revision = revision + 1,
       updated_at = clock_timestamp()
 WHERE name = :name AND revision = :revision
RETURNING version;

-- name: add_event
INSERT INTO rollout_events
    (rollout, actor, event, before, after, percent, reasons, verdicts, sample)
VALUES (:rollout, :actor, :event, :before, :after, :percent, :reasons, :verdicts, :sample);

-- name: events_page
-- Newest first, before :before.
SELECT id, CAST(floor(extract(epoch FROM at) * 1000) AS bigint) AS at_ms, actor, event, before,
       after, percent, reasons, verdicts, sample
  FROM rollout_events WHERE rollout = :rollout AND id < :before
 ORDER BY id DESC LIMIT :limit;

-- name: moving
-- The one that moves a public name now.
SELECT name FROM rollouts WHERE tenant_id = :tenant AND model = :model AND NOT ended;

-- name: unclosed
-- Whichever of a public name's has something left to do.
SELECT name FROM rollouts
 WHERE tenant_id = :tenant AND model = :model AND NOT closed ORDER BY created_at LIMIT 1;

-- name: ahead
-- An earlier one of the same public name that still has something to do.
SELECT name FROM rollouts
 WHERE tenant_id = :tenant AND model = :model AND NOT closed AND name <> :name
   AND created_at < (SELECT created_at FROM rollouts WHERE name = :name)
 ORDER BY created_at LIMIT 1;

-- name: needing_version
SELECT name FROM rollouts
 WHERE NOT closed AND :version IN (stable_version, canary_version) ORDER BY name LIMIT 1;

-- name: floors
SELECT w.value ->> 'deployment' AS deployment,
       max(CAST(w.value ->> 'replicas' AS integer)) AS replicas
  FROM rollouts r CROSS JOIN LATERAL jsonb_array_elements(r.wanted) AS w
 WHERE NOT r.closed
 GROUP BY 1 ORDER BY 1;

-- name: now_ms
SELECT CAST(floor(extract(epoch FROM clock_timestamp()) * 1000) AS bigint);

-- name: replicas_of
-- A replica that is drained serves nobody who comes new, whatever it says itself.
SELECT r.deployment, r.replica_id AS name, r.version,
       CASE WHEN r.state = 'ready' AND (r.drain_deadline_at IS NOT NULL
                                        OR d.desired_state <> 'running')
            THEN 'draining' ELSE r.state END AS state
  FROM replicas r JOIN deployments d ON d.name = r.deployment
 WHERE r.deployment = ANY (:deployments)
 ORDER BY r.replica_id;

-- Rows of a window are found by their ids, which begin with the region and the millisecond they
-- were made in: no index more for the token path to keep, and no other hour of the month is
-- read. What an id was made for is told by `created_ms`.

-- name: sample
SELECT u.version,
       u.service_class || '/' || CASE WHEN u.prompt_tokens <= 1 THEN 0 ELSE
           ceil(ln(u.prompt_tokens::double precision) / ln(4::double precision) - 1e-9)::integer
           END AS stratum,
       m.kind, m.bucket, CAST(count(*) AS bigint) AS count
  FROM usage AS u
 CROSS JOIN LATERAL (SELECT u.cause IN ('complete', 'length', 'filtered') AS is_whole) AS w
 CROSS JOIN LATERAL (VALUES
       ('cause:' || u.cause, 0),
       ('first_token', rollout_bucket(u.first_token_ms)),
       ('inter_token', rollout_bucket(u.inter_token_ms)),
       ('output_tokens', CASE WHEN w.is_whole THEN
           rollout_bucket(u.metered_output_tokens::double precision) END),
       ('tokens', CASE WHEN w.is_whole THEN
           rollout_bucket((u.prompt_tokens + u.metered_output_tokens)::double precision) END),
       ('cost', CASE WHEN w.is_whole THEN
           rollout_bucket(u.billed_micro::double precision) END)) AS m (kind, bucket)
 WHERE u.month = ANY (:months) AND u.request_id >= :first_id AND u.request_id < :last_id
   AND u.created_ms >= :from_ms AND u.created_ms < :to_ms
   AND u.model = :model AND u.version = ANY (:versions)
   AND (:tenant = '' OR u.tenant_id = :tenant)
   AND m.bucket IS NOT NULL
 GROUP BY 1, 2, 3, 4;

-- name: still_open
SELECT r.version, CAST(count(*) AS bigint) AS count
  FROM reservations AS r
 WHERE r.created_ms >= :from_ms AND r.created_ms < :to_ms
   AND r.model = :model AND r.version = ANY (:versions)
   AND (:tenant = '' OR r.tenant_id = :tenant)
 GROUP BY r.version;

-- name: demand
SELECT CAST((SELECT count(*) FROM usage AS u
              WHERE u.month = ANY (:months) AND u.request_id >= :first_id
                AND u.request_id < :last_id
                AND u.created_ms >= :from_ms AND u.created_ms < :to_ms
                AND u.model = :model AND (:tenant = '' OR u.tenant_id = :tenant))
          + (SELECT count(*) FROM reservations AS r
              WHERE r.created_ms >= :from_ms AND r.created_ms < :to_ms
                AND r.model = :model AND (:tenant = '' OR r.tenant_id = :tenant)) AS bigint);
