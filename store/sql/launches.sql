-- name: all_launches
SELECT replica_id, deployment, launcher, home, failures, last_failure, stop_reason, stop_grace_ms,
       CAST(floor(extract(epoch FROM asked_at) * 1000) AS bigint) AS asked_ms,
       CAST(floor(extract(epoch FROM started_at) * 1000) AS bigint) AS started_ms,
       CAST(floor(extract(epoch FROM retry_at) * 1000) AS bigint) AS retry_ms,
       CAST(floor(extract(epoch FROM stop_asked_at) * 1000) AS bigint) AS stop_asked_ms
  FROM launches ORDER BY replica_id;

-- name: any_of
SELECT 1 FROM launches WHERE deployment = :deployment LIMIT 1;

-- name: ask
-- No row when the id is taken.
INSERT INTO launches (replica_id, deployment, launcher, home)
VALUES (:replica_id, :deployment, :launcher, :home)
ON CONFLICT (replica_id) DO NOTHING
RETURNING replica_id;

-- name: started
UPDATE launches SET started_at = clock_timestamp(), retry_at = NULL
 WHERE replica_id = :replica_id;

-- name: adopted
UPDATE launches SET started_at = coalesce(retry_at, asked_at), retry_at = NULL
 WHERE replica_id = :replica_id;

-- name: failed
UPDATE launches
   SET failures = failures + 1, last_failure = :reason, started_at = NULL,
       retry_at = clock_timestamp() + :retry_in_ms * interval '1 millisecond'
 WHERE replica_id = :replica_id;

-- name: settled
UPDATE launches SET failures = 0 WHERE replica_id = :replica_id;

-- name: ask_stop
UPDATE launches
   SET stop_reason = :reason, stop_asked_at = clock_timestamp(), stop_grace_ms = :grace_ms
 WHERE replica_id = :replica_id AND stop_reason = '';

-- name: forget
DELETE FROM launches WHERE replica_id = :replica_id;
