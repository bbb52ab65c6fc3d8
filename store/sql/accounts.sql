-- Tenants' accounts in the ledger.

-- name: open_account
INSERT INTO accounts (tenant_id, hard_cap_micro) VALUES (:tenant_id, :hard_cap_micro)
ON CONFLICT (tenant_id) DO NOTHING

-- name: set_hard_cap
UPDATE accounts SET hard_cap_micro = :hard_cap_micro WHERE tenant_id = :tenant_id

-- name: account
SELECT tenant_id, hard_cap_micro, posted_micro, reserved_micro, entries
FROM accounts WHERE tenant_id = :tenant_id
