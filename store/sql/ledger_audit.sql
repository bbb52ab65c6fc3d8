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
      JOIN usage AS u ON u.request_id = w.request_id AND u.month = w.month
      WHERE w.output_tokens > 0
        AND w.replica_id NOT LIKE 'provider:%'  -- it keeps no journal for us
        AND NOT EXISTS (SELECT FROM witnesses AS j
                        WHERE j.request_id = w.request_id AND j.month = w.month
                          AND j.attempt = w.attempt
                          AND j.source = 'journal' AND j.final)) AS attempts

-- name: balance
SELECT a.tenant_id,
       format('balances %s reserved, %s posted, %s credit after %s entries; the entries say '
              '%s, %s, %s, %s',
              a.reserved_micro, a.posted_micro, a.credit_micro, a.entries,
              coalesce(e.reserved_micro, 0), coalesce(e.posted_micro, 0),
              coalesce(e.credit_micro, 0), coalesce(e.entries, 0))
FROM accounts AS a
LEFT JOIN (SELECT tenant_id, sum(reserved_delta_micro) AS reserved_micro,
                  sum(posted_delta_micro) AS posted_micro,
                  sum(credit_delta_micro) AS credit_micro, count(*) AS entries
           FROM entries GROUP BY tenant_id) AS e ON e.tenant_id = a.tenant_id
WHERE (a.reserved_micro, a.posted_micro, a.credit_micro, a.entries)
      IS DISTINCT FROM (coalesce(e.reserved_micro, 0), coalesce(e.posted_micro, 0),
                        coalesce(e.credit_micro, 0), coalesce(e.entries, 0))
ORDER BY a.tenant_id LIMIT :limit

-- name: sequence
SELECT tenant_id || '/' || seq,
       'does not follow from the entry before it'
FROM (SELECT tenant_id, seq, reserved_delta_micro, posted_delta_micro, credit_delta_micro,
             reserved_micro, posted_micro, credit_micro,
             lag(seq, 1, 0::bigint) OVER before AS seq_before,
             lag(reserved_micro, 1, 0::bigint) OVER before AS reserved_before,
             lag(posted_micro, 1, 0::bigint) OVER before AS posted_before,
             lag(credit_micro, 1, 0::bigint) OVER before AS credit_before
      FROM entries WINDOW before AS (PARTITION BY tenant_id ORDER BY seq)) AS e
WHERE seq <> seq_before + 1
   OR reserved_micro <> reserved_before + reserved_delta_micro
   OR posted_micro <> posted_before + posted_delta_micro
   OR credit_micro <> credit_before + credit_delta_micro
ORDER BY tenant_id, seq LIMIT :limit

