-- What the group commit sends. The functions are in migrations/versions/0002_ledger.sql.

-- name: apply
SELECT kind, n, refused, reserved_micro, posted_micro, hard_cap_micro,
       billed_micro, cause, prompt_tokens, cached_tokens, output_tokens
FROM ledger_apply(:tenants, :settles::json, :top_ups::json, :reserves::json, :billing_causes)

-- name: hear
SELECT ledger_hear(
    ARRAY(SELECT i FROM json_populate_recordset(NULL::witness_word, :witnesses::json) AS i))

-- name: recount
SELECT kind, n, refused, reserved_micro, posted_micro, hard_cap_micro,
       billed_micro, cause, prompt_tokens, cached_tokens, output_tokens
FROM ledger_recount(:request_ids, :billing_causes)

-- Which of these accounts nobody holds locked at this moment.
-- name: free_accounts
SELECT tenant_id FROM accounts
WHERE tenant_id = ANY (:tenants) ORDER BY tenant_id FOR NO KEY UPDATE SKIP LOCKED
