-- name: record
INSERT INTO audit_log (actor, action, subject, detail)
VALUES (:actor, :action, :subject, :detail);

-- name: audit_page
-- Newest first, before :before; each filter narrows where it is given.
SELECT id, actor, action, subject, detail,
       CAST(floor(extract(epoch FROM at) * 1000) AS bigint) AS at_ms
  FROM audit_log
 WHERE id < :before
   AND (:subject = '' OR subject = :subject)
   AND (:actor = '' OR actor = :actor)
   AND (:action = '' OR action = :action OR starts_with(action, :action || '.'))
   AND at >= to_timestamp(CAST(:from_ms AS bigint) / 1000.0)
   AND at < to_timestamp(CAST(:to_ms AS bigint) / 1000.0)
 ORDER BY id DESC
 LIMIT :limit;
