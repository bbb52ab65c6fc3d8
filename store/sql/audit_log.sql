-- name: record
INSERT INTO audit_log (actor, action, subject, detail)
VALUES (:actor, :action, :subject, :detail);

-- name: audit_page
-- Newest first, before :before; :subject narrows where it is given.
SELECT id, actor, action, subject, detail,
       CAST(floor(extract(epoch FROM at) * 1000) AS bigint) AS at_ms
  FROM audit_log
 WHERE id < :before AND (:subject = '' OR subject = :subject)
 ORDER BY id DESC
 LIMIT :limit;