-- The lines of an account up to and with the next that carries a link make up that link, with
-- the one before it. See ledger_post.
-- name: chain
WITH line AS (
    SELECT e.tenant_id, e.seq, e.chain,
           count(e.chain) OVER (PARTITION BY e.tenant_id ORDER BY e.seq
                                ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS to_come,
           ROW (e.seq, e.request_id, e.kind, e.reserved_delta_micro, e.posted_delta_micro,
                e.credit_delta_micro, e.reserved_micro, e.posted_micro, e.credit_micro,
                e.adjustment_id, e.reason, e.author, ledger_microseconds(e.at))::text AS text
    FROM entries AS e
),
link AS (
    SELECT tenant_id, to_come, max(seq) AS seq, max(chain) AS chain,
           string_agg(text, E'\n' ORDER BY seq) AS text
    FROM line GROUP BY tenant_id, to_come
),
checked AS (
    SELECT tenant_id, seq, chain, lead(seq) OVER after IS NULL AS is_last,
           chain IS DISTINCT FROM
           sha256(lag(chain, 1, ''::bytea) OVER after || convert_to(text, 'UTF8')) AS is_broken
    FROM link WINDOW after AS (PARTITION BY tenant_id ORDER BY seq)
)
SELECT c.tenant_id || '/' || c.seq, 'the chain over the entries up to here is broken'
FROM checked AS c WHERE c.is_broken
UNION ALL
SELECT a.tenant_id, 'the chain does not end where the account says it does'
FROM accounts AS a LEFT JOIN checked AS c ON c.tenant_id = a.tenant_id AND c.is_last
WHERE a.head <> coalesce(c.chain, ''::bytea)
ORDER BY 1 LIMIT :limit

-- name: reserved
SELECT a.tenant_id, format('%s reserved, but open reservations hold %s',
                           a.reserved_micro, coalesce(r.held, 0))
FROM accounts AS a
LEFT JOIN (SELECT tenant_id, sum(reserved_micro) AS held
           FROM reservations GROUP BY tenant_id) AS r ON r.tenant_id = a.tenant_id
WHERE a.reserved_micro <> coalesce(r.held, 0)
ORDER BY a.tenant_id LIMIT :limit

-- name: posted
SELECT a.tenant_id, format('%s posted, but its requests cost %s and its adjustments %s',
                           a.posted_micro, coalesce(u.cost, 0), coalesce(e.adjusted, 0))
FROM accounts AS a
LEFT JOIN (SELECT tenant_id, sum(cost) AS cost
           FROM (SELECT tenant_id, billed_micro + adjusted_micro AS cost FROM usage
                 UNION ALL
                 SELECT tenant_id, billed_micro + adjusted_micro FROM usage_retired) AS t
           GROUP BY tenant_id) AS u ON u.tenant_id = a.tenant_id
LEFT JOIN (SELECT tenant_id, sum(posted_delta_micro) AS adjusted
           FROM entries WHERE kind = 'adjustment' GROUP BY tenant_id) AS e
    ON e.tenant_id = a.tenant_id
WHERE a.posted_micro <> coalesce(u.cost, 0) + coalesce(e.adjusted, 0)
ORDER BY a.tenant_id LIMIT :limit

-- name: adjusted
SELECT coalesce(u.request_id, e.request_id),
       format('adjusted by %s, but its refunds and prices say %s',
              coalesce(u.adjusted_micro, 0), coalesce(e.adjusted_micro, 0))
FROM (SELECT request_id, adjusted_micro FROM usage WHERE adjusted_micro <> 0) AS u
FULL JOIN (SELECT request_id, sum(posted_delta_micro) AS adjusted_micro
           FROM entries WHERE kind IN ('refund', 'reprice')
             AND NOT EXISTS (SELECT FROM usage_retired AS t
                             WHERE t.tenant_id = entries.tenant_id
                               AND t.month = ledger_month(entries.request_id))
           GROUP BY request_id) AS e
    ON e.request_id = u.request_id
WHERE coalesce(u.adjusted_micro, 0) <> coalesce(e.adjusted_micro, 0)
ORDER BY 1 LIMIT :limit

-- name: caps
SELECT a.tenant_id, format('%s caps, but %s are written down', a.caps, count(c.tenant_id))
FROM accounts AS a LEFT JOIN caps AS c ON c.tenant_id = a.tenant_id
GROUP BY a.tenant_id, a.caps HAVING a.caps <> count(c.tenant_id)
ORDER BY a.tenant_id LIMIT :limit

-- Months whose rows are gone are left out: nothing says any more what was in them.
-- name: windows
SELECT concat_ws('/', w.tenant_id, nullif(w.key_id, ''), w.period, w.starts),
       format('%s posted and %s reserved, but its requests say %s and %s',
              w.posted_micro, w.reserved_micro, q.posted, q.reserved)
FROM cap_windows AS w
CROSS JOIN LATERAL (
    SELECT coalesce(sum(q.billed_micro + q.adjusted_micro), 0) AS posted,
           coalesce(sum(q.reserved_micro) FILTER (WHERE q.state = 'open'), 0) AS reserved
    FROM requests AS q
    WHERE q.tenant_id = w.tenant_id AND w.key_id IN ('', q.key_id)
      AND ledger_window(w.period, q.day) = w.starts) AS q
WHERE (w.posted_micro, w.reserved_micro) <> (q.posted, q.reserved)
  AND NOT EXISTS (SELECT FROM usage_retired AS t WHERE t.tenant_id = w.tenant_id
                  AND (w.period = 'total' OR t.month >= to_char(w.starts, 'YYYYMM')::integer))
ORDER BY 1 LIMIT :limit

-- name: open_pairs
SELECT r.request_id, 'has ended and is still held'
FROM reservations AS r JOIN usage AS u ON u.request_id = r.request_id AND u.month = r.month
ORDER BY 1 LIMIT :limit

-- name: months
SELECT request_id, format('is kept under the month %s, and is of %s', month, ledger_month(request_id))
FROM (SELECT request_id, month FROM reservations
      UNION ALL SELECT request_id, month FROM usage
      UNION ALL SELECT request_id, month FROM witnesses) AS t
WHERE month <> ledger_month(request_id)
ORDER BY request_id LIMIT :limit

-- name: end_cause
SELECT request_id, format('has ended by no cause that we know: %s', cause)
FROM usage WHERE cause <> ALL (:causes)
ORDER BY request_id LIMIT :limit

-- name: metered
SELECT u.request_id,
       format('metered %s (%s accepted), but its witnesses say %s (%s)',
              ledger_usage_totals(u), u.accepted_tokens, m.metered, m.accepted_tokens)
FROM usage AS u CROSS JOIN LATERAL ledger_metered(u.request_id, u.month) AS m
WHERE (ledger_usage_totals(u), u.accepted_tokens) <> (m.metered, m.accepted_tokens)
ORDER BY u.request_id LIMIT :limit

-- name: billed
SELECT request_id, format('billed %s instead of %s', billed_micro, bill)
FROM (SELECT u.request_id, u.billed_micro,
             least(ledger_due(u.cause, :billing_causes, p, ledger_usage_totals(u),
                              u.accepted_tokens, u.max_tokens * u.choices),
                   u.bill_limit_micro) AS bill
      FROM usage AS u JOIN prices AS p ON p.id = u.price_id) AS b
WHERE billed_micro <> bill
ORDER BY request_id LIMIT :limit

-- name: cost
SELECT request_id, format('billed %s and adjusted by %s', billed_micro, adjusted_micro)
FROM usage WHERE billed_micro + adjusted_micro < 0
ORDER BY request_id LIMIT :limit

-- name: delivered
SELECT request_id, format('delivered %s tokens, metered %s', delivered_tokens,
                          metered_output_tokens)
FROM usage WHERE delivered_tokens > metered_output_tokens
ORDER BY request_id LIMIT :limit
