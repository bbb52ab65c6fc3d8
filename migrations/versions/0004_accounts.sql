-- The ledger, deepened: credits, caps, operators' corrections, a hash chain, usage by month.
-- Its rules are told in core/ledger.py and core/caps.py, which these functions must agree with.
--
-- Money is bigint micro-units. The busy tables have no foreign keys, whose triggers would cost
-- more than the rows: the functions check what the keys would. Every function that changes a
-- balance first locks its accounts, in the order of their ids, and each later statement sees
-- what was committed before the lock was given.
--
-- An open request is a row of `reservations`, written once and deleted once; when it ends it
-- becomes a row of `usage`, in the partition of the month that its id was made in.

----------------------------------------------------------------------------- what 0002 had here

-- A batch that is under way ends before anything is read here, and the next comes after.
LOCK TABLE accounts, entries, reservations, refusals, usage, witnesses IN ACCESS EXCLUSIVE MODE;

DROP FUNCTION ledger_apply, ledger_reserve, ledger_hold, ledger_top_up, ledger_recount,
    ledger_expire, ledger_settle, ledger_close, ledger_due, ledger_charge, ledger_metered,
    ledger_hear;
DROP AGGREGATE ledger_filled (bigint, bigint, bigint);
DROP FUNCTION ledger_fill_up;
DROP TYPE reserve_command, top_up_command, settle_command, attempt_totals, witness_word, ending,
    request_timings, token_totals, ledger_answer;

CREATE TEMPORARY TABLE old_usage ON COMMIT DROP AS SELECT * FROM usage;
CREATE TEMPORARY TABLE old_witnesses ON COMMIT DROP AS SELECT * FROM witnesses;
CREATE TEMPORARY TABLE old_reservations ON COMMIT DROP AS SELECT * FROM reservations;
CREATE TEMPORARY TABLE old_refusals ON COMMIT DROP AS SELECT * FROM refusals;
DROP TABLE usage, witnesses, reservations, refusals;

---------------------------------------------------------------------------------------- months

-- yyyymm of a request id `…_<12 hex: Unix ms><16 hex>`, in UTC; 0 of any other id. By this alone
-- a request's rows are found, whatever else is known of it.
CREATE FUNCTION ledger_id_time(p_request_id text)
RETURNS timestamp LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT '1970-01-01'::timestamp
           + interval '1 millisecond' * ('x' || left(right(p_request_id, 28), 12))::bit(48)::bigint
$$;
CREATE FUNCTION ledger_month(p_request_id text)
RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        -- A regular expression would cost more than all the rest of a reservation. The last
        -- millisecond of the year 9999 is e677d21fdbff.
        WHEN translate(right(p_request_id, 29), '0123456789abcdef', '') = '_'
             AND left(right(p_request_id, 29), 1) = '_' AND length(p_request_id) >= 29
             AND right(p_request_id, 28) < 'e677d21fdc00' COLLATE "C"
        THEN (date_part('year', ledger_id_time(p_request_id)) * 100
              + date_part('month', ledger_id_time(p_request_id)))::integer
        ELSE 0
    END
$$;

---------------------------------------------------------------------------------------- tables

ALTER TABLE accounts
    ADD COLUMN prepaid      boolean NOT NULL DEFAULT false,
    ADD COLUMN credit_micro bigint NOT NULL DEFAULT 0,
    ADD COLUMN caps         integer NOT NULL DEFAULT 0 CHECK (caps >= 0),
    ADD COLUMN head         bytea NOT NULL DEFAULT '';

ALTER TABLE entries
    ADD COLUMN credit_delta_micro bigint NOT NULL DEFAULT 0,
    ADD COLUMN credit_micro       bigint NOT NULL DEFAULT 0,
    ADD COLUMN adjustment_id      text NOT NULL DEFAULT '',
    ADD COLUMN reason             text NOT NULL DEFAULT '',
    ADD COLUMN author             text NOT NULL DEFAULT '',
    ADD COLUMN chain              bytea;

CREATE TYPE adjust_command AS (
    id text, tenant_id text, kind text, amount_micro bigint, request_id text, price_id text,
    reason text, author text
);
-- What operators have said, word for word, to tell a repeat from another command of the same id.
CREATE TABLE adjustments (
    id        text PRIMARY KEY,
    tenant_id text NOT NULL,
    entry     bigint NOT NULL,
    word      jsonb NOT NULL
);
CREATE TRIGGER adjustments_append_only
    BEFORE UPDATE OR DELETE OR TRUNCATE ON adjustments
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE TABLE caps (
    tenant_id  text NOT NULL REFERENCES accounts (tenant_id),
    key_id     text NOT NULL,
    period     text NOT NULL CHECK (period IN ('day', 'month', 'total')),
    soft_micro bigint CHECK (soft_micro >= 0),
    hard_micro bigint CHECK (hard_micro >= 0),
    since      date NOT NULL,
    PRIMARY KEY (tenant_id, key_id, period)
);

CREATE TABLE cap_windows (
    tenant_id      text NOT NULL,
    key_id         text NOT NULL,
    period         text NOT NULL,
    starts         date NOT NULL,
    posted_micro   bigint NOT NULL DEFAULT 0,
    reserved_micro bigint NOT NULL DEFAULT 0,
    soft_passed_at timestamptz,
    announced      boolean NOT NULL DEFAULT false,
    PRIMARY KEY (tenant_id, key_id, period, starts),
    FOREIGN KEY (tenant_id, key_id, period) REFERENCES caps ON DELETE CASCADE
) WITH (fillfactor = 50);
CREATE INDEX cap_windows_unannounced_idx ON cap_windows (soft_passed_at)
    WHERE soft_passed_at IS NOT NULL AND NOT announced;

-- What is held now, and all that its request asked: a small table, though `usage` grows.
CREATE TABLE reservations (
    request_id     text COLLATE "C" PRIMARY KEY,
    month          integer NOT NULL,
    tenant_id      text NOT NULL,
    key_id         text NOT NULL,
    gateway_id     text NOT NULL,
    model          text NOT NULL,
    version        text NOT NULL,
    region         text NOT NULL,
    service_class  text NOT NULL,
    dialect        text NOT NULL,
    endpoint       text NOT NULL,
    stream         boolean NOT NULL,
    price_id       text NOT NULL,
    prompt_tokens  bigint NOT NULL,
    max_tokens     bigint NOT NULL,
    choices        integer NOT NULL,
    amount_micro   bigint NOT NULL CHECK (amount_micro >= 0),
    floor_micro    bigint,
    reserved_micro bigint NOT NULL CHECK (reserved_micro >= 0),
    day            date NOT NULL,
    created_ms     bigint NOT NULL,
    opened_at      timestamptz NOT NULL DEFAULT now()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);

