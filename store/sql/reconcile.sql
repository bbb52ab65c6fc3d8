-- What the reconciler reads: feeds, which say where to look, and looks, which say what differs.
-- Times are the database's. No statement here takes a lock that the ledger waits for, but
-- `recount`, which is the ledger's own.

-- Reconcilers take turns, slice by slice: two that wrote at once could wait for each other.
-- name: take_turn
SELECT pg_try_advisory_xact_lock(:lock)

----------------------------------------------------------------------------------------- feeds

-- name: cursor
SELECT at, place FROM reconcile_cursors WHERE feed = :feed

-- name: move_cursor
UPDATE reconcile_cursors SET at = :at, place = :place, moved_at = now() WHERE feed = :feed

-- Whether a control plane has been there to take journals for so long, without a pause.
-- name: listen
UPDATE reconcile_cursors
SET at = CASE WHEN moved_at < now() - :gap_ms * interval '1 millisecond' THEN now() ELSE at END,
    moved_at = now()
WHERE feed = 'contact'
RETURNING at <= now() - :overdue_ms * interval '1 millisecond'

-- How far a feed of times is behind what it should have seen.
-- name: lags
SELECT feed, greatest(0, extract(epoch FROM now() - at) * 1000)::bigint AS lag_ms
FROM reconcile_cursors WHERE feed IN ('words', 'overdue')

-- The end of the span of time that begins at the cursor; never later than :lag_ms ago, for a
-- transaction that began before may still be under way.
-- name: span
SELECT least(CAST(:at AS timestamptz) + :window_ms * interval '1 millisecond',
             now() - :lag_ms * interval '1 millisecond') AS upto,
       now() - :lag_ms * interval '1 millisecond' AS newest

-- Requests that somebody spoke of in the span, after the cursor.
-- name: words
SELECT w.recorded_at, w.request_id
FROM witnesses AS w
WHERE w.recorded_at >= :at AND w.recorded_at < :upto
  AND (w.recorded_at, w.request_id) > (:at, :place)
GROUP BY w.recorded_at, w.request_id
ORDER BY w.recorded_at, w.request_id
LIMIT :limit

-- name: requests
SELECT request_id FROM usage WHERE request_id > :place ORDER BY request_id LIMIT :limit

-- name: accounts
SELECT tenant_id FROM accounts WHERE tenant_id > :place ORDER BY tenant_id LIMIT :limit

----------------------------------------------------------------------------------------- looks

-- A request of which a word came within the grace is left alone: it may be about to be counted,
-- and the feed of words will come to it.
-- name: look_at_requests
WITH seen AS MATERIALIZED (
    SELECT a.request_id, a.month, h.*, u AS usage, p AS price, r.reserved_micro AS held_micro,
           (h.last_at <= now() - :grace_ms * interval '1 millisecond') IS NOT FALSE AS is_quiet
    FROM (SELECT DISTINCT i.request_id, ledger_month(i.request_id) AS month
          FROM unnest(CAST(:request_ids AS text[])) AS i (request_id)) AS a
    -- `said_at`: the gateway's end of it. Journals speak later, and more than once.
    CROSS JOIN LATERAL (
        SELECT min(t.first_at) AS first_at, max(t.last_at) AS last_at,
               coalesce(max(t.said_at), max(t.last_at)) AS said_at,
               sum(t.output) AS output, string_agg(t.heard_of, ', ') AS heard_of,
               string_agg(t.attempt::text, ', ')
                   FILTER (WHERE t.output > 0 AND NOT t.is_final) AS unconfirmed,
               string_agg(format('%s of %s tokens', t.attempt, t.exact), ', ')
                   FILTER (WHERE t.output > t.exact) AS contradicted
        FROM (SELECT w.attempt, min(w.recorded_at) AS first_at, max(w.recorded_at) AS last_at,
                     max(w.recorded_at) FILTER (WHERE w.source <> 'journal') AS said_at,
                     max(w.output_tokens) AS output,
                     max(w.output_tokens) FILTER (WHERE w.source = 'journal' AND w.exact) AS exact,
                     -- An outside provider keeps no journal for us (`core.providers`).
                     bool_or(w.source = 'journal' AND w.final
                             OR w.replica_id LIKE 'provider:%') AS is_final,
                     string_agg(format('%s of %s by its %s', w.attempt, w.replica_id, w.source),
                                ', ') AS heard_of
              FROM witnesses AS w WHERE w.request_id = a.request_id AND w.month = a.month
              GROUP BY w.attempt ORDER BY w.attempt) AS t) AS h
    LEFT JOIN usage AS u ON u.request_id = a.request_id AND u.month = a.month
    LEFT JOIN prices AS p ON p.id = u.price_id
    LEFT JOIN reservations AS r ON r.request_id = a.request_id
),
ended AS (
    SELECT (s.usage).*, ledger_usage_totals(s.usage) AS totals, s.price, s.held_micro, s.said_at,
           s.unconfirmed
    FROM seen AS s WHERE (s.usage).request_id IS NOT NULL
)
SELECT '' AS kind, s.request_id AS subject, 'was spoken of just now' AS detail
FROM seen AS s WHERE NOT s.is_quiet
UNION ALL
SELECT 'uncounted', e.request_id,
       format('metered %s (%s accepted, %s attempts), but its witnesses say %s (%s, %s)',
              e.totals, e.accepted_tokens, e.attempts, m.metered, m.accepted_tokens, m.attempts)
