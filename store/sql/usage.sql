-- Usage rows, as people and their tools read them. Only the ledger writes them.

-- name: usage_of
SELECT * FROM usage WHERE request_id = :request_id

-- A page of a tenant's requests, newest first, after the row (before_ms, before_id).
-- name: usage_page
SELECT * FROM usage
WHERE tenant_id = :tenant_id AND (created_ms, request_id) < (:before_ms, :before_id)
ORDER BY created_ms DESC, request_id DESC LIMIT :limit

-- The same over every tenant.
-- name: usage_page_of_all
SELECT * FROM usage
WHERE (created_ms, request_id) < (:before_ms, :before_id)
ORDER BY created_ms DESC, request_id DESC LIMIT :limit
