-- name: said
SELECT said -> 'subject' AS subject, said -> 'model' AS model, said -> 'allowance' AS allowance
  FROM limits_said
 WHERE subject = ANY (:subjects) AND id = :id
 ORDER BY said ->> 'subject', said ->> 'model';

-- name: clear_limits
DELETE FROM limits WHERE subject = :subject AND id = :id AND (model = '') = :whole;

-- name: put_limits
INSERT INTO limits (subject, id, model, requests_per_min, input_tokens_per_min,
                    output_tokens_per_min, concurrency, prompt_tokens_max, output_tokens_max,
                    deadline_ms_max)
VALUES (:subject, :id, :model, :requests_per_min, :input_tokens_per_min,
        :output_tokens_per_min, :concurrency, :prompt_tokens_max, :output_tokens_max,
        :deadline_ms_max)
ON CONFLICT (subject, id, model) DO UPDATE
   SET requests_per_min = excluded.requests_per_min,
       input_tokens_per_min = excluded.input_tokens_per_min,
       output_tokens_per_min = excluded.output_tokens_per_min,
       concurrency = excluded.concurrency, prompt_tokens_max = excluded.prompt_tokens_max,
       output_tokens_max = excluded.output_tokens_max,
       deadline_ms_max = excluded.deadline_ms_max;

-- name: unknown_models
-- Of these names, those that no model and nobody's route has.
SELECT name FROM unnest(CAST(:models AS text[])) AS name
 WHERE name NOT IN (SELECT models.name FROM models) AND name NOT IN (SELECT model FROM routes)
 ORDER BY name;

-- name: touch_tier
-- Each its own number, or a reader of a page of them would take the rest for read.
UPDATE tenants t
   SET version = n.version
  FROM (SELECT id, CAST(:last AS bigint) + 1 - row_number() OVER (ORDER BY id DESC) AS version
          FROM tenants WHERE tier = :tier) n
 WHERE t.id = n.id;

-- name: lock_tier
-- Before the clock, as whoever changes one tenant does.
SELECT id FROM tenants WHERE tier = :tier ORDER BY id FOR UPDATE;

-- name: tenants_of_tier
SELECT count(*) FROM tenants WHERE tier = :tier;

-- name: take_numbers
UPDATE change_clock SET value = value + :count WHERE stream = 'tenancy' RETURNING value;