-- Ids that were refused, or released before they were reserved. Kept for a day.
CREATE TABLE refusals (
    request_id     text COLLATE "C" PRIMARY KEY,
    tenant_id      text NOT NULL,
    reason         text NOT NULL,
    limit_name     text NOT NULL DEFAULT '',
    reserved_micro bigint NOT NULL DEFAULT 0,
    posted_micro   bigint NOT NULL DEFAULT 0,
    hard_cap_micro bigint NOT NULL DEFAULT 0,
    fits_micro     bigint NOT NULL DEFAULT 0,
    at             timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX refusals_at_idx ON refusals (at);

-- One row for each request that has ended. `billed_micro` is the policy's word,
-- `adjusted_micro` the operators'; what it costs is their sum.
CREATE TABLE usage (
    request_id                    text COLLATE "C" NOT NULL,
    month                         integer NOT NULL,
    tenant_id                     text NOT NULL,
    key_id                        text NOT NULL,
    gateway_id                    text NOT NULL,
    model                         text NOT NULL,
    version                       text NOT NULL,
    region                        text NOT NULL,
    service_class                 text NOT NULL,
    dialect                       text NOT NULL,
    endpoint                      text NOT NULL,
    stream                        boolean NOT NULL,
    price_id                      text NOT NULL,
    prompt_tokens                 bigint NOT NULL,
    max_tokens                    bigint NOT NULL,
    choices                       integer NOT NULL,
    amount_micro                  bigint NOT NULL,
    floor_micro                   bigint,
    reserved_micro                bigint NOT NULL,
    day                           date NOT NULL,
    cause                         text NOT NULL,
    settled_by                    text NOT NULL CHECK (settled_by IN ('gateway', 'sweeper')),
    attempts                      integer NOT NULL,
    metered_prompt_tokens         bigint NOT NULL,
    metered_cached_tokens         bigint NOT NULL,
    metered_cache_write_5m_tokens bigint NOT NULL,
    metered_cache_write_1h_tokens bigint NOT NULL,
    metered_output_tokens         bigint NOT NULL,
    metered_reasoning_tokens      bigint NOT NULL,
    accepted_tokens               bigint NOT NULL,
    delivered_tokens              bigint NOT NULL,
    billed_micro                  bigint NOT NULL CHECK (billed_micro >= 0),
    adjusted_micro                bigint NOT NULL DEFAULT 0,
    bill_limit_micro              bigint,
    queue_ms                      double precision,
    prefill_ms                    double precision,
    first_token_ms                double precision,
    inter_token_ms                double precision,
    total_ms                      double precision,
    created_ms                    bigint NOT NULL,
    ended_ms                      bigint NOT NULL,
    PRIMARY KEY (request_id, month)
) PARTITION BY RANGE (month);
CREATE INDEX usage_tenant_id_created_ms_idx ON usage (tenant_id, created_ms);
CREATE TABLE usage_other PARTITION OF usage DEFAULT;

-- One row for each (request, attempt, source); the request may be one we never heard of.
CREATE TABLE witnesses (
    request_id            text COLLATE "C" NOT NULL,
    month                 integer NOT NULL,
    attempt               integer NOT NULL,
    source                text NOT NULL CHECK (source IN ('gateway', 'journal', 'checkpoint')),
    replica_id            text NOT NULL,
    prompt_tokens         bigint NOT NULL,
    cached_tokens         bigint NOT NULL CHECK (cached_tokens >= 0),
    cache_write_5m_tokens bigint NOT NULL CHECK (cache_write_5m_tokens >= 0),
    cache_write_1h_tokens bigint NOT NULL CHECK (cache_write_1h_tokens >= 0),
    output_tokens         bigint NOT NULL,
    reasoning_tokens      bigint NOT NULL CHECK (reasoning_tokens BETWEEN 0 AND output_tokens),
    exact                 boolean NOT NULL,
    final                 boolean NOT NULL,
    cause                 text NOT NULL,
    at_ms                 bigint NOT NULL,
    recorded_at           timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (request_id, month, attempt, source),
    CONSTRAINT witnesses_prompt_check
        CHECK (cached_tokens + cache_write_5m_tokens + cache_write_1h_tokens <= prompt_tokens)
) PARTITION BY RANGE (month);
CREATE TABLE witnesses_other PARTITION OF witnesses DEFAULT;

-- What each correction of an ended request changed, beside the entry of the same number: with
-- the entries of endings, all that ever happened to `usage`, in order for each tenant.
CREATE TABLE usage_corrections (
    tenant_id    text NOT NULL,
    seq          bigint NOT NULL,
    request_id   text COLLATE "C" NOT NULL,
    month        integer NOT NULL,
    d_prompt     bigint NOT NULL DEFAULT 0,
    d_cached     bigint NOT NULL DEFAULT 0,
    d_write_5m   bigint NOT NULL DEFAULT 0,
    d_write_1h   bigint NOT NULL DEFAULT 0,
    d_output     bigint NOT NULL DEFAULT 0,
    d_reasoning  bigint NOT NULL DEFAULT 0,
    d_accepted   bigint NOT NULL DEFAULT 0,
    d_delivered  bigint NOT NULL DEFAULT 0,
    d_billed     bigint NOT NULL DEFAULT 0,
    d_adjusted   bigint NOT NULL DEFAULT 0,
    from_cause   text NOT NULL,
    to_cause     text NOT NULL,
    PRIMARY KEY (tenant_id, seq)
);
CREATE INDEX usage_corrections_request_id_idx ON usage_corrections (request_id);

-- What was billed in months whose rows are gone.
CREATE TABLE usage_retired (
    tenant_id      text NOT NULL,
    month          integer NOT NULL,
    requests       bigint NOT NULL,
    billed_micro   bigint NOT NULL,
    adjusted_micro bigint NOT NULL,
    PRIMARY KEY (tenant_id, month)
);

ALTER TABLE gateways
    ADD COLUMN spool_bytes   bigint NOT NULL DEFAULT 0,
    ADD COLUMN refused_words bigint NOT NULL DEFAULT 0;

-- Every accepted request, open or ended. Columns have one type on both sides, or a page of them
-- could not be read off the indexes.
CREATE VIEW requests AS
SELECT u.request_id, u.month, u.tenant_id, u.key_id, u.gateway_id, u.model, u.version, u.region,
       u.service_class, u.dialect, u.endpoint, u.stream, u.price_id, u.prompt_tokens,
       u.max_tokens, u.choices, u.amount_micro, u.floor_micro, u.reserved_micro, u.day,
       'settled' AS state, u.cause, u.settled_by, u.attempts, u.metered_prompt_tokens,
       u.metered_cached_tokens, u.metered_cache_write_5m_tokens,
       u.metered_cache_write_1h_tokens, u.metered_output_tokens, u.metered_reasoning_tokens,
       u.accepted_tokens, u.delivered_tokens, u.billed_micro, u.adjusted_micro,
       u.bill_limit_micro, u.queue_ms, u.prefill_ms, u.first_token_ms, u.inter_token_ms,
       u.total_ms, u.created_ms, u.ended_ms
FROM usage AS u
UNION ALL
SELECT r.request_id, r.month, r.tenant_id, r.key_id, r.gateway_id, r.model, r.version, r.region,
       r.service_class, r.dialect, r.endpoint, r.stream, r.price_id, r.prompt_tokens,
       r.max_tokens, r.choices, r.amount_micro, r.floor_micro, r.reserved_micro, r.day,
       'open', NULL, NULL, 0, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint,
       0::bigint, 0::bigint, 0::bigint, 0::bigint,
       NULL, NULL, NULL, NULL, NULL, NULL, r.created_ms, NULL
FROM reservations AS r;

------------------------------------------------------------------------------------ partitions

-- Partitions of `usage` and `witnesses` for `p_months` months from the one of `p_from`. Rows that
-- came before their month's partition are moved into it.
CREATE FUNCTION ledger_make_partitions(p_from date, p_months integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_day date;
    v_month integer;
    v_parent text;
    v_name text;
    v_made integer := 0;
BEGIN
    FOR i IN 0 .. p_months - 1 LOOP
        v_day := date_trunc('month', p_from::timestamp) + i * interval '1 month';
        v_month := to_char(v_day, 'YYYYMM');
        FOREACH v_parent IN ARRAY ARRAY['usage', 'witnesses'] LOOP
            v_name := v_parent || to_char(v_day, '"_y"YYYY"m"MM');
            CONTINUE WHEN to_regclass(v_name) IS NOT NULL;
            -- Or one of the month's rows could come between the move and the new partition.
            EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', v_parent || '_other');
            EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL) WITH (%s)', v_name, v_parent,
                           'autovacuum_vacuum_insert_scale_factor = 0.05');
            EXECUTE format('WITH moved AS (DELETE FROM %I WHERE month = %s RETURNING *)
                            INSERT INTO %I SELECT * FROM moved',
                           v_parent || '_other', v_month, v_name);
            EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                           v_parent, v_name, v_month, v_month + 1);
            v_made := v_made + 1;
        END LOOP;
    END LOOP;
    RETURN v_made;
END $$;

-- Forgets a month's requests and witnesses; what they came to is kept for each tenant. The
-- number of rows forgotten; NULL where there is no such partition. The sums are taken under a
-- reader's lock; the tables are then locked whole, in the order in which every statement locks
-- them, for as long as two drops take: a statement planned for all partitions waits for each of
-- them. Whoever calls this bounds `lock_timeout`, under the server's `deadlock_timeout`, so that
-- it is we who give way; it is tried again.
CREATE FUNCTION ledger_drop_month(p_month integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_suffix text := format('_y%sm%s', p_month / 100, lpad((p_month % 100)::text, 2, '0'));
    v_rows bigint;
BEGIN
    IF to_regclass('usage' || v_suffix) IS NULL THEN
        RETURN NULL;
    END IF;
    EXECUTE format(
        'WITH month AS (
             SELECT tenant_id, count(*) AS requests, sum(billed_micro) AS billed_micro,
                    sum(adjusted_micro) AS adjusted_micro
             FROM %I GROUP BY tenant_id
         ),
         kept AS (
             INSERT INTO usage_retired AS t
             SELECT m.tenant_id, %s, m.requests, m.billed_micro, m.adjusted_micro FROM month AS m
             ON CONFLICT (tenant_id, month) DO UPDATE
             SET requests = t.requests + excluded.requests,
                 billed_micro = t.billed_micro + excluded.billed_micro,
                 adjusted_micro = t.adjusted_micro + excluded.adjusted_micro
         )
         SELECT coalesce(sum(m.requests), 0) FROM month AS m',
        'usage' || v_suffix, p_month) INTO v_rows;
    DELETE FROM usage_corrections WHERE month = p_month;
    FOR i IN REVERSE 20 .. 1 LOOP
        BEGIN
            LOCK TABLE ONLY usage, ONLY witnesses IN ACCESS EXCLUSIVE MODE;
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            IF i = 1 THEN
                RAISE;
            END IF;
            PERFORM pg_sleep(0.5);
        END;
    END LOOP;
    EXECUTE format('DROP TABLE %I, %I', 'usage' || v_suffix, 'witnesses' || v_suffix);
    RETURN v_rows;
END $$;

----------------------------------------------------------------------------------------- types

-- Fields are named as in core/metering.py, so that a command's JSON is read as it is.
CREATE TYPE reserve_command AS (
    request_id text, gateway_id text, tenant_id text, key_id text, amount_micro bigint,
    floor_micro bigint, price_id text, model text, version text, region text,
    service_class text, dialect text, endpoint text, stream boolean, prompt_tokens bigint,
    max_tokens bigint, choices integer, created_ms bigint
);
CREATE TYPE top_up_command AS (
    request_id text, tenant_id text, total_micro bigint, floor_micro bigint
);
CREATE TYPE token_totals AS (
    prompt_tokens bigint, cached_tokens bigint, output_tokens bigint,
    cache_write_5m_tokens bigint, cache_write_1h_tokens bigint, reasoning_tokens bigint
);
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
-- one that has. `own` is the gateway's word on its one attempt, not yet among the witnesses: to
-- be taken for the whole of it, and written down, if nobody else has spoken of the request.
CREATE TYPE ending AS (
    n bigint, request_id text, tenant_id text, said_by text, cause text,
    delivered_tokens bigint, timings request_timings, ended_ms bigint, own attempt_totals
);

-- An entry to be, in the order of its account.
CREATE TYPE ledger_line AS (
    tenant_id text, key_id text, day date, request_id text, kind text,
    reserved_delta bigint, posted_delta bigint, credit_delta bigint,
    adjustment_id text, reason text, author text
);

-- The answer to the n-th command (from 1) of its kind.
CREATE TYPE ledger_answer AS (
    kind text, n bigint, refused text, limit_name text,
    reserved_micro bigint, posted_micro bigint, hard_cap_micro bigint, fits_micro bigint,
    billed_micro bigint, cause text,
    prompt_tokens bigint, cached_tokens bigint, output_tokens bigint,
    cache_write_5m_tokens bigint, cache_write_1h_tokens bigint, reasoning_tokens bigint
);

--------------------------------------------------------------------------------------- entries

CREATE FUNCTION ledger_today() RETURNS date LANGUAGE sql STABLE AS $$
    SELECT (now() AT TIME ZONE 'UTC')::date
$$;

-- core.caps.window_start
CREATE FUNCTION ledger_window(p_period text, p_day date)
RETURNS date LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE p_period WHEN 'day' THEN p_day
                         WHEN 'month' THEN date_trunc('month', p_day::timestamp)::date
                         ELSE '0001-01-01'::date
           END
$$;

-- Microseconds: a timestamp as text depends on who reads it.
CREATE FUNCTION ledger_microseconds(p_at timestamptz)
RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT (extract(epoch FROM p_at) * 1000000)::bigint
$$;

