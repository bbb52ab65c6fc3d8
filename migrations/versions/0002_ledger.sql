-- The ledger. Its rules are told in core/ledger.py, which these functions must agree with.
--
-- Money is bigint micro-units. The busy tables have no foreign keys, whose triggers would cost
-- more than the rows: the functions check what the keys would. Every function that changes a
-- balance first locks its accounts, in the order of their ids, and each later statement sees
-- what was committed before the lock was given.

---------------------------------------------------------------------------------------- tables

CREATE TABLE prices (
    id                 text PRIMARY KEY,
    model              text NOT NULL,
    currency           text NOT NULL,
    input_micro        bigint NOT NULL CHECK (input_micro >= 0),
    cached_input_micro bigint NOT NULL CHECK (cached_input_micro >= 0),
    output_micro       bigint NOT NULL CHECK (output_micro >= 0),
    request_micro      bigint NOT NULL CHECK (request_micro >= 0),
    effective_ms       bigint NOT NULL,
    created_at         timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT prices_model_effective_ms_key UNIQUE (model, effective_ms)
);

CREATE TABLE accounts (
    tenant_id      text PRIMARY KEY REFERENCES tenants (id),
    hard_cap_micro bigint CHECK (hard_cap_micro >= 0),
    posted_micro   bigint NOT NULL DEFAULT 0,
    reserved_micro bigint NOT NULL DEFAULT 0 CHECK (reserved_micro >= 0),
    entries        bigint NOT NULL DEFAULT 0,
    opened_at      timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 20); -- A busy account's row is rewritten in place, thousands of times.

CREATE TABLE entries (
    tenant_id            text NOT NULL,
    seq                  bigint NOT NULL,
    request_id           text NOT NULL,
    kind                 text NOT NULL,
    reserved_delta_micro bigint NOT NULL,
    posted_delta_micro   bigint NOT NULL,
    reserved_micro       bigint NOT NULL,
    posted_micro         bigint NOT NULL,
    at                   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, seq)
);

CREATE TRIGGER entries_append_only
    BEFORE UPDATE OR DELETE OR TRUNCATE ON entries
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE TRIGGER prices_immutable
    BEFORE UPDATE OR DELETE OR TRUNCATE ON prices
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- What is held now, and for whose request: a small table, though `usage` grows without end.
CREATE TABLE reservations (
    request_id     text PRIMARY KEY,
    tenant_id      text NOT NULL,
    gateway_id     text NOT NULL,
    reserved_micro bigint NOT NULL CHECK (reserved_micro >= 0),
    opened_at      timestamptz NOT NULL DEFAULT now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);

