-- name: know_attempts
-- Those that are there are locked too, or they could be forgotten before they are read.
INSERT INTO sign_in_attempts (name)
SELECT unnest(CAST(:names AS text[])) ORDER BY 1
ON CONFLICT (name) DO UPDATE SET name = excluded.name;

-- name: attempts_for_change
-- In one order, so that two never wait for each other.
SELECT name, failures, last_ms, until_ms,
       CAST(floor(extract(epoch FROM clock_timestamp()) * 1000) AS bigint) AS now_ms
  FROM sign_in_attempts
 WHERE name = ANY(:names)
 ORDER BY name
   FOR UPDATE;

-- name: write_attempts
UPDATE sign_in_attempts
   SET failures = :failures, last_ms = :last_ms, until_ms = :until_ms
 WHERE name = :name;

-- name: forget_attempts
DELETE FROM sign_in_attempts
 WHERE name IN (
    SELECT name FROM sign_in_attempts
     WHERE last_ms < floor(extract(epoch FROM now()) * 1000) - :age_ms
     LIMIT :limit
       FOR UPDATE SKIP LOCKED
 );
