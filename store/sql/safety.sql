-- name: lock_policy
-- One writer of a policy's versions at a time, also of the first.
SELECT pg_advisory_xact_lock(hashtext('safety_policy:' || CAST(:name AS text)));

-- name: create_policy_version
INSERT INTO safety_policies (name, version, rules, hold_chars)
VALUES (:name, :version, :rules, :hold_chars);

-- name: policy
-- The newest version, or :version where that is not 0.
SELECT name, version, rules, hold_chars,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM safety_policies
 WHERE name = :name AND (:version = 0 OR version = :version)
 ORDER BY version DESC
 LIMIT 1;

-- name: policies_page
-- The newest version of each, in order of name, after :after.
SELECT DISTINCT ON (name) name, version, rules, hold_chars,
       CAST(floor(extract(epoch FROM created_at) * 1000) AS bigint) AS created_ms
  FROM safety_policies
 WHERE name > :after
 ORDER BY name, version DESC
 LIMIT :limit;

-- name: assign_policy
INSERT INTO tenant_safety (tenant_id, policy, version, keep_text)
VALUES (:tenant_id, :policy, :version, :keep_text)
ON CONFLICT (tenant_id) DO UPDATE
   SET policy = excluded.policy, version = excluded.version,
       keep_text = excluded.keep_text, updated_at = now();

-- name: unassign_policy
DELETE FROM tenant_safety WHERE tenant_id = :tenant_id RETURNING tenant_id;

-- name: assignment
SELECT policy, version, keep_text FROM tenant_safety WHERE tenant_id = :tenant_id;

-- name: followers
-- Tenants that have the newest version of a policy, whichever that is.
SELECT tenant_id FROM tenant_safety
 WHERE policy = :policy AND version IS NULL
 ORDER BY tenant_id;

-- name: record_hit
INSERT INTO safety_hits (at, tenant_id, request_id, policy, policy_version, rule, stage, action,
                         choice, chars, text)
VALUES (to_timestamp(:at_ms / 1000.0), :tenant_id, :request_id, :policy, :policy_version, :rule,
        :stage, :action, :choice, :chars, :text);

-- name: hits_page
-- Newest first, before :before; :tenant_id and :request_id narrow where they are given.
SELECT id, tenant_id, request_id, policy, policy_version, rule, stage, action, choice, chars,
       text, CAST(floor(extract(epoch FROM at) * 1000) AS bigint) AS at_ms
  FROM safety_hits
 WHERE id < :before AND (:tenant_id = '' OR tenant_id = :tenant_id)
   AND (:request_id = '' OR request_id = :request_id)
 ORDER BY id DESC
 LIMIT :limit;

-- name: forget_hits
-- By number, which rises with time but for what was late to be recorded: no index of times is
-- needed, and what is young at the head waits for nobody long. Two at once take different rows.
DELETE FROM safety_hits
 WHERE id IN (
     SELECT o.id
       FROM (SELECT id, at FROM safety_hits ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED) o
      WHERE o.at < now() - :kept_days * interval '1 day');