FROM ended AS e CROSS JOIN LATERAL ledger_metered(e.request_id, e.month) AS m
WHERE (e.attempts, e.totals, e.accepted_tokens)
      IS DISTINCT FROM (m.attempts, m.metered, m.accepted_tokens)
UNION ALL
SELECT 'misbilled', b.request_id, format('billed %s instead of %s', b.billed_micro, b.due)
FROM (SELECT e.request_id, e.billed_micro,
             least(ledger_due(e.cause, :billing_causes, e.price, e.totals, e.accepted_tokens,
                              e.max_tokens * e.choices), e.bill_limit_micro) AS due
      FROM ended AS e) AS b
WHERE b.billed_micro <> b.due
UNION ALL
SELECT 'overdelivered', e.request_id,
       format('delivered %s tokens, metered %s', e.delivered_tokens, e.metered_output_tokens)
FROM ended AS e WHERE e.delivered_tokens > e.metered_output_tokens
UNION ALL
SELECT 'still_held', e.request_id, format('has ended by %s and still holds %s', e.cause,
                                          e.held_micro)
FROM ended AS e WHERE e.held_micro IS NOT NULL
UNION ALL
SELECT 'contradicted', s.request_id,
       format('more is heard of than its journals say: attempt %s', s.contradicted)
FROM seen AS s WHERE s.contradicted IS NOT NULL
UNION ALL
SELECT 'unconfirmed', e.request_id,
       format('no journal has the last word on attempt %s', e.unconfirmed)
FROM ended AS e
WHERE e.unconfirmed IS NOT NULL
  AND e.said_at <= now() - :overdue_ms * interval '1 millisecond'
UNION ALL
SELECT 'unknown_request', s.request_id,
       format('%s tokens of output: attempt %s', s.output, s.heard_of)
FROM seen AS s
WHERE (s.usage).request_id IS NULL AND s.held_micro IS NULL
  AND s.first_at <= now() - :overdue_ms * interval '1 millisecond'

-- An account and its last entry, in one snapshot; and what it holds and who holds it.
-- name: look_at_accounts
WITH asked AS (
    SELECT a.* FROM accounts AS a WHERE a.tenant_id = ANY (CAST(:tenants AS text[]))
),
held AS (
    SELECT r.tenant_id, r.key_id, r.day, sum(r.reserved_micro) AS micro
    FROM reservations AS r WHERE r.tenant_id = ANY (CAST(:tenants AS text[]))
    GROUP BY r.tenant_id, r.key_id, r.day
)
SELECT 'balance' AS kind, a.tenant_id AS subject,
       format('balances %s reserved, %s posted, %s credit after %s entries; the last of them'
              ' says %s, %s, %s', a.reserved_micro, a.posted_micro, a.credit_micro, a.entries,
              coalesce(e.reserved_micro, 0), coalesce(e.posted_micro, 0),
              coalesce(e.credit_micro, 0))
       || CASE WHEN a.head IS DISTINCT FROM coalesce(e.chain, '') THEN ', in another chain'
               ELSE '' END AS detail
FROM asked AS a
LEFT JOIN entries AS e ON e.tenant_id = a.tenant_id AND e.seq = a.entries
WHERE (a.reserved_micro, a.posted_micro, a.credit_micro, a.head)
      IS DISTINCT FROM (coalesce(e.reserved_micro, 0), coalesce(e.posted_micro, 0),
                        coalesce(e.credit_micro, 0), coalesce(e.chain, ''))
   OR (a.entries > 0 AND e.seq IS NULL)
