-- Tenants' accounts in the ledger: their terms, and what can be read of them.

-- name: open_account
INSERT INTO accounts (tenant_id, hard_cap_micro) VALUES (:tenant_id, :hard_cap_micro)
ON CONFLICT (tenant_id) DO NOTHING

-- name: account
SELECT tenant_id, hard_cap_micro, prepaid, credit_micro, posted_micro, reserved_micro, entries
FROM accounts WHERE tenant_id = :tenant_id

-- name: lock_account
-- As the ledger locks it.
SELECT tenant_id FROM accounts WHERE tenant_id = :tenant_id FOR NO KEY UPDATE

-- name: set_hard_cap
UPDATE accounts SET hard_cap_micro = :hard_cap_micro WHERE tenant_id = :tenant_id

-- name: set_prepaid
UPDATE accounts SET prepaid = :prepaid WHERE tenant_id = :tenant_id

-- name: set_cap
SELECT ledger_set_cap(:tenant_id, :key_id, :period, :soft_micro, :hard_micro)

-- name: remove_cap
SELECT ledger_remove_cap(:tenant_id, :key_id, :period)

-- name: caps
-- A window without a row has counted nothing yet.
SELECT c.key_id, c.period, c.soft_micro, c.hard_micro, c.since, c.starts,
       coalesce(w.posted_micro, 0) AS posted_micro,
       coalesce(w.reserved_micro, 0) AS reserved_micro,
       CAST(floor(extract(epoch FROM w.soft_passed_at) * 1000) AS bigint) AS soft_passed_ms
FROM (
    SELECT *, ledger_window(period, ledger_today()) AS starts
    FROM caps WHERE tenant_id = :tenant_id
) AS c
LEFT JOIN cap_windows AS w
    ON (w.tenant_id, w.key_id, w.period, w.starts) = (c.tenant_id, c.key_id, c.period, c.starts)
ORDER BY c.key_id, array_position(ARRAY['day', 'month', 'total'], c.period)

-- name: take_passed_caps
-- One that the ledger is writing to just now comes the next time.
WITH passed AS (
    SELECT tenant_id, key_id, period, starts
    FROM cap_windows
    WHERE soft_passed_at IS NOT NULL AND NOT announced
    ORDER BY soft_passed_at
    LIMIT :limit
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE cap_windows AS w SET announced = true
FROM passed AS p
LEFT JOIN caps AS c ON (c.tenant_id, c.key_id, c.period) = (p.tenant_id, p.key_id, p.period)
WHERE (w.tenant_id, w.key_id, w.period, w.starts) = (p.tenant_id, p.key_id, p.period, p.starts)
RETURNING w.tenant_id, w.key_id, w.period, w.starts, w.posted_micro, w.reserved_micro,
          c.soft_micro,
          CAST(floor(extract(epoch FROM w.soft_passed_at) * 1000) AS bigint) AS passed_ms

-- name: entries_page
SELECT seq, CAST(floor(extract(epoch FROM at) * 1000) AS bigint) AS at_ms, request_id, kind,
       reserved_delta_micro, posted_delta_micro, credit_delta_micro,
       reserved_micro, posted_micro, credit_micro, adjustment_id, reason, author
FROM entries
WHERE tenant_id = :tenant_id AND seq < :before
ORDER BY seq DESC
LIMIT :limit

-- name: adjustment_recorded
SELECT id FROM audit_log
WHERE subject = :tenant_id AND action LIKE 'account.%' AND detail ->> 'id' = :adjustment_id