-- Ids that were refused, or released before they were reserved. Kept for a day.
CREATE TABLE refusals (
    request_id     text PRIMARY KEY,
    tenant_id      text NOT NULL,
    reason         text NOT NULL,
    reserved_micro bigint NOT NULL,
    posted_micro   bigint NOT NULL,
    hard_cap_micro bigint NOT NULL,
    at             timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX refusals_at_idx ON refusals (at);

-- One row for each accepted request. No index covers a column that its end changes, so that the
-- end rewrites the row within its page.
CREATE TABLE usage (
    request_id             text PRIMARY KEY,
    tenant_id              text NOT NULL,
    key_id                 text NOT NULL,
    gateway_id             text NOT NULL,
    model                  text NOT NULL,
    version                text NOT NULL,
    region                 text NOT NULL,
    service_class          text NOT NULL,
    dialect                text NOT NULL,
    endpoint               text NOT NULL,
    stream                 boolean NOT NULL,
    price_id               text NOT NULL,
    prompt_tokens          bigint NOT NULL,
    max_tokens             bigint NOT NULL,
    choices                integer NOT NULL,
    amount_micro           bigint NOT NULL CHECK (amount_micro >= 0),
    reserved_micro         bigint NOT NULL,
    state                  text NOT NULL CHECK (state IN ('open', 'settled')),
    cause                  text,
    settled_by             text CHECK (settled_by IN ('gateway', 'sweeper')),
    attempts               integer NOT NULL DEFAULT 0,
    metered_prompt_tokens  bigint NOT NULL DEFAULT 0,
    metered_cached_tokens  bigint NOT NULL DEFAULT 0,
    metered_output_tokens  bigint NOT NULL DEFAULT 0,
    accepted_tokens        bigint NOT NULL DEFAULT 0,
    delivered_tokens       bigint NOT NULL DEFAULT 0,
    billed_micro           bigint NOT NULL DEFAULT 0 CHECK (billed_micro >= 0),
    bill_limit_micro       bigint,
    queue_ms               double precision,
    prefill_ms             double precision,
    first_token_ms         double precision,
    inter_token_ms         double precision,
    total_ms               double precision,
    created_ms             bigint NOT NULL,
    ended_ms               bigint,
    CONSTRAINT usage_ended_check
        CHECK ((state = 'open') = (cause IS NULL) AND (state = 'open') = (settled_by IS NULL))
) WITH (fillfactor = 60);
CREATE INDEX usage_tenant_id_created_ms_idx ON usage (tenant_id, created_ms);

-- One row for each (request, attempt, source); the request may be one we never heard of.
CREATE TABLE witnesses (
    request_id    text NOT NULL,
    attempt       integer NOT NULL,
    source        text NOT NULL CHECK (source IN ('gateway', 'journal', 'checkpoint')),
    replica_id    text NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL CHECK (cached_tokens BETWEEN 0 AND prompt_tokens),
    output_tokens bigint NOT NULL CHECK (output_tokens >= 0),
    exact         boolean NOT NULL,
    final         boolean NOT NULL,
    cause         text NOT NULL,
    at_ms         bigint NOT NULL,
    recorded_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (request_id, attempt, source)
);

-- One row for each incarnation of a gateway.
CREATE TABLE gateways (
    id         text PRIMARY KEY,
    region     text NOT NULL,
    lease_ms   integer NOT NULL CHECK (lease_ms > 0),
    started_at timestamptz NOT NULL DEFAULT now(),
    last_seen  timestamptz NOT NULL,
    retired    boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);

----------------------------------------------------------------------------------------- types

-- Fields are named as in core/metering.py, so that a command's JSON is read as it is.
CREATE TYPE reserve_command AS (
    request_id text, gateway_id text, tenant_id text, key_id text, amount_micro bigint,
    price_id text, model text, version text, region text, service_class text, dialect text,
    endpoint text, stream boolean, prompt_tokens bigint, max_tokens bigint, choices integer,
    created_ms bigint
);
CREATE TYPE top_up_command AS (request_id text, tenant_id text, total_micro bigint);
CREATE TYPE token_totals AS (prompt_tokens bigint, cached_tokens bigint, output_tokens bigint);
CREATE TYPE attempt_totals AS (attempt integer, replica_id text, usage token_totals);
CREATE TYPE request_timings AS (
    queue_ms double precision, prefill_ms double precision, first_token_ms double precision,
    inter_token_ms double precision, total_ms double precision
);
CREATE TYPE settle_command AS (
    request_id text, tenant_id text, cause text, attempts attempt_totals[],
    delivered_tokens bigint, timings request_timings, ended_ms bigint
);
CREATE TYPE witness_word AS (
    request_id text, attempt integer, source text, replica_id text, usage token_totals,
    exact boolean, final boolean, cause text, at_ms bigint
);

-- Who says that a request has ended: 'gateway', 'sweeper', or 'witness', who only knows more of
-- one that has.
CREATE TYPE ending AS (
    request_id text, tenant_id text, said_by text, cause text,
    delivered_tokens bigint, timings request_timings, ended_ms bigint
);

-- The answer to the n-th command (from 1) of its kind.
CREATE TYPE ledger_answer AS (
    kind text, n bigint, refused text,
    reserved_micro bigint, posted_micro bigint, hard_cap_micro bigint,
    billed_micro bigint, cause text,
    prompt_tokens bigint, cached_tokens bigint, output_tokens bigint
);

------------------------------------------------------------------------------------- witnesses

-- core.ledger.merge: an exact word replaces the rest, else the highest totals stand. The keys
-- in one call are distinct.
CREATE FUNCTION ledger_hear(p_words witness_word[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO witnesses AS w
        (request_id, attempt, source, replica_id, prompt_tokens, cached_tokens, output_tokens,
         exact, final, cause, at_ms)
    SELECT i.request_id, i.attempt, i.source, i.replica_id, (i.usage).prompt_tokens,
           (i.usage).cached_tokens, (i.usage).output_tokens, i.exact, i.final, i.cause, i.at_ms
    FROM unnest(p_words) AS i
    ON CONFLICT (request_id, attempt, source) DO UPDATE SET
        (replica_id, prompt_tokens, cached_tokens, output_tokens, exact, final, cause, at_ms) =
        (SELECT CASE WHEN same THEN greatest(w.replica_id, excluded.replica_id)
                     ELSE excluded.replica_id END,
                CASE WHEN same THEN greatest(w.prompt_tokens, excluded.prompt_tokens)
                     ELSE excluded.prompt_tokens END,
                CASE WHEN same THEN greatest(w.cached_tokens, excluded.cached_tokens)
                     ELSE excluded.cached_tokens END,
                CASE WHEN same THEN greatest(w.output_tokens, excluded.output_tokens)
                     ELSE excluded.output_tokens END,
                excluded.exact,
                CASE WHEN same THEN w.final OR excluded.final ELSE excluded.final END,
                CASE WHEN same THEN greatest(w.cause, excluded.cause) ELSE excluded.cause END,
                CASE WHEN same THEN greatest(w.at_ms, excluded.at_ms) ELSE excluded.at_ms END
         FROM (SELECT w.exact = excluded.exact) AS rank (same))
    WHERE excluded.exact >= w.exact;
END $$;

-- core.ledger.metered and accepted_tokens: one row, of zeros when nobody has heard of the request.
CREATE FUNCTION ledger_metered(p_request_id text)
RETURNS TABLE (attempts integer, prompt_tokens bigint, cached_tokens bigint, output_tokens bigint,
               accepted_tokens bigint)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(a.attempt), 0),
           coalesce((max(ARRAY[a.prompt, a.cached]))[1], 0),
           coalesce((max(ARRAY[a.prompt, a.cached]))[2], 0),
           coalesce(sum(a.output), 0)::bigint,
           coalesce(sum(least(a.output, a.accepted)), 0)::bigint
    FROM (
        SELECT w.attempt,
               coalesce(max(w.prompt_tokens) FILTER (WHERE w.exact), max(w.prompt_tokens)) AS prompt,
               coalesce(max(w.cached_tokens) FILTER (WHERE w.exact), max(w.cached_tokens)) AS cached,
               coalesce(max(w.output_tokens) FILTER (WHERE w.exact), max(w.output_tokens)) AS output,
               coalesce(max(w.output_tokens) FILTER (WHERE w.source = 'gateway'), 0) AS accepted
        FROM witnesses AS w
        WHERE w.request_id = p_request_id
        GROUP BY w.attempt
    ) AS a
$$;

--------------------------------------------------------------------------------------- endings

-- core.money.charge_micro: half up.
CREATE FUNCTION ledger_charge(p_price prices, p_prompt bigint, p_cached bigint, p_output bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT (p_price).request_micro
         + div((p_prompt - p_cached)::numeric * (p_price).input_micro
               + p_cached::numeric * (p_price).cached_input_micro
               + p_output::numeric * (p_price).output_micro + 500000, 1000000)::bigint
$$;

-- core.money.billed_micro for what is `billable` of a request that ended so.
CREATE FUNCTION ledger_due(
    p_cause text, p_billing_causes text[], p_price prices, p_prompt bigint, p_cached bigint,
    p_output bigint, p_accepted bigint, p_asked bigint
) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_cause = ANY (p_billing_causes) AND p_prompt + b.output > 0
                THEN ledger_charge(p_price, p_prompt, p_cached, b.output)
                ELSE 0
           END
    FROM (SELECT least(CASE WHEN p_cause = 'lost' THEN p_output ELSE p_accepted END, p_asked))
         AS b (output)
$$;

-- What an account has posted and reserved after each of its lines in turn, the first of which
-- finds `p_total`: a hard cap cuts what would go over it, and takes nothing back.
CREATE FUNCTION ledger_fill_up(p_filled bigint, p_total bigint, p_delta bigint, p_hard_cap bigint)
RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    p_total := coalesce(p_filled, p_total);
    RETURN CASE WHEN p_delta > 0 THEN greatest(p_total, least(p_total + p_delta, p_hard_cap))
                ELSE p_total + p_delta
           END;
END $$;
CREATE AGGREGATE ledger_filled (bigint, bigint, bigint) (sfunc = ledger_fill_up, stype = bigint);

-- Ends open requests and corrects ended ones: works out each bill anew from the witnesses and
-- posts how it differs from what was posted. A hard cap cuts a bill to what the request holds,
-- or, once it holds nothing, to what it held and to the room that is left. Requests not known
-- have no answer, nor has a witness's word on an open one. The accounts are locked, and each
-- request comes once.
--
-- The cause: the gateway's first word holds for good. The sweeper's is provisional: it rises
-- from not_started to lost with the witnesses, and yields to the gateway's.
CREATE FUNCTION ledger_close(p_endings ending[], p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    WITH judged AS (
        SELECT e.n, e.said_by, e.delivered_tokens, e.timings, e.ended_ms,
               u.request_id, u.tenant_id, u.price_id, u.bill_limit_micro,
               u.max_tokens * u.choices AS asked_tokens,
               u.reserved_micro AS reserved,
               u.state = 'open' AS was_open,
               e.said_by = 'gateway' AND u.settled_by IS DISTINCT FROM 'gateway' AS fixes,
               u.billed_micro AS billed_before,
               r.reserved_micro AS held,
               CASE WHEN u.settled_by = 'gateway' THEN u.cause
                    WHEN e.said_by = 'gateway' THEN e.cause
                    WHEN m.prompt_tokens + m.output_tokens > 0 THEN 'lost'
                    ELSE 'not_started'
               END AS cause,
               m.attempts, m.prompt_tokens, m.cached_tokens, m.output_tokens, m.accepted_tokens
        FROM unnest(p_endings) WITH ORDINALITY
             AS e (request_id, tenant_id, said_by, cause, delivered_tokens, timings, ended_ms, n)
        -- Not `=`, which would tempt a plan made on an empty table into the tenant's index.
        JOIN usage AS u
            ON u.request_id = e.request_id AND u.tenant_id IS NOT DISTINCT FROM e.tenant_id
        LEFT JOIN reservations AS r ON r.request_id = e.request_id
        CROSS JOIN LATERAL ledger_metered(e.request_id) AS m
        WHERE u.state = 'settled' OR e.said_by <> 'witness'
    ),
    due AS (
        SELECT j.*,
               least(ledger_due(j.cause, p_billing_causes, p, j.prompt_tokens, j.cached_tokens,
                                j.output_tokens, j.accepted_tokens, j.asked_tokens),
                     j.bill_limit_micro) AS due,
               a.posted_micro + a.reserved_micro AS total,
               a.hard_cap_micro
        FROM judged AS j
        JOIN prices AS p ON p.id = j.price_id
        JOIN accounts AS a ON a.tenant_id = j.tenant_id
    ),
    covered AS (
        SELECT d.*,
               CASE WHEN d.hard_cap_micro IS NULL THEN d.due
                    ELSE least(d.due, greatest(d.billed_before, d.reserved))
               END AS covered
        FROM due AS d
    ),
    filled AS (
        SELECT c.*,
               ledger_filled(c.total, c.covered - c.billed_before - coalesce(c.held, 0),
                             c.hard_cap_micro) OVER upto AS filled
        FROM covered AS c
        WINDOW upto AS (PARTITION BY c.tenant_id ORDER BY c.n ROWS UNBOUNDED PRECEDING)
    ),
    billed AS (
        SELECT f.*,
               f.billed_before + coalesce(f.held, 0)
               + f.filled - lag(f.filled, 1, f.total) OVER before AS bill
        FROM filled AS f
        WINDOW before AS (PARTITION BY f.tenant_id ORDER BY f.n)
    ),
    line AS (
        SELECT b.n, 1 AS part, b.tenant_id, b.request_id,
               CASE WHEN b.bill > 0 THEN 'settle'
                    WHEN b.said_by = 'gateway' THEN 'release'
                    ELSE 'expire'
               END AS kind,
               -b.held AS reserved_delta, least(b.bill, b.held) AS posted_delta
        FROM billed AS b WHERE b.was_open
        UNION ALL
        SELECT b.n, 2, b.tenant_id, b.request_id, 'overage', 0, b.bill - b.held
        FROM billed AS b WHERE b.was_open AND b.bill > b.held
        UNION ALL
        SELECT b.n, 1, b.tenant_id, b.request_id, 'correction', 0, b.bill - b.billed_before
        FROM billed AS b WHERE NOT b.was_open AND b.bill <> b.billed_before
    ),
    posted AS (
        INSERT INTO entries (tenant_id, seq, request_id, kind, reserved_delta_micro,
                             posted_delta_micro, reserved_micro, posted_micro)
        SELECT l.tenant_id, a.entries + row_number() OVER upto, l.request_id, l.kind,
               l.reserved_delta, l.posted_delta,
               a.reserved_micro + sum(l.reserved_delta) OVER upto,
               a.posted_micro + sum(l.posted_delta) OVER upto
        FROM line AS l JOIN accounts AS a ON a.tenant_id = l.tenant_id
        WINDOW upto AS (PARTITION BY l.tenant_id ORDER BY l.n, l.part
                        ROWS UNBOUNDED PRECEDING)
    ),
    balanced AS (
        UPDATE accounts AS a
        SET entries = a.entries + t.lines,
            reserved_micro = a.reserved_micro + t.reserved_delta,
            posted_micro = a.posted_micro + t.posted_delta
        FROM (SELECT l.tenant_id, count(*) AS lines, sum(l.reserved_delta) AS reserved_delta,
                     sum(l.posted_delta) AS posted_delta
              FROM line AS l GROUP BY l.tenant_id) AS t
        WHERE a.tenant_id = t.tenant_id
    ),
    freed AS (
        DELETE FROM reservations AS r USING billed AS b
        WHERE b.was_open AND r.request_id = b.request_id
    ),
    ended AS (
        UPDATE usage AS u
        SET state = 'settled',
            cause = b.cause,
            settled_by = CASE WHEN b.fixes THEN 'gateway' ELSE coalesce(u.settled_by, 'sweeper') END,
            attempts = b.attempts,
            metered_prompt_tokens = b.prompt_tokens,
            metered_cached_tokens = b.cached_tokens,
            metered_output_tokens = b.output_tokens,
            accepted_tokens = b.accepted_tokens,
            billed_micro = b.bill,
            bill_limit_micro = CASE WHEN b.bill < b.due THEN b.bill ELSE b.bill_limit_micro END,
            delivered_tokens = CASE WHEN b.fixes THEN b.delivered_tokens ELSE u.delivered_tokens END,
            queue_ms = CASE WHEN b.fixes THEN (b.timings).queue_ms ELSE u.queue_ms END,
            prefill_ms = CASE WHEN b.fixes THEN (b.timings).prefill_ms ELSE u.prefill_ms END,
            first_token_ms =
                CASE WHEN b.fixes THEN (b.timings).first_token_ms ELSE u.first_token_ms END,
            inter_token_ms =
                CASE WHEN b.fixes THEN (b.timings).inter_token_ms ELSE u.inter_token_ms END,
            total_ms = CASE WHEN b.fixes THEN (b.timings).total_ms ELSE u.total_ms END,
            ended_ms = CASE WHEN b.fixes OR b.was_open THEN b.ended_ms ELSE u.ended_ms END
        FROM billed AS b
        WHERE u.request_id = b.request_id
          AND (b.fixes OR b.was_open OR b.bill < b.due OR u.billed_micro <> b.bill
               OR u.cause <> b.cause
               OR (u.attempts, u.metered_prompt_tokens, u.metered_cached_tokens,
                   u.metered_output_tokens, u.accepted_tokens)
                  <> (b.attempts, b.prompt_tokens, b.cached_tokens, b.output_tokens,
                      b.accepted_tokens))
    )
    SELECT 'settle', b.n, NULL::text, NULL::bigint, NULL::bigint, NULL::bigint,
           b.bill, b.cause, b.prompt_tokens, b.cached_tokens, b.output_tokens
    FROM billed AS b;
END $$;

CREATE FUNCTION ledger_settle(p_settles settle_command[], p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_settle record;
    v_answered bigint;
    v_answer ledger_answer;
BEGIN
    PERFORM ledger_hear(array_agg(
        ROW (s.request_id, a.attempt, 'gateway', a.replica_id, a.usage, false, false, '',
             s.ended_ms)::witness_word))
    FROM unnest(p_settles) AS s
    JOIN usage AS u
        ON u.request_id = s.request_id AND u.tenant_id IS NOT DISTINCT FROM s.tenant_id
    CROSS JOIN LATERAL unnest(s.attempts) AS a;

    RETURN QUERY
    SELECT * FROM ledger_close(
        ARRAY(SELECT ROW (s.request_id, s.tenant_id, 'gateway', s.cause, s.delivered_tokens,
                          s.timings, s.ended_ms)::ending
              FROM unnest(p_settles) AS s),
        p_billing_causes);
    GET DIAGNOSTICS v_answered = ROW_COUNT;
    IF v_answered = cardinality(p_settles) THEN
        RETURN;
    END IF;

    FOR v_settle IN
        SELECT s.n, s.request_id, s.tenant_id, u.request_id IS NOT NULL AS is_taken,
               s.cause = 'not_started' AND cardinality(s.attempts) = 0 AS is_release
        FROM unnest(p_settles) WITH ORDINALITY
             AS s (request_id, tenant_id, cause, attempts, delivered_tokens, timings, ended_ms, n)
        LEFT JOIN usage AS u ON u.request_id = s.request_id
        WHERE u.tenant_id IS DISTINCT FROM s.tenant_id
    LOOP
        v_answer := NULL;
        v_answer.kind := 'settle';
        v_answer.n := v_settle.n;
        IF v_settle.is_taken OR NOT v_settle.is_release THEN
            v_answer.refused := 'not_open';
        ELSE
            -- Released before it was reserved: the reserve may still be on its way.
            INSERT INTO refusals VALUES (v_settle.request_id, v_settle.tenant_id, 'not_open', 0, 0, 0)
            ON CONFLICT (request_id) DO NOTHING;
            v_answer.billed_micro := 0;
            v_answer.cause := 'not_started';
            v_answer.prompt_tokens := 0;
            v_answer.cached_tokens := 0;
            v_answer.output_tokens := 0;
        END IF;
        RETURN NEXT v_answer;
    END LOOP;
END $$;

-- The sweeper's word on requests of a silent gateway.
CREATE FUNCTION ledger_expire(p_request_ids text[], p_ended_ms bigint, p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM accounts AS a
    WHERE a.tenant_id IN (SELECT u.tenant_id FROM usage AS u
                          WHERE u.request_id = ANY (p_request_ids))
    ORDER BY a.tenant_id FOR NO KEY UPDATE;
    RETURN QUERY
    SELECT * FROM ledger_close(
        ARRAY(SELECT ROW (u.request_id, u.tenant_id, 'sweeper', NULL, 0, NULL, p_ended_ms)::ending
              FROM usage AS u WHERE u.request_id = ANY (p_request_ids) ORDER BY u.request_id),
        p_billing_causes);
END $$;

-- Takes recorded witnesses into account, for requests that have ended. The witnesses must be
-- committed before: then either this sees the settlement, or the settlement sees them.
CREATE FUNCTION ledger_recount(p_request_ids text[], p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM accounts AS a
    WHERE a.tenant_id IN (SELECT u.tenant_id FROM usage AS u
                          WHERE u.request_id = ANY (p_request_ids))
    ORDER BY a.tenant_id FOR NO KEY UPDATE;
    -- Requests not known yet keep their place, so that answers are numbered as the ids are.
    RETURN QUERY
    SELECT * FROM ledger_close(
        ARRAY(SELECT ROW (i.request_id, u.tenant_id, 'witness', NULL, 0, NULL, 0)::ending
              FROM unnest(p_request_ids) WITH ORDINALITY AS i (request_id, n)
              LEFT JOIN usage AS u ON u.request_id = i.request_id ORDER BY i.n),
        p_billing_causes);
END $$;

---------------------------------------------------------------------------------- reservations

CREATE FUNCTION ledger_top_up(p_top_ups top_up_command[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_more record;
    v_account accounts;
    v_extra bigint;
    v_answer ledger_answer;
BEGIN
    FOR v_more IN
        SELECT t.n, t.request_id, t.tenant_id, t.total_micro, r.reserved_micro AS held
        FROM unnest(p_top_ups) WITH ORDINALITY AS t (request_id, tenant_id, total_micro, n)
        LEFT JOIN reservations AS r
            ON r.request_id = t.request_id AND r.tenant_id = t.tenant_id
        ORDER BY t.tenant_id, t.n
    LOOP
        v_answer := NULL;
        v_answer.kind := 'top_up';
        v_answer.n := v_more.n;
        v_extra := v_more.total_micro - v_more.held;
        IF v_more.held IS NULL THEN
            v_answer.refused := 'not_open';
        ELSIF v_extra <= 0 THEN
            v_answer.reserved_micro := v_more.held;
        ELSE
            SELECT * INTO STRICT v_account FROM accounts WHERE tenant_id = v_more.tenant_id;
            IF v_account.posted_micro + v_account.reserved_micro + v_extra
               > v_account.hard_cap_micro THEN
                v_answer.refused := 'hard_cap';
                v_answer.reserved_micro := v_account.reserved_micro;
                v_answer.posted_micro := v_account.posted_micro;
                v_answer.hard_cap_micro := v_account.hard_cap_micro;
            ELSE
                UPDATE accounts
                SET reserved_micro = reserved_micro + v_extra, entries = entries + 1
                WHERE tenant_id = v_more.tenant_id;
                UPDATE reservations SET reserved_micro = v_more.total_micro
                WHERE request_id = v_more.request_id;
                UPDATE usage SET reserved_micro = v_more.total_micro
                WHERE request_id = v_more.request_id;
                INSERT INTO entries
                VALUES (v_more.tenant_id, v_account.entries + 1, v_more.request_id, 'top_up',
                        v_extra, 0, v_account.reserved_micro + v_extra, v_account.posted_micro);
                v_answer.reserved_micro := v_more.total_micro;
            END IF;
        END IF;
        RETURN NEXT v_answer;
    END LOOP;
END $$;

-- Each request id comes once in a call.
CREATE FUNCTION ledger_reserve(p_reserves reserve_command[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_asked record;
    v_tenant text;
    v_entries bigint;
    v_reserved bigint;
    v_answer ledger_answer;
    -- At the position of each command that was accepted:
    v_seq bigint[] := '{}';
    v_reserved_after bigint[] := '{}';
    v_posted bigint[] := '{}';
BEGIN
    FOR v_asked IN
        SELECT c.n::integer AS n, c.request_id, c.tenant_id, c.amount_micro,
               u.reserved_micro AS known_reserved,
               (u.gateway_id, u.tenant_id, u.key_id, u.amount_micro, u.price_id, u.model,
                u.version, u.region, u.service_class, u.dialect, u.endpoint, u.stream,
                u.prompt_tokens, u.max_tokens, u.choices, u.created_ms)
               = (c.gateway_id, c.tenant_id, c.key_id, c.amount_micro, c.price_id, c.model,
                  c.version, c.region, c.service_class, c.dialect, c.endpoint, c.stream,
                  c.prompt_tokens, c.max_tokens, c.choices, c.created_ms) AS is_same,
               f.reason AS refused, f.reserved_micro AS refused_reserved,
               f.posted_micro AS refused_posted, f.hard_cap_micro AS refused_hard_cap,
               a.tenant_id AS account, a.hard_cap_micro, a.posted_micro, a.reserved_micro,
               a.entries, p.id AS price
        FROM unnest(p_reserves) WITH ORDINALITY
             AS c (request_id, gateway_id, tenant_id, key_id, amount_micro, price_id, model,
                   version, region, service_class, dialect, endpoint, stream, prompt_tokens,
                   max_tokens, choices, created_ms, n)
        LEFT JOIN usage AS u ON u.request_id = c.request_id
        LEFT JOIN refusals AS f ON f.request_id = c.request_id
        LEFT JOIN accounts AS a ON a.tenant_id = c.tenant_id
        LEFT JOIN prices AS p ON p.id = c.price_id
        ORDER BY c.tenant_id, c.n
    LOOP
        IF v_asked.tenant_id IS DISTINCT FROM v_tenant THEN
            v_tenant := v_asked.tenant_id;
            v_entries := v_asked.entries;
            v_reserved := v_asked.reserved_micro;
        END IF;
        v_answer := NULL;
        v_answer.kind := 'reserve';
        v_answer.n := v_asked.n;

        IF v_asked.known_reserved IS NOT NULL AND v_asked.is_same THEN
            v_answer.reserved_micro := v_asked.known_reserved;
            RETURN NEXT v_answer;
            CONTINUE;
        ELSIF v_asked.known_reserved IS NOT NULL THEN
            v_answer.refused := 'id_reused';
            RETURN NEXT v_answer;
            CONTINUE;
        ELSIF v_asked.refused IS NOT NULL THEN
            v_answer.refused := v_asked.refused;
            v_answer.reserved_micro := v_asked.refused_reserved;
            v_answer.posted_micro := v_asked.refused_posted;
            v_answer.hard_cap_micro := v_asked.refused_hard_cap;
            RETURN NEXT v_answer;
            CONTINUE;
        ELSIF v_asked.account IS NULL THEN
            v_answer.refused := 'no_account';
        ELSIF v_asked.price IS NULL THEN
            v_answer.refused := 'no_price';
        ELSIF v_asked.posted_micro + v_reserved + v_asked.amount_micro
              > v_asked.hard_cap_micro THEN
            v_answer.refused := 'hard_cap';
            v_answer.reserved_micro := v_reserved;
            v_answer.posted_micro := v_asked.posted_micro;
            v_answer.hard_cap_micro := v_asked.hard_cap_micro;
        END IF;

        IF v_answer.refused IS NOT NULL THEN
            INSERT INTO refusals
            VALUES (v_asked.request_id, v_asked.tenant_id, v_answer.refused,
                    coalesce(v_answer.reserved_micro, 0), coalesce(v_answer.posted_micro, 0),
                    coalesce(v_answer.hard_cap_micro, 0))
            ON CONFLICT (request_id) DO NOTHING;
        ELSE
            v_entries := v_entries + 1;
            v_reserved := v_reserved + v_asked.amount_micro;
            v_seq[v_asked.n] := v_entries;
            v_reserved_after[v_asked.n] := v_reserved;
            v_posted[v_asked.n] := v_asked.posted_micro;
            v_answer.reserved_micro := v_asked.amount_micro;
        END IF;
        RETURN NEXT v_answer;
    END LOOP;
    IF cardinality(v_seq) > 0 THEN
        PERFORM ledger_hold(p_reserves, v_seq, v_reserved_after, v_posted);
    END IF;
END $$;

-- Writes down the accepted among `p_reserves`: those with an entry number at their position.
CREATE FUNCTION ledger_hold(
    p_reserves reserve_command[], p_seq bigint[], p_reserved_after bigint[], p_posted bigint[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    -- Assigning at positions leaves an array's lower bound at the first of them.
    v_first integer := array_lower(p_seq, 1);
BEGIN
    INSERT INTO entries (tenant_id, seq, request_id, kind, reserved_delta_micro,
                         posted_delta_micro, reserved_micro, posted_micro)
    SELECT c.tenant_id, c.seq, c.request_id, 'reserve', c.amount_micro, 0, c.reserved_after,
           c.posted
    FROM ROWS FROM (unnest(p_reserves[v_first:]), unnest(p_seq), unnest(p_reserved_after),
                    unnest(p_posted))
         AS c (request_id, gateway_id, tenant_id, key_id, amount_micro, price_id, model, version,
               region, service_class, dialect, endpoint, stream, prompt_tokens, max_tokens,
               choices, created_ms, seq, reserved_after, posted)
    WHERE c.seq IS NOT NULL;

    WITH held AS (
        SELECT *
        FROM ROWS FROM (unnest(p_reserves[v_first:]), unnest(p_seq))
             AS c (request_id, gateway_id, tenant_id, key_id, amount_micro, price_id, model,
                   version, region, service_class, dialect, endpoint, stream, prompt_tokens,
                   max_tokens, choices, created_ms, seq)
        WHERE c.seq IS NOT NULL
    ),
    reserved AS (
        INSERT INTO reservations (request_id, tenant_id, gateway_id, reserved_micro)
        SELECT h.request_id, h.tenant_id, h.gateway_id, h.amount_micro FROM held AS h
    ),
    opened AS (
        INSERT INTO usage (request_id, tenant_id, key_id, gateway_id, model, version, region,
                           service_class, dialect, endpoint, stream, price_id, prompt_tokens,
                           max_tokens, choices, amount_micro, reserved_micro, state, created_ms)
        SELECT h.request_id, h.tenant_id, h.key_id, h.gateway_id, h.model, h.version, h.region,
               h.service_class, h.dialect, h.endpoint, h.stream, h.price_id, h.prompt_tokens,
               h.max_tokens, h.choices, h.amount_micro, h.amount_micro, 'open', h.created_ms
        FROM held AS h
    )
    UPDATE accounts AS a
    SET reserved_micro = a.reserved_micro + t.amount_micro, entries = a.entries + t.lines
    FROM (SELECT h.tenant_id, sum(h.amount_micro) AS amount_micro, count(*) AS lines
          FROM held AS h GROUP BY h.tenant_id) AS t
    WHERE a.tenant_id = t.tenant_id;
END $$;

----------------------------------------------------------------------------------------- batch

-- One batch of a group commit: one transaction, in an order that its callers, who are all still
-- waiting, cannot tell from any other. Endings first: they make room under a hard cap. No
-- request id comes twice. An empty list may be given as NULL.
CREATE FUNCTION ledger_apply(
    p_tenants text[], p_settles json, p_top_ups json, p_reserves json, p_billing_causes text[]
) RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM accounts AS a
    WHERE a.tenant_id = ANY (p_tenants) ORDER BY a.tenant_id FOR NO KEY UPDATE;
    IF p_settles IS NOT NULL THEN
        RETURN QUERY SELECT * FROM ledger_settle(
            ARRAY(SELECT i FROM json_populate_recordset(NULL::settle_command, p_settles) AS i),
            p_billing_causes);
    END IF;
    IF p_top_ups IS NOT NULL THEN
        RETURN QUERY SELECT * FROM ledger_top_up(
            ARRAY(SELECT i FROM json_populate_recordset(NULL::top_up_command, p_top_ups) AS i));
    END IF;
    IF p_reserves IS NOT NULL THEN
        RETURN QUERY SELECT * FROM ledger_reserve(
            ARRAY(SELECT i FROM json_populate_recordset(NULL::reserve_command, p_reserves) AS i));
    END IF;
END $$;
