-- name: next_change
-- The clock's row stays locked until the caller commits, so numbers become visible in order.
UPDATE change_clock SET value = value + 1 WHERE stream = :stream RETURNING value;

-- name: current_change
SELECT value FROM change_clock WHERE stream = :stream;
