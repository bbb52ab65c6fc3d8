-- Differences between records of one thing, as the reconciler has found them.

-- The last of each kind and subject that is open, or that a person closed.
-- name: known
SELECT DISTINCT ON (kind, subject) id, kind, subject, measure, resolved_at IS NULL AS is_open
FROM differences
WHERE kind = ANY (:kinds) AND (resolved_at IS NULL OR resolution = 'closed')
  AND (subject = ANY (:subjects) OR (:all_open AND resolved_at IS NULL))
ORDER BY kind, subject, id DESC

-- name: notice
INSERT INTO differences (kind, subject, detail, measure)
SELECT * FROM unnest(CAST(:kinds AS text[]), CAST(:subjects AS text[]), CAST(:details AS text[]),
                     CAST(:measures AS bigint[]))

-- One that has grown is told again.
-- name: grow
UPDATE differences AS d SET measure = g.measure, detail = g.detail, raised_at = NULL
FROM unnest(CAST(:ids AS bigint[]), CAST(:details AS text[]), CAST(:measures AS bigint[]))
     AS g (id, detail, measure)
WHERE d.id = g.id

-- Those that are told now: all that were noticed, but that a spool is given time to drain.
-- name: raise
UPDATE differences SET raised_at = now()
WHERE resolved_at IS NULL AND raised_at IS NULL
  AND (kind <> 'spool' OR noticed_at <= now() - :patience_ms * interval '1 millisecond')
RETURNING kind, subject, detail

-- name: drop_unraised
DELETE FROM differences WHERE id = ANY (:ids) AND raised_at IS NULL

-- name: resolve
UPDATE differences SET resolved_at = now(), resolution = :resolution
WHERE id = ANY (:ids) AND resolved_at IS NULL
RETURNING kind, subject, detail

-- Open ones not looked at lately; those never looked at again come first.
-- name: to_revisit
SELECT id, kind, subject, measure, true AS is_open
FROM differences
WHERE resolved_at IS NULL AND kind = ANY (:kinds)
  AND (looked_at IS NULL OR looked_at <= now() - :pause_ms * interval '1 millisecond')
ORDER BY looked_at NULLS FIRST, id LIMIT :limit

-- name: revisited
UPDATE differences SET looked_at = now() WHERE id = ANY (:ids)

-- name: open_by_kind
SELECT kind, count(*) FROM differences
WHERE resolved_at IS NULL AND raised_at IS NOT NULL GROUP BY kind

-- name: page
SELECT id, kind, subject, detail, measure, resolution, note,
       floor(extract(epoch FROM noticed_at) * 1000)::bigint AS noticed_ms,
       floor(extract(epoch FROM raised_at) * 1000)::bigint AS raised_ms,
       floor(extract(epoch FROM resolved_at) * 1000)::bigint AS resolved_ms
FROM differences
WHERE id < :before AND raised_at IS NOT NULL AND (:kind = '' OR kind = :kind)
  AND (NOT :is_open OR resolved_at IS NULL)
ORDER BY id DESC LIMIT :limit

-- name: close
UPDATE differences SET resolved_at = now(), resolution = 'closed', note = :note
WHERE id = :id AND resolved_at IS NULL
RETURNING kind, subject

-- All that are open of a kind, up to the newest that was seen.
-- name: close_kind
UPDATE differences SET resolved_at = now(), resolution = 'closed', note = :note
WHERE id IN (SELECT id FROM differences
             WHERE resolved_at IS NULL AND raised_at IS NOT NULL AND kind = :kind AND id <= :upto
             ORDER BY id LIMIT :limit)

-- name: forget
DELETE FROM differences
WHERE id IN (SELECT id FROM differences
             WHERE resolved_at < now() - :kept_ms * interval '1 millisecond'
             ORDER BY resolved_at LIMIT :limit)
