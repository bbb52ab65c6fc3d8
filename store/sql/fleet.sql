-- name: replica_boot
-- What a message is judged against; locked, so that two lives cannot pass each other.
SELECT boot_id, state, beat_seq FROM replicas WHERE replica_id = :replica_id FOR UPDATE;

-- name: drain_now
SELECT d.desired_state, r.drain_reason AS reason,
       CASE WHEN r.drain_deadline_at IS NOT NULL THEN  -- greatest passes over a null
           CAST(greatest(0, ceil(extract(epoch FROM r.drain_deadline_at - clock_timestamp())
                                 * 1000)) AS bigint) END AS left_ms
  FROM replicas r JOIN deployments d ON d.name = r.deployment
 WHERE r.replica_id = :replica_id;

-- name: begin_drain
-- The first reason stays, and the earlier deadline.
UPDATE replicas
   SET drain_reason = CASE WHEN drain_reason = '' THEN :reason ELSE drain_reason END,
       drain_deadline_at = least(drain_deadline_at,
                                 clock_timestamp() + :within_ms * interval '1 millisecond')
 WHERE replica_id = :replica_id AND state NOT IN ('stopped', 'lost')
RETURNING replica_id;

-- name: undo_drain
UPDATE replicas SET drain_reason = '', drain_deadline_at = NULL
 WHERE replica_id = :replica_id AND drain_reason <> '' AND state NOT IN ('draining', 'stopped')
RETURNING replica_id;

-- name: undo_drains
UPDATE replicas SET drain_reason = '', drain_deadline_at = NULL
 WHERE deployment = :deployment AND drain_reason = :reason
   AND state NOT IN ('draining', 'stopped');

-- name: boot_position
SELECT acked FROM journal_positions WHERE boot_id = :boot_id;

-- name: put_replica
INSERT INTO replicas (replica_id, boot_id, url, deployment, region, version, backend, can_resume,
                      state, kv_blocks, block_tokens, context_tokens, sequences, kv_blocks_free,
                      last_beat_at, registered_at, progress_at, started_at, ready_at)
VALUES (:replica_id, :boot_id, :url, :deployment, :region, :version, :backend, :can_resume,
        :state, :kv_blocks, :block_tokens, :context_tokens, :sequences, :kv_blocks,
        clock_timestamp(), clock_timestamp(), clock_timestamp(),
        clock_timestamp() - :age_ms * interval '1 millisecond',
        CASE WHEN :state = 'ready' THEN clock_timestamp() END)
ON CONFLICT (replica_id) DO UPDATE
   SET boot_id = excluded.boot_id, url = excluded.url, deployment = excluded.deployment,
       region = excluded.region, version = excluded.version, backend = excluded.backend,
       can_resume = excluded.can_resume, state = excluded.state, kv_blocks = excluded.kv_blocks,
       block_tokens = excluded.block_tokens, context_tokens = excluded.context_tokens,
       sequences = excluded.sequences, kv_blocks_free = excluded.kv_blocks_free,
       last_beat_at = excluded.last_beat_at, registered_at = excluded.registered_at,
       beat_seq = CASE WHEN replicas.boot_id = excluded.boot_id THEN replicas.beat_seq ELSE 0 END,
       running = 0, waiting = 0,
       steps = CASE WHEN replicas.boot_id = excluded.boot_id THEN replicas.steps ELSE 0 END,
       progress_at = excluded.progress_at,
       -- What is said of one life is forgotten with it: a drain too.
       started_at = CASE WHEN replicas.boot_id = excluded.boot_id THEN replicas.started_at
                         ELSE excluded.started_at END,
       ready_at = CASE WHEN replicas.boot_id = excluded.boot_id
                       THEN coalesce(replicas.ready_at, excluded.ready_at)
                       ELSE excluded.ready_at END,
       drain_reason = CASE WHEN replicas.boot_id = excluded.boot_id
                           THEN replicas.drain_reason ELSE '' END,
       drain_deadline_at = CASE WHEN replicas.boot_id = excluded.boot_id
                                THEN replicas.drain_deadline_at END;

-- name: know_boot
INSERT INTO journal_positions (boot_id, replica_id) VALUES (:boot_id, :replica_id)
ON CONFLICT (boot_id) DO NOTHING;