UNION ALL
SELECT 'held', a.tenant_id, format('%s reserved, but open reservations hold %s',
                                   a.reserved_micro, h.micro)
FROM asked AS a
CROSS JOIN LATERAL (SELECT coalesce(sum(h.micro), 0) AS micro
                    FROM held AS h WHERE h.tenant_id = a.tenant_id) AS h
WHERE a.reserved_micro <> h.micro
UNION ALL
SELECT 'held', w.tenant_id,
       format('the %s from %s of %s counts %s reserved, but open reservations hold %s', w.period,
              w.starts, coalesce(nullif(w.key_id, ''), 'the account'), w.reserved_micro, h.micro)
FROM cap_windows AS w
CROSS JOIN LATERAL (SELECT coalesce(sum(h.micro), 0) AS micro FROM held AS h
                    WHERE h.tenant_id = w.tenant_id AND w.key_id IN ('', h.key_id)
                      AND ledger_window(w.period, h.day) = w.starts) AS h
WHERE w.tenant_id = ANY (CAST(:tenants AS text[])) AND w.reserved_micro <> h.micro

-- Reads every account, of which there are few beside requests.
-- name: unverified
SELECT a.tenant_id
FROM accounts AS a LEFT JOIN reconciled_accounts AS c ON c.tenant_id = a.tenant_id
WHERE a.entries > coalesce(c.seq, 0)
ORDER BY a.entries - coalesce(c.seq, 0) DESC, a.tenant_id LIMIT :limit

