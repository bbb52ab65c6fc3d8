-- What the group commit sends. The functions are in migrations/versions/0004_accounts.sql.

-- name: apply
SELECT kind, n, refused, limit_name, reserved_micro, posted_micro, hard_cap_micro, fits_micro,
       billed_micro, cause, prompt_tokens, cached_tokens, output_tokens, cache_write_5m_tokens,
       cache_write_1h_tokens, reasoning_tokens
FROM ledger_apply(:tenants, :settles::json, :top_ups::json, :reserves::json, :billing_causes)

-- The same where somebody speaks of an idempotency key: the functions are in 0010_idempotency.sql.
-- name: apply_keyed
SELECT kind, n, refused, limit_name, reserved_micro, posted_micro, hard_cap_micro, fits_micro,
       billed_micro, cause, prompt_tokens, cached_tokens, output_tokens, cache_write_5m_tokens,
       cache_write_1h_tokens, reasoning_tokens
FROM ledger_apply_keyed(
    :tenants, :settles::json, :top_ups::json, :reserves::json, :billing_causes)

-- name: hear
SELECT ledger_hear(
    ARRAY(SELECT i FROM json_populate_recordset(NULL::witness_word, :witnesses::json) AS i))

-- Checkpoints: each is made up for by the next, so losing the last few in a crash is harmless.
-- name: hear_softly
SELECT set_config('synchronous_commit', 'off', true), ledger_hear(
    ARRAY(SELECT i FROM json_populate_recordset(NULL::witness_word, :witnesses::json) AS i))

-- name: recount
SELECT kind, n, refused, limit_name, reserved_micro, posted_micro, hard_cap_micro, fits_micro,
       billed_micro, cause, prompt_tokens, cached_tokens, output_tokens, cache_write_5m_tokens,
       cache_write_1h_tokens, reasoning_tokens
FROM ledger_recount(:request_ids, :billing_causes)

-- name: adjust
SELECT (a.answer).refused, (a.answer).limit_name, (a.answer).reserved_micro,
       (a.answer).posted_micro AS limit_posted_micro, (a.answer).hard_cap_micro,
       (a.answer).fits_micro, a.entry, a.delta_micro, a.posted_micro, a.credit_micro
FROM ledger_adjust(json_populate_record(NULL::adjust_command, :word::json), :billing_causes) AS a

-- Which of these accounts nobody holds locked at this moment.
-- name: free_accounts
SELECT tenant_id FROM accounts
WHERE tenant_id = ANY (:tenants) ORDER BY tenant_id FOR NO KEY UPDATE SKIP LOCKED

-- Whose requests these are, as far as they are known.
-- name: whose
SELECT i.request_id, coalesce(r.tenant_id, u.tenant_id)
FROM unnest(CAST(:request_ids AS text[])) AS i (request_id)
LEFT JOIN reservations AS r ON r.request_id = i.request_id
LEFT JOIN usage AS u ON u.request_id = i.request_id AND u.month = ledger_month(i.request_id)