-- name: take_beat
UPDATE replicas
   SET state = :state, beat_seq = :seq, last_beat_at = clock_timestamp(),
       kv_blocks_free = :kv_blocks_free, running = :running, waiting = :waiting, steps = :steps,
       progress_at = CASE WHEN :steps > steps OR :running + :waiting = 0 OR :state <> 'ready'
                          THEN clock_timestamp() ELSE progress_at END,
       ready_at = CASE WHEN :state = 'ready' THEN coalesce(ready_at, clock_timestamp())
                       ELSE ready_at END,
       drain_reason = CASE WHEN CAST(:drain_ms AS bigint) IS NOT NULL AND drain_reason = ''
                           THEN :drain_reason ELSE drain_reason END,
       drain_deadline_at = least(
           drain_deadline_at,
           clock_timestamp() + CAST(:drain_ms AS bigint) * interval '1 millisecond')
 WHERE replica_id = :replica_id;

-- name: advance_journal
-- Positions only rise, whatever order messages come in.
INSERT INTO journal_positions (boot_id, replica_id, acked) VALUES (:boot_id, :replica_id, :acked)
ON CONFLICT (boot_id) DO UPDATE
   SET acked = greatest(journal_positions.acked, excluded.acked), updated_at = now()
RETURNING acked;

-- name: silent_replicas
SELECT replica_id, boot_id, url
  FROM replicas
 WHERE state NOT IN ('stopped', 'lost')
   AND last_beat_at < clock_timestamp() - :silent_ms * interval '1 millisecond'
 ORDER BY last_beat_at
 LIMIT :limit;

-- name: mark_lost
-- Only if it is still the life we asked about, and still silent.
UPDATE replicas SET state = 'lost'
 WHERE replica_id = :replica_id AND boot_id = :boot_id AND state NOT IN ('stopped', 'lost')
   AND last_beat_at < clock_timestamp() - :silent_ms * interval '1 millisecond'
RETURNING replica_id;

-- name: now_ms
SELECT CAST(floor(extract(epoch FROM clock_timestamp()) * 1000) AS bigint);

-- name: forget_replicas
DELETE FROM replicas
 WHERE state IN ('stopped', 'lost')
   AND last_beat_at < clock_timestamp() - :kept_ms * interval '1 millisecond';

-- name: forget_boots
-- A boot is remembered so that its late messages are known for old; a month is late enough.
DELETE FROM journal_positions p
 WHERE p.updated_at < now() - interval '30 days'
   AND NOT EXISTS (SELECT 1 FROM replicas r WHERE r.boot_id = p.boot_id);

-- name: replica
SELECT r.replica_id, r.boot_id, r.url, r.deployment, r.region, r.version, r.backend, r.can_resume,
       r.state, r.kv_blocks, r.block_tokens, r.context_tokens, r.sequences, r.beat_seq,
       r.kv_blocks_free, r.running, r.waiting, r.steps, coalesce(p.acked, 0) AS journal_acked,
       CAST(floor(extract(epoch FROM clock_timestamp() - r.last_beat_at) * 1000) AS bigint)
           AS silent_ms,
       CAST(floor(extract(epoch FROM r.started_at) * 1000) AS bigint) AS started_ms,
       CAST(floor(extract(epoch FROM r.ready_at) * 1000) AS bigint) AS ready_ms,
       CAST(floor(extract(epoch FROM r.drain_deadline_at) * 1000) AS bigint) AS drain_deadline_ms,
       r.drain_reason,
       CAST(floor(extract(epoch FROM r.last_beat_at - least(r.progress_at, r.last_beat_at)) * 1000)
            AS bigint) AS stalled_ms
  FROM replicas r LEFT JOIN journal_positions p ON p.boot_id = r.boot_id
 WHERE r.replica_id = :replica_id;

-- name: replicas_page
-- `stalled_ms` is between beats: silence is not told for a stall.
SELECT r.replica_id, r.boot_id, r.url, r.deployment, r.region, r.version, r.backend, r.can_resume,
       r.state, r.kv_blocks, r.block_tokens, r.context_tokens, r.sequences, r.beat_seq,
       r.kv_blocks_free, r.running, r.waiting, r.steps, coalesce(p.acked, 0) AS journal_acked,
       CAST(floor(extract(epoch FROM clock_timestamp() - r.last_beat_at) * 1000) AS bigint)
           AS silent_ms,
       CAST(floor(extract(epoch FROM r.started_at) * 1000) AS bigint) AS started_ms,
       CAST(floor(extract(epoch FROM r.ready_at) * 1000) AS bigint) AS ready_ms,
       CAST(floor(extract(epoch FROM r.drain_deadline_at) * 1000) AS bigint) AS drain_deadline_ms,
       r.drain_reason,
       CAST(floor(extract(epoch FROM r.last_beat_at - least(r.progress_at, r.last_beat_at)) * 1000)
            AS bigint) AS stalled_ms
  FROM replicas r LEFT JOIN journal_positions p ON p.boot_id = r.boot_id
 WHERE r.replica_id > :after AND (:deployment = '' OR r.deployment = :deployment)
 ORDER BY r.replica_id
 LIMIT :limit;