-- Entries not verified yet, at most :lines of each account and up to a link of its chain: that
-- each follows from the one before, and each link from the one before and its lines. What was
-- verified is passed over for good, broken or not. A link of more lines than that
-- is not followed: only its lines are. `behind`
-- says that there is more.
-- name: verify_entries
WITH place AS (
    SELECT a.tenant_id, a.entries, coalesce(c.seq, 0) AS seq,
           coalesce(c.reserved_micro, 0) AS reserved_micro,
           coalesce(c.posted_micro, 0) AS posted_micro,
           coalesce(c.credit_micro, 0) AS credit_micro,
           CASE WHEN c.tenant_id IS NULL THEN '' ELSE c.link END AS link
    FROM accounts AS a LEFT JOIN reconciled_accounts AS c ON c.tenant_id = a.tenant_id
    WHERE a.tenant_id = ANY (CAST(:tenants AS text[])) AND a.entries > coalesce(c.seq, 0)
),
line AS (
    SELECT e.*, p.entries, p.link,
           lag(e.seq, 1, p.seq) OVER before AS seq_before,
           lag(e.reserved_micro, 1, p.reserved_micro) OVER before AS reserved_before,
           lag(e.posted_micro, 1, p.posted_micro) OVER before AS posted_before,
           lag(e.credit_micro, 1, p.credit_micro) OVER before AS credit_before,
           count(e.chain) OVER (before ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS part,
           coalesce(max(e.seq) FILTER (WHERE e.chain IS NOT NULL) OVER of_account,
                    max(e.seq) OVER of_account) AS upto
    FROM place AS p
    CROSS JOIN LATERAL (SELECT * FROM entries AS e
                        WHERE e.tenant_id = p.tenant_id AND e.seq > p.seq
                        ORDER BY e.seq LIMIT :lines) AS e
    WINDOW of_account AS (PARTITION BY e.tenant_id),
           before AS (PARTITION BY e.tenant_id ORDER BY e.seq)
),
link AS (
    SELECT l.tenant_id, l.part, max(l.seq) AS seq, max(l.chain) AS chain, l.link,
           string_agg(ROW (l.seq, l.request_id, l.kind, l.reserved_delta_micro,
                           l.posted_delta_micro, l.credit_delta_micro, l.reserved_micro,
                           l.posted_micro, l.credit_micro, l.adjustment_id, l.reason, l.author,
                           ledger_microseconds(l.at))::text, E'\n' ORDER BY l.seq) AS text
    FROM line AS l WHERE l.seq <= l.upto GROUP BY l.tenant_id, l.part, l.link
),
linked AS (
    SELECT k.*, sha256(lag(k.chain, 1, k.link) OVER (PARTITION BY k.tenant_id ORDER BY k.part)
                       || convert_to(k.text, 'UTF8')) AS expected
    FROM link AS k
),
moved AS (
    INSERT INTO reconciled_accounts AS c (tenant_id, seq, reserved_micro, posted_micro,
                                          credit_micro, link)
    SELECT l.tenant_id, l.seq, l.reserved_micro, l.posted_micro, l.credit_micro, l.chain
    FROM line AS l WHERE l.seq = l.upto
    ON CONFLICT (tenant_id) DO UPDATE
    SET seq = excluded.seq, reserved_micro = excluded.reserved_micro,
        posted_micro = excluded.posted_micro, credit_micro = excluded.credit_micro,
        link = excluded.link
    RETURNING c.tenant_id, c.seq
)
SELECT 'chain' AS kind, l.tenant_id || '/' || l.seq AS subject,
       'does not follow from the entry before it' AS detail, false AS behind
FROM line AS l
WHERE l.seq <= l.upto
  AND (l.seq <> l.seq_before + 1
       OR l.reserved_micro <> l.reserved_before + l.reserved_delta_micro
       OR l.posted_micro <> l.posted_before + l.posted_delta_micro
       OR l.credit_micro <> l.credit_before + l.credit_delta_micro)
UNION ALL
SELECT 'chain', k.tenant_id || '/' || k.seq,
       'its link is not made from the link before and the lines since', false
FROM linked AS k WHERE k.chain <> k.expected
UNION ALL
SELECT '', m.tenant_id, '', p.entries > m.seq
FROM moved AS m JOIN place AS p ON p.tenant_id = m.tenant_id

-- What is seen whole in every round: old reservations, and what gateways say of their spools.
-- name: look_at_states
(SELECT 'open_too_long' AS kind, r.request_id AS subject,
        format('held by %s since %s', r.gateway_id, r.opened_at) AS detail, 0::bigint AS measure
 FROM reservations AS r
 WHERE r.opened_at <= now() - :request_ms_max * interval '1 millisecond'
 ORDER BY r.opened_at, r.request_id LIMIT :limit)
UNION ALL
(SELECT 'spool', g.id,
        format('%s bytes wait on its disk', g.spool_bytes)
        || CASE WHEN g.retired OR g.last_seen < now() - interval '1 minute'
                THEN ' for another gateway to be started on it' ELSE '' END, 0
 FROM gateways AS g WHERE g.spool_bytes > 0 ORDER BY g.id LIMIT :limit)
UNION ALL
(SELECT 'refused_words', g.id, format('%s words were refused', g.refused_words), g.refused_words
 FROM gateways AS g WHERE g.refused_words > 0 ORDER BY g.id LIMIT :limit)

----------------------------------------------------------------------------------- corrections

-- name: hurry
SELECT set_config('statement_timeout', :timeout_ms, true)

-- What an ended request's entries have posted, beside what its row says. A tenant's entries are
-- in order of time, so those from before the request are found by halving and left out; the
-- hour allows for a gateway's clock.
-- name: posted
WITH RECURSIVE asked AS (
    SELECT u.request_id, u.tenant_id, u.billed_micro + u.adjusted_micro AS billed_micro,
           to_timestamp(u.created_ms / 1000.0) - interval '1 hour' AS since, a.entries
    FROM usage AS u JOIN accounts AS a ON a.tenant_id = u.tenant_id
    WHERE (u.request_id, u.month) IN (SELECT i, ledger_month(i)
                                      FROM unnest(CAST(:request_ids AS text[])) AS i)
),
halving AS (
    SELECT request_id, tenant_id, since, 1::bigint AS low, entries + 1 AS high FROM asked
    UNION ALL
    SELECT h.request_id, h.tenant_id, h.since,
           CASE WHEN e.at < h.since THEN e.seq + 1 ELSE h.low END,
           CASE WHEN e.at < h.since THEN h.high ELSE e.seq END
    FROM halving AS h
    JOIN entries AS e ON e.tenant_id = h.tenant_id AND e.seq = (h.low + h.high) / 2
    WHERE h.low < h.high
),
first AS (
    SELECT request_id, max(low) AS seq FROM halving GROUP BY request_id
)
SELECT q.request_id, q.billed_micro,
       (SELECT coalesce(sum(e.posted_delta_micro), 0)::bigint FROM entries AS e
        WHERE e.tenant_id = q.tenant_id AND e.seq >= f.seq AND e.request_id = q.request_id
          AND e.kind <> 'adjustment') AS posted_micro
FROM asked AS q JOIN first AS f ON f.request_id = q.request_id

-- name: recount
SELECT count(*) FROM ledger_recount(:request_ids, :billing_causes)
