-- What must hold in the ledger at every moment. Each query lists what does not: a subject and
-- what is wrong with it. They read everything: for an operator in doubt and the end of a test.

-- name: one_snapshot
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY

-- name: open_reservations
SELECT count(*), coalesce(extract(epoch FROM now() - min(opened_at)) * 1000, 0)::bigint
FROM reservations

-- name: lapsed_gateways
SELECT g.id AS gateway_id, count(*) AS reservations,
       (extract(epoch FROM now() - g.last_seen) * 1000)::bigint AS silent_ms
FROM gateways AS g JOIN reservations AS r ON r.gateway_id = g.id
WHERE g.retired OR g.last_seen < now() - g.lease_ms * interval '1 millisecond'
GROUP BY g.id, g.last_seen ORDER BY g.id LIMIT :limit

-- name: unconfirmed
SELECT count(*)
FROM (SELECT DISTINCT w.request_id, w.attempt FROM witnesses AS w
      JOIN usage AS u ON u.request_id = w.request_id AND u.state = 'settled'
      WHERE w.output_tokens > 0
        AND NOT EXISTS (SELECT FROM witnesses AS j
                        WHERE j.request_id = w.request_id AND j.attempt = w.attempt
                          AND j.source = 'journal' AND j.final)) AS attempts

-- name: balance
SELECT a.tenant_id,
       format('balances %s reserved, %s posted after %s entries; the entries say %s, %s, %s',
              a.reserved_micro, a.posted_micro, a.entries, coalesce(e.reserved_micro, 0),
              coalesce(e.posted_micro, 0), coalesce(e.entries, 0))
FROM accounts AS a
LEFT JOIN (SELECT tenant_id, sum(reserved_delta_micro) AS reserved_micro,
                  sum(posted_delta_micro) AS posted_micro, count(*) AS entries
           FROM entries GROUP BY tenant_id) AS e ON e.tenant_id = a.tenant_id
WHERE (a.reserved_micro, a.posted_micro, a.entries)
      IS DISTINCT FROM (coalesce(e.reserved_micro, 0), coalesce(e.posted_micro, 0),
                        coalesce(e.entries, 0))
ORDER BY a.tenant_id LIMIT :limit

-- name: chain
SELECT tenant_id || '/' || seq,
       'does not follow from the entry before it'
FROM (SELECT tenant_id, seq, reserved_delta_micro, posted_delta_micro, reserved_micro,
             posted_micro,
             lag(seq, 1, 0::bigint) OVER before AS seq_before,
             lag(reserved_micro, 1, 0::bigint) OVER before AS reserved_before,
             lag(posted_micro, 1, 0::bigint) OVER before AS posted_before
      FROM entries WINDOW before AS (PARTITION BY tenant_id ORDER BY seq)) AS e
WHERE seq <> seq_before + 1
   OR reserved_micro <> reserved_before + reserved_delta_micro
   OR posted_micro <> posted_before + posted_delta_micro
ORDER BY tenant_id, seq LIMIT :limit

-- name: reserved
SELECT a.tenant_id, format('%s reserved, but open reservations hold %s',
                           a.reserved_micro, coalesce(r.held, 0))
FROM accounts AS a
LEFT JOIN (SELECT tenant_id, sum(reserved_micro) AS held
           FROM reservations GROUP BY tenant_id) AS r ON r.tenant_id = a.tenant_id
WHERE a.reserved_micro <> coalesce(r.held, 0)
ORDER BY a.tenant_id LIMIT :limit

-- name: posted
SELECT a.tenant_id, format('%s posted, but its requests were billed %s',
                           a.posted_micro, coalesce(u.billed, 0))
FROM accounts AS a
LEFT JOIN (SELECT tenant_id, sum(billed_micro) AS billed
           FROM usage GROUP BY tenant_id) AS u ON u.tenant_id = a.tenant_id
WHERE a.posted_micro <> coalesce(u.billed, 0)
ORDER BY a.tenant_id LIMIT :limit

-- name: open_pairs
SELECT coalesce(u.request_id, r.request_id),
       CASE WHEN u.request_id IS NULL THEN 'is held for no usage row'
            WHEN r.request_id IS NULL THEN 'is open without a reservation'
            WHEN u.state <> 'open' THEN 'has ended and is still held'
            ELSE 'holds another amount than its usage row says'
       END
FROM (SELECT * FROM usage WHERE state = 'open'
      UNION
      SELECT u.* FROM usage AS u JOIN reservations AS r USING (request_id)) AS u
FULL JOIN reservations AS r ON r.request_id = u.request_id
WHERE u.request_id IS NULL OR r.request_id IS NULL OR u.state <> 'open'
   OR u.reserved_micro <> r.reserved_micro
ORDER BY 1 LIMIT :limit

-- name: end_cause
SELECT request_id, format('has ended by no cause that we know: %s', cause)
FROM usage WHERE state = 'settled' AND (cause IS NULL OR cause <> ALL (:causes))
ORDER BY request_id LIMIT :limit

-- name: metered
SELECT u.request_id,
       format('metered %s/%s/%s (%s accepted), but its witnesses say %s/%s/%s (%s)',
              u.metered_prompt_tokens, u.metered_cached_tokens, u.metered_output_tokens,
              u.accepted_tokens,
              m.prompt_tokens, m.cached_tokens, m.output_tokens, m.accepted_tokens)
FROM usage AS u CROSS JOIN LATERAL ledger_metered(u.request_id) AS m
WHERE u.state = 'settled'
  AND (u.metered_prompt_tokens, u.metered_cached_tokens, u.metered_output_tokens,
       u.accepted_tokens)
      <> (m.prompt_tokens, m.cached_tokens, m.output_tokens, m.accepted_tokens)
ORDER BY u.request_id LIMIT :limit

-- name: billed
SELECT request_id, format('billed %s instead of %s', billed_micro, bill)
FROM (SELECT u.request_id, u.billed_micro,
             least(ledger_due(u.cause, :billing_causes, p, u.metered_prompt_tokens,
                              u.metered_cached_tokens, u.metered_output_tokens,
                              u.accepted_tokens, u.max_tokens * u.choices),
                   u.bill_limit_micro) AS bill
      FROM usage AS u JOIN prices AS p ON p.id = u.price_id
      WHERE u.state = 'settled') AS b
WHERE billed_micro <> bill
ORDER BY request_id LIMIT :limit

-- name: delivered
SELECT request_id, format('delivered %s tokens, metered %s', delivered_tokens,
                          metered_output_tokens)
FROM usage WHERE state = 'settled' AND delivered_tokens > metered_output_tokens
ORDER BY request_id LIMIT :limit