-- Writes the lines down, in their order, and brings balances and caps' windows up to date. The
-- accounts are locked. The last line of each account carries the next link of its chain, made
-- from the one before and the text of every line since: whoever changes, drops or adds a line
-- afterwards would have to change all that follow, and the account's head.
CREATE FUNCTION ledger_post(p_lines ledger_line[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_at bigint := ledger_microseconds(now());
BEGIN
    WITH line AS (
        SELECT l.tenant_id, l.request_id, l.kind, l.reserved_delta, l.posted_delta,
               l.credit_delta, l.adjustment_id, l.reason, l.author,
               a.entries + row_number() OVER upto AS seq,
               (a.reserved_micro + sum(l.reserved_delta) OVER upto)::bigint AS reserved_micro,
               (a.posted_micro + sum(l.posted_delta) OVER upto)::bigint AS posted_micro,
               (a.credit_micro + sum(l.credit_delta) OVER upto)::bigint AS credit_micro
        FROM unnest(p_lines) WITH ORDINALITY
             AS l (tenant_id, key_id, day, request_id, kind, reserved_delta, posted_delta,
                   credit_delta, adjustment_id, reason, author, n)
        JOIN accounts AS a ON a.tenant_id = l.tenant_id
        WINDOW upto AS (PARTITION BY l.tenant_id ORDER BY l.n ROWS UNBOUNDED PRECEDING)
    ),
    link AS (
        SELECT l.tenant_id, max(l.seq) AS seq, sum(l.reserved_delta) AS reserved_delta,
               sum(l.posted_delta) AS posted_delta, sum(l.credit_delta) AS credit_delta,
               string_agg(ROW (l.seq, l.request_id, l.kind, l.reserved_delta, l.posted_delta,
                               l.credit_delta, l.reserved_micro, l.posted_micro, l.credit_micro,
                               l.adjustment_id, l.reason, l.author, v_at)::text,
                          E'\n' ORDER BY l.seq) AS text
        FROM line AS l GROUP BY l.tenant_id
    ),
    balanced AS (
        UPDATE accounts AS a
        SET entries = k.seq,
            reserved_micro = a.reserved_micro + k.reserved_delta,
            posted_micro = a.posted_micro + k.posted_delta,
            credit_micro = a.credit_micro + k.credit_delta,
            head = sha256(a.head || convert_to(k.text, 'UTF8'))
        FROM link AS k
        WHERE a.tenant_id = k.tenant_id
        RETURNING a.tenant_id, a.entries AS seq, a.head
    )
    INSERT INTO entries (tenant_id, seq, request_id, kind, reserved_delta_micro,
                         posted_delta_micro, credit_delta_micro, reserved_micro, posted_micro,
                         credit_micro, adjustment_id, reason, author, chain)
    SELECT l.tenant_id, l.seq, l.request_id, l.kind, l.reserved_delta, l.posted_delta,
           l.credit_delta, l.reserved_micro, l.posted_micro, l.credit_micro, l.adjustment_id,
           l.reason, l.author, CASE WHEN l.seq = b.seq THEN b.head END
    FROM line AS l JOIN balanced AS b ON b.tenant_id = l.tenant_id;

    IF EXISTS (SELECT FROM accounts AS a
               WHERE a.caps > 0 AND a.tenant_id IN (SELECT l.tenant_id FROM unnest(p_lines) AS l))
    THEN
        PERFORM ledger_count_in_windows(p_lines);
    END IF;
END $$;

-- core.ledger.Book._count_in_windows
CREATE FUNCTION ledger_count_in_windows(p_lines ledger_line[])
RETURNS void LANGUAGE sql AS $$
    INSERT INTO cap_windows AS w (tenant_id, key_id, period, starts, posted_micro,
                                  reserved_micro, soft_passed_at)
    SELECT d.tenant_id, d.key_id, d.period, d.starts, d.posted, d.reserved,
           CASE WHEN d.peak >= d.soft_micro THEN now() END
    FROM (SELECT t.tenant_id, t.key_id, t.period, t.starts, t.soft_micro,
                 sum(t.posted_delta) AS posted, sum(t.reserved_delta) AS reserved,
                 max(t.running) AS peak
          FROM (SELECT c.tenant_id, c.key_id, c.period, c.soft_micro,
                       ledger_window(c.period, l.day) AS starts, l.posted_delta,
                       l.reserved_delta,
                       coalesce(b.posted_micro, 0) + sum(l.posted_delta) OVER upto AS running
                FROM unnest(p_lines) WITH ORDINALITY
                     AS l (tenant_id, key_id, day, request_id, kind, reserved_delta,
                           posted_delta, credit_delta, adjustment_id, reason, author, n)
                JOIN caps AS c
                    ON c.tenant_id = l.tenant_id AND c.key_id IN ('', l.key_id)
                   AND ledger_window(c.period, l.day) >= ledger_window(c.period, c.since)
                LEFT JOIN cap_windows AS b
                    ON b.tenant_id = c.tenant_id AND b.key_id = c.key_id
                   AND b.period = c.period AND b.starts = ledger_window(c.period, l.day)
                WHERE l.day IS NOT NULL
                WINDOW upto AS (PARTITION BY c.tenant_id, c.key_id, c.period,
                                             ledger_window(c.period, l.day)
                                ORDER BY l.n ROWS UNBOUNDED PRECEDING)) AS t
          GROUP BY t.tenant_id, t.key_id, t.period, t.starts, t.soft_micro) AS d
    ON CONFLICT (tenant_id, key_id, period, starts) DO UPDATE
    SET posted_micro = w.posted_micro + excluded.posted_micro,
        reserved_micro = w.reserved_micro + excluded.reserved_micro,
        soft_passed_at = coalesce(w.soft_passed_at, excluded.soft_passed_at)
$$;

---------------------------------------------------------------------------------------- limits

-- core.ledger.Book._limits: what bounds a request of this key reserved on this day, in order.
CREATE FUNCTION ledger_limits(p_tenant text, p_key text, p_day date)
RETURNS TABLE (place integer, name text, cap_micro bigint, posted_micro bigint,
               reserved_micro bigint, room_micro bigint)
LANGUAGE sql STABLE AS $$
    SELECT t.place, t.name, t.cap_micro, t.posted_micro, t.reserved_micro,
           t.cap_micro - t.posted_micro - t.reserved_micro
    FROM (SELECT 1 AS place, 'credit' AS name, a.credit_micro AS cap_micro, a.posted_micro,
                 a.reserved_micro
          FROM accounts AS a WHERE a.tenant_id = p_tenant AND a.prepaid
          UNION ALL
          SELECT 2, 'account.total', a.hard_cap_micro, a.posted_micro, a.reserved_micro
          FROM accounts AS a WHERE a.tenant_id = p_tenant AND a.hard_cap_micro IS NOT NULL
          UNION ALL
          SELECT CASE WHEN c.key_id = '' THEN 3 ELSE 6 END
                 + CASE c.period WHEN 'day' THEN 0 WHEN 'month' THEN 1 ELSE 2 END,
                 CASE WHEN c.key_id = '' THEN 'account.' ELSE 'key.' END || c.period,
                 c.hard_micro, coalesce(w.posted_micro, 0), coalesce(w.reserved_micro, 0)
          FROM accounts AS a
          JOIN caps AS c ON c.tenant_id = a.tenant_id AND c.key_id IN ('', p_key)
          LEFT JOIN cap_windows AS w
              ON w.tenant_id = c.tenant_id AND w.key_id = c.key_id AND w.period = c.period
             AND w.starts = ledger_window(c.period, p_day)
          WHERE a.tenant_id = p_tenant AND a.caps > 0 AND c.hard_micro IS NOT NULL
            AND p_day IS NOT NULL
            AND ledger_window(c.period, p_day) >= ledger_window(c.period, c.since)) AS t
$$;

-- core.ledger.granted_micro: `reserved_micro` of the answer is what may be had.
CREATE FUNCTION ledger_grant(p_tenant text, p_key text, p_day date, p_wanted bigint, p_floor bigint)
RETURNS ledger_answer LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_answer ledger_answer;
    v_room bigint;
    v_limit record;
BEGIN
    SELECT min(l.room_micro) INTO v_room FROM ledger_limits(p_tenant, p_key, p_day) AS l;
    v_room := coalesce(v_room, p_wanted);
    IF v_room >= p_floor THEN
        v_answer.reserved_micro := least(p_wanted, v_room);
        RETURN v_answer;
    END IF;
    SELECT * INTO STRICT v_limit FROM ledger_limits(p_tenant, p_key, p_day) AS l
    WHERE l.room_micro < p_floor ORDER BY l.place LIMIT 1;
    v_answer.refused := 'hard_cap';
    v_answer.limit_name := v_limit.name;
    v_answer.reserved_micro := v_limit.reserved_micro;
    v_answer.posted_micro := v_limit.posted_micro;
    v_answer.hard_cap_micro := v_limit.cap_micro;
    v_answer.fits_micro := greatest(0, v_room);
    RETURN v_answer;
END $$;

------------------------------------------------------------------------------------------ caps

-- core.ledger.Book.set_cap: a new one counts what its current window holds already; and a later
-- one, of whose day somebody has reserved while we waited for the account. Requests of months
-- that are gone are counted from their sums.
CREATE FUNCTION ledger_set_cap(
    p_tenant text, p_key text, p_period text, p_soft bigint, p_hard bigint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_today date := ledger_today();
    v_starts date := ledger_window(p_period, v_today);
    v_is_new boolean;
BEGIN
    PERFORM 1 FROM accounts WHERE tenant_id = p_tenant FOR NO KEY UPDATE;
    SELECT NOT EXISTS (SELECT FROM caps WHERE tenant_id = p_tenant AND key_id = p_key
                                          AND period = p_period) INTO v_is_new;
    INSERT INTO caps VALUES (p_tenant, p_key, p_period, p_soft, p_hard, v_today)
    ON CONFLICT (tenant_id, key_id, period) DO UPDATE
    SET soft_micro = excluded.soft_micro, hard_micro = excluded.hard_micro;
    IF v_is_new THEN
        UPDATE accounts SET caps = caps + 1 WHERE tenant_id = p_tenant;
        INSERT INTO cap_windows (tenant_id, key_id, period, starts, posted_micro, reserved_micro)
        SELECT p_tenant, p_key, p_period, t.starts, sum(t.posted), sum(t.reserved)
        FROM (SELECT v_starts AS starts, 0 AS posted, 0 AS reserved
              UNION ALL
              SELECT ledger_window(p_period, u.day), u.billed_micro + u.adjusted_micro, 0
              FROM usage AS u
              WHERE u.tenant_id = p_tenant AND p_key IN ('', u.key_id)
              UNION ALL
              SELECT ledger_window(p_period, r.day), 0, r.reserved_micro
              FROM reservations AS r
              WHERE r.tenant_id = p_tenant AND p_key IN ('', r.key_id)
              UNION ALL
              SELECT v_starts, s.billed_micro + s.adjusted_micro, 0
              FROM usage_retired AS m
              JOIN usage_sums AS s
                  ON s.tenant_id = m.tenant_id AND s.month = m.month AND s.span_ms = 86400000
              WHERE p_period = 'total' AND m.tenant_id = p_tenant
                AND p_key IN ('', s.key_id)) AS t
        WHERE t.starts >= v_starts
        GROUP BY t.starts;
    END IF;
    UPDATE cap_windows SET soft_passed_at = now()
    WHERE tenant_id = p_tenant AND key_id = p_key AND period = p_period AND starts >= v_starts
      AND soft_passed_at IS NULL AND posted_micro >= p_soft;
END $$;

-- Whether there was one. Its windows go with it.
CREATE FUNCTION ledger_remove_cap(p_tenant text, p_key text, p_period text)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM accounts WHERE tenant_id = p_tenant FOR NO KEY UPDATE;
    DELETE FROM caps WHERE tenant_id = p_tenant AND key_id = p_key AND period = p_period;
    IF FOUND THEN
        UPDATE accounts SET caps = caps - 1 WHERE tenant_id = p_tenant;
        RETURN true;
    END IF;
    RETURN false;
END $$;

------------------------------------------------------------------------------------- witnesses

-- What a word leaves out is 0.
CREATE FUNCTION ledger_full(p_usage token_totals) RETURNS token_totals LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW (coalesce((p_usage).prompt_tokens, 0), coalesce((p_usage).cached_tokens, 0),
                coalesce((p_usage).output_tokens, 0),
                coalesce((p_usage).cache_write_5m_tokens, 0),
                coalesce((p_usage).cache_write_1h_tokens, 0),
                coalesce((p_usage).reasoning_tokens, 0))::token_totals
$$;

-- core.witnesses.merge: an exact word replaces the rest, else the largest totals stand. The keys
-- in one call are distinct.
CREATE FUNCTION ledger_hear(p_words witness_word[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO witnesses AS w
        (request_id, month, attempt, source, replica_id, prompt_tokens, cached_tokens,
         cache_write_5m_tokens, cache_write_1h_tokens, output_tokens, reasoning_tokens,
         exact, final, cause, at_ms)
    SELECT i.request_id, ledger_month(i.request_id), i.attempt, i.source, i.replica_id,
           coalesce((i.usage).prompt_tokens, 0), coalesce((i.usage).cached_tokens, 0),
           coalesce((i.usage).cache_write_5m_tokens, 0),
           coalesce((i.usage).cache_write_1h_tokens, 0),
           coalesce((i.usage).output_tokens, 0), coalesce((i.usage).reasoning_tokens, 0),
           i.exact, i.final, i.cause, i.at_ms
    FROM unnest(p_words) AS i
    ORDER BY i.request_id, i.attempt, i.source -- as everybody, who may have heard the same
    ON CONFLICT (request_id, month, attempt, source) DO UPDATE SET
        (replica_id, prompt_tokens, cached_tokens, cache_write_5m_tokens, cache_write_1h_tokens,
         output_tokens, reasoning_tokens, exact, final, cause, at_ms) =
        (SELECT CASE WHEN same THEN greatest(w.replica_id, excluded.replica_id)
                     ELSE excluded.replica_id END,
                prompt[1], prompt[2], prompt[4], prompt[3], output[1], output[2],
                excluded.exact,
                CASE WHEN same THEN w.final OR excluded.final ELSE excluded.final END,
                CASE WHEN same THEN greatest(w.cause, excluded.cause) ELSE excluded.cause END,
                CASE WHEN same THEN greatest(w.at_ms, excluded.at_ms) ELSE excluded.at_ms END
         FROM (SELECT w.exact = excluded.exact) AS rank (same),
              LATERAL (SELECT
                  CASE WHEN same
                       THEN greatest(ARRAY[w.prompt_tokens, w.cached_tokens,
                                           w.cache_write_1h_tokens, w.cache_write_5m_tokens], new)
                       ELSE new END,
                  CASE WHEN same THEN greatest(ARRAY[w.output_tokens, w.reasoning_tokens], made)
                       ELSE made END
               FROM (SELECT ARRAY[excluded.prompt_tokens, excluded.cached_tokens,
                                  excluded.cache_write_1h_tokens, excluded.cache_write_5m_tokens],
                            ARRAY[excluded.output_tokens, excluded.reasoning_tokens]
                    ) AS word (new, made)) AS stands (prompt, output))
    WHERE excluded.exact >= w.exact;
END $$;

-- core.witnesses.metered and accepted_tokens: one row, of zeros when nobody has heard of it.
CREATE FUNCTION ledger_metered(p_request_id text, p_month integer)
RETURNS TABLE (attempts integer, metered token_totals, accepted_tokens bigint)
LANGUAGE sql STABLE AS $$
    SELECT t.attempts,
           ROW (coalesce(t.prompt[1], 0), coalesce(t.prompt[2], 0), t.output,
                coalesce(t.prompt[4], 0), coalesce(t.prompt[3], 0), t.reasoning)::token_totals,
           t.accepted
    FROM (
        SELECT coalesce(max(a.attempt), 0) AS attempts, max(a.prompt) AS prompt,
               coalesce(sum(a.output[1]), 0)::bigint AS output,
               coalesce(sum(a.output[2]), 0)::bigint AS reasoning,
               coalesce(sum(least(a.output[1], a.accepted)), 0)::bigint AS accepted
        FROM (
            SELECT w.attempt,
                   coalesce(max(w.prompt) FILTER (WHERE w.exact), max(w.prompt)) AS prompt,
                   coalesce(max(w.output) FILTER (WHERE w.exact), max(w.output)) AS output,
                   coalesce(max(w.output[1]) FILTER (WHERE w.source = 'gateway'), 0) AS accepted
            FROM (SELECT i.attempt, i.source, i.exact,
                         ARRAY[i.prompt_tokens, i.cached_tokens, i.cache_write_1h_tokens,
                               i.cache_write_5m_tokens] AS prompt,
                         ARRAY[i.output_tokens, i.reasoning_tokens] AS output
                  FROM witnesses AS i
                  WHERE i.request_id = p_request_id AND i.month = p_month) AS w
            GROUP BY w.attempt) AS a) AS t
$$;

----------------------------------------------------------------------------------------- bills

-- core.money.charge_micro: half up. Few requests need more than 64 bits on the way, and for
-- the others plain integers are much the cheaper.
CREATE FUNCTION ledger_sum(
    p_price prices, p_prompt bigint, p_cached bigint, p_write_5m bigint, p_write_1h bigint,
    p_output bigint, p_reasoning bigint
) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT (p_price).request_micro + CASE
        WHEN p_prompt + p_output <= 10000000
             AND greatest((p_price).input_micro, (p_price).cached_input_micro,
                          (p_price).cache_write_5m_micro, (p_price).cache_write_1h_micro,
                          (p_price).output_micro, (p_price).reasoning_micro) <= 100000000000
        THEN ((p_prompt - p_cached - p_write_5m - p_write_1h) * (p_price).input_micro
              + p_cached * (p_price).cached_input_micro
              + p_write_5m * (p_price).cache_write_5m_micro
              + p_write_1h * (p_price).cache_write_1h_micro
              + (p_output - p_reasoning) * (p_price).output_micro
              + p_reasoning * (p_price).reasoning_micro + 500000) / 1000000
        ELSE div((p_prompt - p_cached - p_write_5m - p_write_1h)::numeric * (p_price).input_micro
                 + p_cached::numeric * (p_price).cached_input_micro
                 + p_write_5m::numeric * (p_price).cache_write_5m_micro
                 + p_write_1h::numeric * (p_price).cache_write_1h_micro
                 + (p_output - p_reasoning)::numeric * (p_price).output_micro
                 + p_reasoning::numeric * (p_price).reasoning_micro + 500000, 1000000)::bigint
    END
$$;
CREATE FUNCTION ledger_charge(p_price prices, p_usage token_totals)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT ledger_sum(p_price, u.prompt_tokens, u.cached_tokens, u.cache_write_5m_tokens,
                      u.cache_write_1h_tokens, u.output_tokens, u.reasoning_tokens)
    FROM (SELECT (ledger_full(p_usage)).*) AS u
$$;

-- core.money.billed_micro for `p_output` tokens of output.
CREATE FUNCTION ledger_bill(
    p_bills boolean, p_price prices, p_metered token_totals, p_output bigint
) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN p_bills AND (p_metered).prompt_tokens + p_output > 0
        THEN ledger_sum(p_price, (p_metered).prompt_tokens, (p_metered).cached_tokens,
                        (p_metered).cache_write_5m_tokens, (p_metered).cache_write_1h_tokens,
                        p_output, least((p_metered).reasoning_tokens, p_output))
        ELSE 0
    END
$$;

-- The same for what is `billable` of a request that ended so.
CREATE FUNCTION ledger_due(
    p_cause text, p_billing_causes text[], p_price prices, p_metered token_totals,
    p_accepted bigint, p_asked bigint
) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT ledger_bill(
        p_cause = ANY (p_billing_causes), p_price, p_metered,
        least(CASE WHEN p_cause = 'lost' THEN (p_metered).output_tokens ELSE p_accepted END,
              p_asked))
$$;

CREATE FUNCTION ledger_usage_totals(p_usage usage)
RETURNS token_totals LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW ((p_usage).metered_prompt_tokens, (p_usage).metered_cached_tokens,
                (p_usage).metered_output_tokens, (p_usage).metered_cache_write_5m_tokens,
                (p_usage).metered_cache_write_1h_tokens,
                (p_usage).metered_reasoning_tokens)::token_totals
$$;

CREATE FUNCTION ledger_settled(
    p_n bigint, p_bill bigint, p_cause text, p_metered token_totals
) RETURNS ledger_answer LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW ('settle', p_n, NULL, NULL, NULL, NULL, NULL, NULL, p_bill, p_cause,
                (p_metered).prompt_tokens, (p_metered).cached_tokens, (p_metered).output_tokens,
                (p_metered).cache_write_5m_tokens, (p_metered).cache_write_1h_tokens,
                (p_metered).reasoning_tokens)::ledger_answer
$$;

--------------------------------------------------------------------------------------- endings

-- Ends open requests: works out each bill from the witnesses, posts it, frees what was held, and
-- moves the row. A hard limit cuts a bill to what its request holds. The accounts are locked. One
-- whose `own` word is not all there is to hear stays open, and has no answer.
CREATE FUNCTION ledger_end(p_endings ending[], p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_lines ledger_line[];
    v_answers ledger_answer[];
BEGIN
    WITH freed AS (
        DELETE FROM reservations AS r
        USING unnest(p_endings) AS e
        WHERE r.request_id = e.request_id AND r.tenant_id = e.tenant_id
          AND ((e.own).attempt IS NULL
               OR NOT EXISTS (SELECT FROM witnesses AS w
                              WHERE w.request_id = r.request_id AND w.month = r.month))
        RETURNING r.*, e.n, e.said_by, e.cause AS said_cause, e.delivered_tokens, e.timings,
                  e.ended_ms, e.own
    ),
    heard AS (
        INSERT INTO witnesses (request_id, month, attempt, source, replica_id, prompt_tokens,
                               cached_tokens, cache_write_5m_tokens, cache_write_1h_tokens,
                               output_tokens, reasoning_tokens, exact, final, cause, at_ms)
        SELECT f.request_id, f.month, (f.own).attempt, 'gateway', (f.own).replica_id,
               ((f.own).usage).prompt_tokens, ((f.own).usage).cached_tokens,
               ((f.own).usage).cache_write_5m_tokens, ((f.own).usage).cache_write_1h_tokens,
               ((f.own).usage).output_tokens, ((f.own).usage).reasoning_tokens,
               false, false, '', f.ended_ms
        FROM freed AS f WHERE (f.own).attempt IS NOT NULL
    ),
    due AS (
        SELECT f.*, m.attempts, m.metered, m.accepted_tokens, c.cause,
               ledger_due(c.cause, p_billing_causes, p, m.metered, m.accepted_tokens,
                          f.max_tokens * f.choices) AS due,
               CASE WHEN a.hard_cap_micro IS NOT NULL OR a.prepaid THEN true
                    WHEN a.caps = 0 THEN false
                    ELSE EXISTS (SELECT FROM ledger_limits(f.tenant_id, f.key_id, f.day))
               END AS is_limited
        FROM freed AS f
        CROSS JOIN LATERAL (
            SELECT (f.own).attempt, (f.own).usage, ((f.own).usage).output_tokens
            WHERE (f.own).attempt IS NOT NULL
            UNION ALL
            SELECT w.attempts, w.metered, w.accepted_tokens
            FROM ledger_metered(f.request_id, f.month) AS w
            WHERE (f.own).attempt IS NULL
        ) AS m (attempts, metered, accepted_tokens)
        CROSS JOIN LATERAL (
            SELECT CASE WHEN f.said_by = 'gateway' THEN f.said_cause
                        WHEN (m.metered).prompt_tokens + (m.metered).output_tokens > 0 THEN 'lost'
                        ELSE 'not_started'
                   END
        ) AS c (cause)
        JOIN prices AS p ON p.id = f.price_id
        JOIN accounts AS a ON a.tenant_id = f.tenant_id
    ),
    billed AS (
        SELECT d.*, CASE WHEN d.is_limited THEN least(d.due, d.reserved_micro) ELSE d.due END AS bill
        FROM due AS d
    ),
    moved AS (
        INSERT INTO usage (
            request_id, month, tenant_id, key_id, gateway_id, model, version, region,
            service_class, dialect, endpoint, stream, price_id, prompt_tokens, max_tokens,
            choices, amount_micro, floor_micro, reserved_micro, day, cause, settled_by,
            attempts, metered_prompt_tokens, metered_cached_tokens,
            metered_cache_write_5m_tokens, metered_cache_write_1h_tokens,
            metered_output_tokens, metered_reasoning_tokens, accepted_tokens,
            delivered_tokens, billed_micro, bill_limit_micro, queue_ms, prefill_ms,
            first_token_ms, inter_token_ms, total_ms, created_ms, ended_ms)
        SELECT b.request_id, b.month, b.tenant_id, b.key_id, b.gateway_id, b.model, b.version,
               b.region, b.service_class, b.dialect, b.endpoint, b.stream, b.price_id,
               b.prompt_tokens, b.max_tokens, b.choices, b.amount_micro, b.floor_micro,
               b.reserved_micro, b.day, b.cause, b.said_by, b.attempts,
               (b.metered).prompt_tokens, (b.metered).cached_tokens,
               (b.metered).cache_write_5m_tokens, (b.metered).cache_write_1h_tokens,
               (b.metered).output_tokens, (b.metered).reasoning_tokens, b.accepted_tokens,
               b.delivered_tokens, b.bill, CASE WHEN b.bill < b.due THEN b.bill END,
               (b.timings).queue_ms, (b.timings).prefill_ms, (b.timings).first_token_ms,
               (b.timings).inter_token_ms, (b.timings).total_ms, b.created_ms, b.ended_ms
        FROM billed AS b
    ),
    line AS (
        SELECT b.n, 1 AS part,
               ROW (b.tenant_id, b.key_id, b.day, b.request_id,
                    CASE WHEN b.bill > 0 THEN 'settle'
                         WHEN b.said_by = 'gateway' THEN 'release'
                         ELSE 'expire'
                    END,
                    -b.reserved_micro, least(b.bill, b.reserved_micro), 0, '', '',
                    '')::ledger_line AS line
        FROM billed AS b
        UNION ALL
        SELECT b.n, 2,
               ROW (b.tenant_id, b.key_id, b.day, b.request_id, 'overage', 0,
                    b.bill - b.reserved_micro, 0, '', '', '')::ledger_line
        FROM billed AS b WHERE b.bill > b.reserved_micro
    )
    SELECT (SELECT array_agg(l.line ORDER BY l.n, l.part) FROM line AS l),
           (SELECT array_agg(ledger_settled(b.n, b.bill, b.cause, b.metered)) FROM billed AS b)
    INTO v_lines, v_answers;
    IF v_lines IS NOT NULL THEN
        PERFORM ledger_post(v_lines);
    END IF;
    RETURN QUERY SELECT * FROM unnest(v_answers);
END $$;

-- More is known of a request that has ended: posts how its bill differs from the one before.
-- Under a hard limit a bill rises to what the request held, and to the room there is now; what
-- is cut off then is cut for good. The cause: the gateway's first word holds; the sweeper's is
-- provisional, rises from not_started to lost with the witnesses, and yields to the gateway's.
CREATE FUNCTION ledger_correct(p_ending ending, p_billing_causes text[])
RETURNS ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_old usage;
    v_new usage;
    v_known record;
    v_price prices;
    v_due bigint;
    v_room bigint;
    v_fixes boolean;
BEGIN
    SELECT * INTO STRICT v_old FROM usage AS u
    WHERE u.request_id = p_ending.request_id AND u.month = ledger_month(p_ending.request_id);
    SELECT * INTO v_known FROM ledger_metered(v_old.request_id, v_old.month);
    SELECT * INTO STRICT v_price FROM prices WHERE id = v_old.price_id;
    v_new := v_old;
    v_fixes := p_ending.said_by = 'gateway' AND v_old.settled_by <> 'gateway';
    IF v_fixes THEN
        v_new.settled_by := 'gateway';
        v_new.cause := p_ending.cause;
        v_new.delivered_tokens := p_ending.delivered_tokens;
        v_new.queue_ms := (p_ending.timings).queue_ms;
        v_new.prefill_ms := (p_ending.timings).prefill_ms;
        v_new.first_token_ms := (p_ending.timings).first_token_ms;
        v_new.inter_token_ms := (p_ending.timings).inter_token_ms;
        v_new.total_ms := (p_ending.timings).total_ms;
        v_new.ended_ms := p_ending.ended_ms;
    ELSIF v_old.settled_by = 'sweeper' THEN
        v_new.cause := CASE WHEN (v_known.metered).prompt_tokens
                                 + (v_known.metered).output_tokens > 0
                            THEN 'lost' ELSE 'not_started' END;
    END IF;
    v_new.attempts := v_known.attempts;
    v_new.metered_prompt_tokens := (v_known.metered).prompt_tokens;
    v_new.metered_cached_tokens := (v_known.metered).cached_tokens;
    v_new.metered_cache_write_5m_tokens := (v_known.metered).cache_write_5m_tokens;
    v_new.metered_cache_write_1h_tokens := (v_known.metered).cache_write_1h_tokens;
    v_new.metered_output_tokens := (v_known.metered).output_tokens;
    v_new.metered_reasoning_tokens := (v_known.metered).reasoning_tokens;
    v_new.accepted_tokens := v_known.accepted_tokens;

    v_due := least(ledger_due(v_new.cause, p_billing_causes, v_price, v_known.metered,
                              v_new.accepted_tokens, v_old.max_tokens * v_old.choices),
                   v_old.bill_limit_micro);
    v_new.billed_micro := v_due;
    IF v_due > v_old.billed_micro THEN
        SELECT min(l.room_micro) INTO v_room
        FROM ledger_limits(v_old.tenant_id, v_old.key_id, v_old.day) AS l;
        IF v_room IS NOT NULL THEN
            v_new.billed_micro := least(
                v_due, greatest(v_old.billed_micro,
                                least(v_old.reserved_micro, v_old.billed_micro + v_room)));
        END IF;
    END IF;
    IF v_new.billed_micro < v_due THEN
        v_new.bill_limit_micro := v_new.billed_micro;
    END IF;
    IF v_new IS DISTINCT FROM v_old THEN
        PERFORM ledger_rewrite(v_old, v_new);
    END IF;
    RETURN ledger_settled(p_ending.n, v_new.billed_micro, v_new.cause, v_known.metered);
END $$;

-- Puts one usage row in another's place. What a bill, a rollup or a person reads of it
-- (core.ledger.told) changes with an entry, if only of 0.
CREATE FUNCTION ledger_rewrite(p_old usage, p_new usage) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE usage AS u
    SET cause = p_new.cause, settled_by = p_new.settled_by, attempts = p_new.attempts,
        metered_prompt_tokens = p_new.metered_prompt_tokens,
        metered_cached_tokens = p_new.metered_cached_tokens,
        metered_cache_write_5m_tokens = p_new.metered_cache_write_5m_tokens,
        metered_cache_write_1h_tokens = p_new.metered_cache_write_1h_tokens,
        metered_output_tokens = p_new.metered_output_tokens,
        metered_reasoning_tokens = p_new.metered_reasoning_tokens,
        accepted_tokens = p_new.accepted_tokens, delivered_tokens = p_new.delivered_tokens,
        billed_micro = p_new.billed_micro, bill_limit_micro = p_new.bill_limit_micro,
        queue_ms = p_new.queue_ms, prefill_ms = p_new.prefill_ms,
        first_token_ms = p_new.first_token_ms, inter_token_ms = p_new.inter_token_ms,
        total_ms = p_new.total_ms, ended_ms = p_new.ended_ms
    WHERE u.request_id = p_old.request_id AND u.month = p_old.month;
    IF (p_new.cause, p_new.metered_prompt_tokens, p_new.metered_cached_tokens,
        p_new.metered_cache_write_5m_tokens, p_new.metered_cache_write_1h_tokens,
        p_new.metered_output_tokens, p_new.metered_reasoning_tokens, p_new.accepted_tokens,
        p_new.delivered_tokens, p_new.billed_micro)
       = (p_old.cause, p_old.metered_prompt_tokens, p_old.metered_cached_tokens,
          p_old.metered_cache_write_5m_tokens, p_old.metered_cache_write_1h_tokens,
          p_old.metered_output_tokens, p_old.metered_reasoning_tokens, p_old.accepted_tokens,
          p_old.delivered_tokens, p_old.billed_micro) THEN
        RETURN;
    END IF;
    PERFORM ledger_post(ARRAY[
        ROW (p_old.tenant_id, p_old.key_id, p_old.day, p_old.request_id, 'correction', 0,
             p_new.billed_micro - p_old.billed_micro, 0, '', '', '')::ledger_line]);
    INSERT INTO usage_corrections
    SELECT p_old.tenant_id, a.entries, p_old.request_id, p_old.month,
           p_new.metered_prompt_tokens - p_old.metered_prompt_tokens,
           p_new.metered_cached_tokens - p_old.metered_cached_tokens,
           p_new.metered_cache_write_5m_tokens - p_old.metered_cache_write_5m_tokens,
           p_new.metered_cache_write_1h_tokens - p_old.metered_cache_write_1h_tokens,
           p_new.metered_output_tokens - p_old.metered_output_tokens,
           p_new.metered_reasoning_tokens - p_old.metered_reasoning_tokens,
           p_new.accepted_tokens - p_old.accepted_tokens,
           p_new.delivered_tokens - p_old.delivered_tokens,
           p_new.billed_micro - p_old.billed_micro, 0, p_old.cause, p_new.cause
    FROM accounts AS a WHERE a.tenant_id = p_old.tenant_id;
    IF p_new.billed_micro + p_new.adjusted_micro < 0 THEN
        PERFORM ledger_take_back(p_new);
    END IF;
END $$;

-- core.ledger.Book._take_back: no request costs less than nothing.
CREATE FUNCTION ledger_take_back(p_usage usage) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_excess bigint := -p_usage.billed_micro - p_usage.adjusted_micro;
BEGIN
    PERFORM ledger_post(ARRAY[
        ROW (p_usage.tenant_id, p_usage.key_id, p_usage.day, p_usage.request_id, 'refund', 0,
             v_excess, 0, '', 'its bill has fallen below what was given back', '')::ledger_line]);
    UPDATE usage AS u SET adjusted_micro = u.adjusted_micro + v_excess
    WHERE u.request_id = p_usage.request_id AND u.month = p_usage.month;
    INSERT INTO usage_corrections (tenant_id, seq, request_id, month, d_adjusted, from_cause,
                                   to_cause)
    SELECT a.tenant_id, a.entries, p_usage.request_id, p_usage.month, v_excess, p_usage.cause,
           p_usage.cause
    FROM accounts AS a WHERE a.tenant_id = p_usage.tenant_id;
END $$;

-- The same for many. Most often nothing is new: the journal says what the gateway said.
CREATE FUNCTION ledger_correct_all(p_endings ending[], p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_row record;
BEGIN
    FOR v_row IN
        SELECT e AS ending, m.metered, u.billed_micro, u.cause,
               e.said_by = 'gateway' AND u.settled_by <> 'gateway'
               OR (u.attempts, u.metered_prompt_tokens, u.metered_cached_tokens,
                   u.metered_cache_write_5m_tokens, u.metered_cache_write_1h_tokens,
                   u.metered_output_tokens, u.metered_reasoning_tokens, u.accepted_tokens)
                  <> (m.attempts, (m.metered).prompt_tokens, (m.metered).cached_tokens,
                      (m.metered).cache_write_5m_tokens, (m.metered).cache_write_1h_tokens,
                      (m.metered).output_tokens, (m.metered).reasoning_tokens,
                      m.accepted_tokens) AS has_news
        FROM unnest(p_endings) AS e
        JOIN usage AS u
            ON u.request_id = e.request_id AND u.month = ledger_month(e.request_id)
           AND u.tenant_id IS NOT DISTINCT FROM e.tenant_id
        CROSS JOIN LATERAL ledger_metered(u.request_id, u.month) AS m
        ORDER BY e.n
    LOOP
        IF v_row.has_news THEN
            RETURN NEXT ledger_correct(v_row.ending, p_billing_causes);
        ELSE
            RETURN NEXT ledger_settled((v_row.ending).n, v_row.billed_micro, v_row.cause,
                                       v_row.metered);
        END IF;
    END LOOP;
END $$;

-- The gateway's words. As a rule each request is open, and has had one attempt of which nobody
-- else has spoken yet: these come first, then the other open ones, then those that have ended.
CREATE FUNCTION ledger_settle(p_settles settle_command[], p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_answers ledger_answer[];
BEGIN
    v_answers := ARRAY(
        SELECT a FROM ledger_end(
            ARRAY(SELECT ROW (s.n, s.request_id, s.tenant_id, 'gateway', s.cause,
                              s.delivered_tokens, s.timings, s.ended_ms,
                              ROW ((s.attempts[1]).attempt, (s.attempts[1]).replica_id,
                                   ledger_full((s.attempts[1]).usage))::attempt_totals)::ending
                  FROM unnest(p_settles) WITH ORDINALITY
                       AS s (request_id, tenant_id, cause, attempts, delivered_tokens, timings,
                             ended_ms, n)
                  WHERE cardinality(s.attempts) = 1),
            p_billing_causes) AS a);
    RETURN QUERY SELECT * FROM unnest(v_answers);
    IF cardinality(v_answers) < cardinality(p_settles) THEN
        RETURN QUERY SELECT * FROM ledger_settle_others(
            p_settles, ARRAY(SELECT a.n FROM unnest(v_answers) AS a), p_billing_causes);
    END IF;
END $$;

CREATE FUNCTION ledger_settle_others(
    p_settles settle_command[], p_settled bigint[], p_billing_causes text[]
) RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_open ending[];
    v_ended ending[];
    v_unknown bigint[];
BEGIN
    SELECT array_agg(k.ending ORDER BY k.n) FILTER (WHERE k.is_open),
           array_agg(k.ending ORDER BY k.n) FILTER (WHERE k.is_ended),
           array_agg(k.n ORDER BY k.n) FILTER (WHERE NOT k.is_open AND NOT k.is_ended)
    INTO v_open, v_ended, v_unknown
    FROM (
        SELECT s.n, r.request_id IS NOT NULL AS is_open, u.request_id IS NOT NULL AS is_ended,
               ROW (s.n, s.request_id, s.tenant_id, 'gateway', s.cause, s.delivered_tokens,
                    s.timings, s.ended_ms, NULL)::ending AS ending
        FROM unnest(p_settles) WITH ORDINALITY
             AS s (request_id, tenant_id, cause, attempts, delivered_tokens, timings, ended_ms, n)
        LEFT JOIN reservations AS r
            ON r.request_id = s.request_id AND r.tenant_id IS NOT DISTINCT FROM s.tenant_id
        LEFT JOIN usage AS u
            ON r.request_id IS NULL
           AND u.request_id = s.request_id AND u.month = ledger_month(s.request_id)
           AND u.tenant_id IS NOT DISTINCT FROM s.tenant_id
        WHERE s.n <> ALL (p_settled)
    ) AS k;
    PERFORM ledger_hear(array_agg(
        ROW (s.request_id, a.attempt, 'gateway', a.replica_id, a.usage, false, false, '',
             s.ended_ms)::witness_word))
    FROM unnest(v_open || v_ended) AS e
    CROSS JOIN LATERAL (SELECT p_settles[e.n].*) AS s
    CROSS JOIN LATERAL unnest(s.attempts) AS a;
    IF v_open IS NOT NULL THEN
        RETURN QUERY SELECT * FROM ledger_end(v_open, p_billing_causes);
    END IF;
    IF v_ended IS NOT NULL THEN
        RETURN QUERY SELECT * FROM ledger_correct_all(v_ended, p_billing_causes);
    END IF;
    IF v_unknown IS NOT NULL THEN
        RETURN QUERY SELECT a.* FROM unnest(v_unknown) AS i (n)
                     CROSS JOIN LATERAL ledger_never_reserved(p_settles[i.n], i.n) AS a;
    END IF;
END $$;

-- core.ledger.Book._never_reserved: the reserve may still be on its way.
CREATE FUNCTION ledger_never_reserved(p_settle settle_command, p_n bigint)
RETURNS ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_answer ledger_answer;
BEGIN
    v_answer.kind := 'settle';
    v_answer.n := p_n;
    IF p_settle.cause <> 'not_started' OR cardinality(p_settle.attempts) > 0
       OR EXISTS (SELECT FROM requests AS q
                  WHERE q.request_id = p_settle.request_id
                    AND q.month = ledger_month(p_settle.request_id)) THEN
        v_answer.refused := 'not_open';
        RETURN v_answer;
    END IF;
    INSERT INTO refusals (request_id, tenant_id, reason)
    VALUES (p_settle.request_id, p_settle.tenant_id, 'not_open')
    ON CONFLICT (request_id) DO NOTHING;
    RETURN ledger_settled(p_n, 0, 'not_started', ROW (0, 0, 0, 0, 0, 0)::token_totals);
END $$;

-- The sweeper's word on requests of a silent gateway.
CREATE FUNCTION ledger_expire(p_request_ids text[], p_ended_ms bigint, p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM accounts AS a
    WHERE a.tenant_id IN (SELECT r.tenant_id FROM reservations AS r
                          WHERE r.request_id = ANY (p_request_ids))
    ORDER BY a.tenant_id FOR NO KEY UPDATE;
    RETURN QUERY
    SELECT * FROM ledger_end(
        ARRAY(SELECT ROW (row_number() OVER (ORDER BY r.request_id), r.request_id, r.tenant_id,
                          'sweeper', NULL, 0, NULL, p_ended_ms, NULL)::ending
              FROM reservations AS r WHERE r.request_id = ANY (p_request_ids)
              ORDER BY r.request_id),
        p_billing_causes);
END $$;

-- Takes recorded witnesses into account, for requests that have ended. The witnesses must be
-- committed before: then either this sees the settlement, or the settlement sees them.
CREATE FUNCTION ledger_recount(p_request_ids text[], p_billing_causes text[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM accounts AS a
    WHERE a.tenant_id IN (
        SELECT u.tenant_id FROM unnest(p_request_ids) AS i (request_id)
        JOIN usage AS u ON u.request_id = i.request_id AND u.month = ledger_month(i.request_id)
        UNION ALL
        SELECT r.tenant_id FROM reservations AS r WHERE r.request_id = ANY (p_request_ids))
    ORDER BY a.tenant_id FOR NO KEY UPDATE;
    -- Requests not known yet keep their place, so that answers are numbered as the ids are.
    RETURN QUERY
    SELECT * FROM ledger_correct_all(
        ARRAY(SELECT ROW (i.n, i.request_id, u.tenant_id, 'witness', NULL, 0, NULL, 0,
                          NULL)::ending
              FROM unnest(p_request_ids) WITH ORDINALITY AS i (request_id, n)
              JOIN usage AS u
                  ON u.request_id = i.request_id AND u.month = ledger_month(i.request_id)
              ORDER BY i.n),
        p_billing_causes);
END $$;

---------------------------------------------------------------------------------- reservations

CREATE FUNCTION ledger_top_up(p_top_ups top_up_command[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_more record;
    v_answer ledger_answer;
    v_extra bigint;
BEGIN
    FOR v_more IN
        SELECT t.n, t.request_id, t.tenant_id, t.total_micro,
               coalesce(t.floor_micro, t.total_micro) AS floor_micro,
               r.reserved_micro AS held, r.key_id, r.day
        FROM unnest(p_top_ups) WITH ORDINALITY
             AS t (request_id, tenant_id, total_micro, floor_micro, n)
        LEFT JOIN reservations AS r
            ON r.request_id = t.request_id AND r.tenant_id IS NOT DISTINCT FROM t.tenant_id
        ORDER BY t.tenant_id, t.n
    LOOP
        v_answer := NULL;
        IF v_more.held IS NULL THEN
            v_answer.refused := 'not_open';
        ELSIF v_more.total_micro <= v_more.held THEN
            v_answer.reserved_micro := v_more.held;
        ELSE
            v_answer := ledger_grant(v_more.tenant_id, v_more.key_id, v_more.day,
                                     v_more.total_micro - v_more.held,
                                     greatest(0, v_more.floor_micro - v_more.held));
            IF v_answer.refused IS NULL THEN
                v_extra := v_answer.reserved_micro;
                v_answer.reserved_micro := v_more.held + v_extra;
                IF v_extra > 0 THEN
                    UPDATE reservations SET reserved_micro = v_more.held + v_extra
                    WHERE request_id = v_more.request_id;
                    PERFORM ledger_post(ARRAY[
                        ROW (v_more.tenant_id, v_more.key_id, v_more.day, v_more.request_id,
                             'top_up', v_extra, 0, 0, '', '', '')::ledger_line]);
                END IF;
            END IF;
        END IF;
        v_answer.kind := 'top_up';
        v_answer.n := v_more.n;
        RETURN NEXT v_answer;
    END LOOP;
END $$;

-- Each request id comes once in a call. As a rule all are new and fit in full; else one by one.
CREATE FUNCTION ledger_reserve(p_reserves reserve_command[])
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_day date := ledger_today();
BEGIN
    IF ledger_fits(p_reserves, v_day) THEN
        PERFORM ledger_hold(p_reserves, ARRAY(SELECT c.amount_micro FROM unnest(p_reserves) AS c), v_day);
        RETURN QUERY
        SELECT 'reserve', c.n, NULL::text, NULL::text, c.amount_micro, NULL::bigint,
               NULL::bigint, NULL::bigint, NULL::bigint, NULL::text, NULL::bigint, NULL::bigint,
               NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint
        FROM unnest(p_reserves) WITH ORDINALITY
             AS c (request_id, gateway_id, tenant_id, key_id, amount_micro, floor_micro,
                   price_id, model, version, region, service_class, dialect, endpoint, stream,
                   prompt_tokens, max_tokens, choices, created_ms, n);
    ELSE
        RETURN QUERY
        SELECT a.* FROM (SELECT i.n FROM generate_series(1, cardinality(p_reserves)) AS i (n)
                         ORDER BY p_reserves[i.n].tenant_id, i.n) AS i
        CROSS JOIN LATERAL ledger_reserve_one(p_reserves[i.n], i.n, v_day) AS a;
    END IF;
END $$;

-- Whether every id is new, every account and price is there, and all the amounts fit together.
CREATE FUNCTION ledger_fits(p_reserves reserve_command[], p_day date)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_fits boolean;
    v_capped boolean;
BEGIN
    SELECT bool_and(t.fits), bool_or(t.caps > 0) INTO v_fits, v_capped
    FROM (
        SELECT a.tenant_id IS NOT NULL
               AND count(p.id) = count(*) AND count(r.request_id) = 0
               AND count(u.request_id) = 0 AND count(f.request_id) = 0
               AND (a.hard_cap_micro IS NULL
                    OR a.posted_micro + a.reserved_micro + sum(c.amount_micro) <= a.hard_cap_micro)
               AND (NOT a.prepaid
                    OR a.posted_micro + a.reserved_micro + sum(c.amount_micro) <= a.credit_micro)
               AS fits, a.caps
        -- OFFSET 0: the month is worked out once for each.
        FROM (SELECT c.request_id, c.tenant_id, c.amount_micro, c.price_id,
                     ledger_month(c.request_id) AS month
              FROM unnest(p_reserves) AS c OFFSET 0) AS c
        LEFT JOIN accounts AS a ON a.tenant_id = c.tenant_id
        LEFT JOIN prices AS p ON p.id = c.price_id
        LEFT JOIN reservations AS r ON r.request_id = c.request_id
        LEFT JOIN usage AS u ON u.request_id = c.request_id AND u.month = c.month
        LEFT JOIN refusals AS f ON f.request_id = c.request_id
        GROUP BY c.tenant_id, a.tenant_id
    ) AS t;
    IF v_fits AND v_capped THEN
        SELECT bool_and(NOT EXISTS (
            SELECT FROM ledger_limits(c.tenant_id, c.key_id, p_day) AS l
            WHERE l.room_micro < c.amount_micro)) INTO v_fits
        FROM (SELECT c.tenant_id, k.key_id, sum(c.amount_micro) OVER (PARTITION BY c.tenant_id)
              FROM unnest(p_reserves) AS c
              CROSS JOIN LATERAL (SELECT c.key_id) AS k) AS c (tenant_id, key_id, amount_micro);
    END IF;
    RETURN v_fits;
END $$;

CREATE FUNCTION ledger_reserve_one(p_asked reserve_command, p_n bigint, p_day date)
RETURNS ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_answer ledger_answer;
    v_known record;
    v_refused refusals;
BEGIN
    SELECT q.reserved_micro,
           (q.gateway_id, q.tenant_id, q.key_id, q.amount_micro, q.price_id, q.model, q.version,
            q.region, q.service_class, q.dialect, q.endpoint, q.stream, q.prompt_tokens,
            q.max_tokens, q.choices, q.created_ms)
           = (p_asked.gateway_id, p_asked.tenant_id, p_asked.key_id, p_asked.amount_micro,
              p_asked.price_id, p_asked.model, p_asked.version, p_asked.region,
              p_asked.service_class, p_asked.dialect, p_asked.endpoint, p_asked.stream,
              p_asked.prompt_tokens, p_asked.max_tokens, p_asked.choices, p_asked.created_ms)
           AND q.floor_micro IS NOT DISTINCT FROM p_asked.floor_micro AS is_same
    INTO v_known
    FROM requests AS q
    WHERE q.request_id = p_asked.request_id AND q.month = ledger_month(p_asked.request_id);
    IF FOUND THEN
        IF v_known.is_same THEN
            v_answer.reserved_micro := v_known.reserved_micro;
        ELSE
            v_answer.refused := 'id_reused';
        END IF;
    ELSE
        SELECT * INTO v_refused FROM refusals WHERE request_id = p_asked.request_id;
        IF FOUND THEN
            v_answer.refused := v_refused.reason;
            v_answer.limit_name := v_refused.limit_name;
            v_answer.reserved_micro := v_refused.reserved_micro;
            v_answer.posted_micro := v_refused.posted_micro;
            v_answer.hard_cap_micro := v_refused.hard_cap_micro;
            v_answer.fits_micro := v_refused.fits_micro;
        ELSE
            v_answer := ledger_allow(p_asked, p_day);
        END IF;
    END IF;
    v_answer.kind := 'reserve';
    v_answer.n := p_n;
    RETURN v_answer;
END $$;

-- Holds for a new request what may be held, or remembers why nothing is.
CREATE FUNCTION ledger_allow(p_asked reserve_command, p_day date)
RETURNS ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_answer ledger_answer;
BEGIN
    IF NOT EXISTS (SELECT FROM accounts AS a WHERE a.tenant_id = p_asked.tenant_id) THEN
        v_answer.refused := 'no_account';
    ELSIF NOT EXISTS (SELECT FROM prices AS p WHERE p.id = p_asked.price_id) THEN
        v_answer.refused := 'no_price';
    ELSE
        v_answer := ledger_grant(p_asked.tenant_id, p_asked.key_id, p_day, p_asked.amount_micro,
                                 coalesce(p_asked.floor_micro, p_asked.amount_micro));
    END IF;
    IF v_answer.refused IS NULL THEN
        PERFORM ledger_hold(ARRAY[p_asked], ARRAY[v_answer.reserved_micro], p_day);
    ELSE
        INSERT INTO refusals (request_id, tenant_id, reason, limit_name, reserved_micro,
                              posted_micro, hard_cap_micro, fits_micro)
        VALUES (p_asked.request_id, p_asked.tenant_id, v_answer.refused,
                coalesce(v_answer.limit_name, ''), coalesce(v_answer.reserved_micro, 0),
                coalesce(v_answer.posted_micro, 0), coalesce(v_answer.hard_cap_micro, 0),
                coalesce(v_answer.fits_micro, 0))
        ON CONFLICT (request_id) DO NOTHING;
    END IF;
    RETURN v_answer;
END $$;

-- Opens requests that may hold the amounts at their positions.
CREATE FUNCTION ledger_hold(p_reserves reserve_command[], p_held bigint[], p_day date)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO reservations (
        request_id, month, tenant_id, key_id, gateway_id, model, version, region, service_class,
        dialect, endpoint, stream, price_id, prompt_tokens, max_tokens, choices, amount_micro,
        floor_micro, reserved_micro, day, created_ms)
    SELECT c.request_id, ledger_month(c.request_id), c.tenant_id, c.key_id, c.gateway_id,
           c.model, c.version, c.region, c.service_class, c.dialect, c.endpoint, c.stream,
           c.price_id, c.prompt_tokens, c.max_tokens, c.choices, c.amount_micro, c.floor_micro,
           c.held, p_day, c.created_ms
    FROM ROWS FROM (unnest(p_reserves), unnest(p_held))
         AS c (request_id, gateway_id, tenant_id, key_id, amount_micro, floor_micro, price_id,
               model, version, region, service_class, dialect, endpoint, stream, prompt_tokens,
               max_tokens, choices, created_ms, held);
    PERFORM ledger_post(ARRAY(
        SELECT ROW (c.tenant_id, c.key_id, p_day, c.request_id, 'reserve', c.held, 0, 0, '', '',
                    '')::ledger_line
        FROM ROWS FROM (unnest(p_reserves), unnest(p_held))
             WITH ORDINALITY
             AS c (request_id, gateway_id, tenant_id, key_id, amount_micro, floor_micro,
                   price_id, model, version, region, service_class, dialect, endpoint, stream,
                   prompt_tokens, max_tokens, choices, created_ms, held, n)
        ORDER BY c.n));
END $$;

----------------------------------------------------------------------------------- adjustments

-- core.ledger.Book.adjust: what it may change, in `billed_micro`, or why it may not.
CREATE FUNCTION ledger_adjustable(
    p_word adjust_command, p_account accounts, p_usage usage, p_billing_causes text[]
) RETURNS ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_answer ledger_answer;
    v_used bigint := p_account.posted_micro + p_account.reserved_micro;
    v_net bigint := p_usage.billed_micro + p_usage.adjusted_micro;
    v_delta bigint := p_word.amount_micro;
    v_price prices;
BEGIN
    IF p_word.kind = 'credit' THEN
        IF p_account.prepaid AND v_delta < 0 AND p_account.credit_micro + v_delta < v_used THEN
            v_answer.refused := 'too_much';
            v_answer.limit_name := 'credit';
            v_answer.reserved_micro := p_account.reserved_micro;
            v_answer.posted_micro := p_account.posted_micro;
            v_answer.hard_cap_micro := p_account.credit_micro;
            v_answer.fits_micro := greatest(0, p_account.credit_micro - v_used);
        END IF;
    ELSIF p_word.kind = 'adjustment' THEN
        IF v_delta > 0 THEN
            v_answer := ledger_grant(p_account.tenant_id, NULL, NULL, v_delta, v_delta);
        END IF;
    ELSIF p_usage.request_id IS NULL THEN
        v_answer.refused := 'no_request';
    ELSIF p_word.kind = 'refund' THEN
        v_delta := -p_word.amount_micro;
        IF p_word.amount_micro > v_net THEN
            v_answer.refused := 'too_much';
            v_answer.fits_micro := greatest(0, v_net);
        END IF;
    ELSE
        SELECT * INTO v_price FROM prices WHERE id = p_word.price_id;
        IF NOT FOUND THEN
            v_answer.refused := 'no_price';
        ELSE
            v_delta := least(ledger_due(p_usage.cause, p_billing_causes, v_price,
                                        ledger_usage_totals(p_usage), p_usage.accepted_tokens,
                                        p_usage.max_tokens * p_usage.choices),
                             p_usage.bill_limit_micro) - v_net;
            IF v_delta > 0 THEN
                v_answer := ledger_grant(p_usage.tenant_id, p_usage.key_id, p_usage.day,
                                         v_delta, v_delta);
            END IF;
        END IF;
    END IF;
    v_answer.billed_micro := v_delta;
    RETURN v_answer;
END $$;

-- An operator's command. The entry it has written, or why it has not.
CREATE FUNCTION ledger_adjust(p_word adjust_command, p_billing_causes text[])
RETURNS TABLE (answer ledger_answer, entry bigint, delta_micro bigint, posted_micro bigint,
               credit_micro bigint)
LANGUAGE plpgsql AS $$
DECLARE
    v_account accounts;
    v_usage usage;
    v_done adjustments;
BEGIN
    -- Before any account, in everybody's order: one id may be said of two tenants at once.
    PERFORM pg_advisory_xact_lock(hashtextextended(p_word.id, 0));
    SELECT * INTO v_account FROM accounts AS a
    WHERE a.tenant_id = p_word.tenant_id FOR NO KEY UPDATE;
    SELECT * INTO v_done FROM adjustments AS d WHERE d.id = p_word.id;
    IF FOUND THEN
        answer.refused := CASE WHEN v_done.word <> to_jsonb(p_word) THEN 'id_reused' END;
    ELSIF v_account.tenant_id IS NULL THEN
        answer.refused := 'no_account';
    ELSE
        SELECT * INTO v_usage FROM usage AS u
        WHERE u.request_id = p_word.request_id AND u.month = ledger_month(p_word.request_id)
          AND u.tenant_id = p_word.tenant_id AND p_word.kind IN ('refund', 'reprice');
        answer := ledger_adjustable(p_word, v_account, v_usage, p_billing_causes);
        IF answer.refused IS NULL THEN
            v_done := ledger_adjusted(p_word, v_usage, answer.billed_micro);
        END IF;
    END IF;
    IF answer.refused IS NULL THEN
        SELECT e.seq, e.posted_delta_micro + e.credit_delta_micro, e.posted_micro, e.credit_micro
        INTO STRICT entry, delta_micro, posted_micro, credit_micro
        FROM entries AS e WHERE e.tenant_id = p_word.tenant_id AND e.seq = v_done.entry;
    END IF;
    RETURN NEXT;
END $$;

CREATE FUNCTION ledger_adjusted(p_word adjust_command, p_usage usage, p_delta bigint)
RETURNS adjustments LANGUAGE plpgsql AS $$
DECLARE
    v_is_credit boolean := p_word.kind = 'credit';
    v_done adjustments;
BEGIN
    PERFORM ledger_post(ARRAY[
        ROW (p_word.tenant_id, p_usage.key_id, p_usage.day, p_word.request_id, p_word.kind, 0,
             CASE WHEN v_is_credit THEN 0 ELSE p_delta END,
             CASE WHEN v_is_credit THEN p_delta ELSE 0 END,
             p_word.id, p_word.reason, p_word.author)::ledger_line]);
    INSERT INTO adjustments (id, tenant_id, entry, word)
    SELECT p_word.id, a.tenant_id, a.entries, to_jsonb(p_word)
    FROM accounts AS a WHERE a.tenant_id = p_word.tenant_id
    RETURNING * INTO v_done;
    IF p_usage.request_id IS NOT NULL THEN
        UPDATE usage AS u SET adjusted_micro = u.adjusted_micro + p_delta
        WHERE u.request_id = p_usage.request_id AND u.month = p_usage.month;
        INSERT INTO usage_corrections (tenant_id, seq, request_id, month, d_adjusted,
                                       from_cause, to_cause)
        VALUES (p_word.tenant_id, v_done.entry, p_usage.request_id, p_usage.month, p_delta,
                p_usage.cause, p_usage.cause);
    END IF;
    RETURN v_done;
END $$;

----------------------------------------------------------------------------------------- batch

-- One batch of a group commit: one transaction, in an order that its callers, who are all still
-- waiting, cannot tell from any other. Endings first: they make room under a hard limit. No
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

-- Tables grow by a million rows before their statistics say so: a plan made while they were empty
-- must still go by key, and compiling or remaking one costs more than running it.
DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN
        SELECT p.oid FROM pg_proc AS p
        WHERE p.proname IN ('ledger_apply', 'ledger_expire', 'ledger_recount', 'ledger_adjust')
          AND p.pronamespace = current_schema()::regnamespace
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET enable_seqscan = off SET enable_bitmapscan = off
                            SET enable_hashjoin = off SET enable_mergejoin = off
                            SET plan_cache_mode = force_generic_plan SET jit = off', v_function);
    END LOOP;
END $$;

--------------------------------------------------------------------------- what there was before

SELECT ledger_make_partitions((now() AT TIME ZONE 'UTC')::date - 31, 5);

INSERT INTO reservations (
    request_id, month, tenant_id, key_id, gateway_id, model, version, region, service_class,
    dialect, endpoint, stream, price_id, prompt_tokens, max_tokens, choices, amount_micro,
    reserved_micro, day, created_ms, opened_at)
SELECT r.request_id, ledger_month(r.request_id), r.tenant_id, u.key_id, r.gateway_id, u.model,
       u.version, u.region, u.service_class, u.dialect, u.endpoint, u.stream, u.price_id,
       u.prompt_tokens, u.max_tokens, u.choices, u.amount_micro, r.reserved_micro,
       (r.opened_at AT TIME ZONE 'UTC')::date, u.created_ms, r.opened_at
FROM old_reservations AS r JOIN old_usage AS u USING (request_id);

INSERT INTO usage
SELECT u.request_id, ledger_month(u.request_id), u.tenant_id, u.key_id, u.gateway_id, u.model,
       u.version, u.region, u.service_class, u.dialect, u.endpoint, u.stream, u.price_id,
       u.prompt_tokens, u.max_tokens, u.choices, u.amount_micro, NULL, u.reserved_micro,
       (to_timestamp(u.created_ms / 1000.0) AT TIME ZONE 'UTC')::date, u.cause, u.settled_by,
       u.attempts, u.metered_prompt_tokens, u.metered_cached_tokens, 0, 0,
       u.metered_output_tokens, 0, u.accepted_tokens, u.delivered_tokens, u.billed_micro, 0,
       u.bill_limit_micro, u.queue_ms, u.prefill_ms, u.first_token_ms, u.inter_token_ms,
       u.total_ms, u.created_ms, u.ended_ms
FROM old_usage AS u WHERE u.state = 'settled';

INSERT INTO witnesses
SELECT w.request_id, ledger_month(w.request_id), w.attempt, w.source, w.replica_id,
       w.prompt_tokens, w.cached_tokens, 0, 0, w.output_tokens, 0, w.exact, w.final, w.cause,
       w.at_ms, w.recorded_at
FROM old_witnesses AS w;

INSERT INTO refusals (request_id, tenant_id, reason, limit_name, reserved_micro, posted_micro,
                      hard_cap_micro, fits_micro, at)
SELECT r.request_id, r.tenant_id, r.reason,
       CASE r.reason WHEN 'hard_cap' THEN 'account.total' ELSE '' END, r.reserved_micro,
       r.posted_micro, r.hard_cap_micro,
       greatest(0, r.hard_cap_micro - r.posted_micro - r.reserved_micro), r.at
FROM old_refusals AS r;

-- Links over what entries there are: of so many lines as their text can hold, and a reader.
ALTER TABLE entries DISABLE TRIGGER entries_append_only;
DO $$
DECLARE
    v_link record;
    v_head bytea;
BEGIN
    FOR v_link IN
        SELECT e.tenant_id, max(e.seq) AS seq,
               string_agg(ROW (e.seq, e.request_id, e.kind, e.reserved_delta_micro,
                               e.posted_delta_micro, e.credit_delta_micro, e.reserved_micro,
                               e.posted_micro, e.credit_micro, e.adjustment_id, e.reason,
                               e.author, ledger_microseconds(e.at))::text,
                          E'\n' ORDER BY e.seq) AS text
        FROM entries AS e
        GROUP BY e.tenant_id, (e.seq - 1) / 1000
        ORDER BY e.tenant_id, max(e.seq)
    LOOP
        UPDATE accounts SET head = sha256(head || convert_to(v_link.text, 'UTF8'))
        WHERE tenant_id = v_link.tenant_id RETURNING head INTO v_head;
        UPDATE entries SET chain = v_head
        WHERE tenant_id = v_link.tenant_id AND seq = v_link.seq;
    END LOOP;
END $$;
ALTER TABLE entries ENABLE TRIGGER entries_append_only;
