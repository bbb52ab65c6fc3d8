-- Idempotency keys. Their rules are told in core/idempotency.py and core/keys.py, which these
-- functions must agree with. A claim is decided while its tenant's account is locked, as the
-- ledger locks it for every command: of claims on one key there is always a first.

CREATE TABLE idempotency_keys (
    tenant_id   text NOT NULL,
    scope       text NOT NULL,
    key         text NOT NULL,
    fingerprint text NOT NULL,
    request_id  text COLLATE "C" NOT NULL,
    holder      text NOT NULL,
    generation  integer NOT NULL,
    superseded  text[] NOT NULL DEFAULT '{}',
    answer      bytea, -- NULL until there is one; empty where it was too large to keep
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, scope, key)
);
CREATE INDEX idempotency_keys_expires_at_idx ON idempotency_keys (expires_at);

CREATE TYPE claim_word AS (
    scope text, key text, fingerprint text, kept_s bigint, holder text
);
CREATE TYPE kept_word AS (scope text, key text, answer text);

-- core.idempotency.refused
CREATE FUNCTION ledger_key_refused(p_tenant text, p_claim claim_word)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN k.expires_at <= now() AND NOT k.is_open THEN NULL
                WHEN k.fingerprint <> p_claim.fingerprint THEN 'key_reused'
                WHEN k.answer IS NOT NULL THEN 'key_done'
                WHEN k.is_open AND (p_claim.holder = '' OR p_claim.holder <> k.holder)
                THEN 'key_open'
           END
    FROM (SELECT i.fingerprint, i.holder, i.answer, i.expires_at,
                 EXISTS (SELECT FROM reservations AS r WHERE r.request_id = i.request_id)
                 AS is_open
          FROM idempotency_keys AS i
          WHERE i.tenant_id = p_tenant AND i.scope = p_claim.scope AND i.key = p_claim.key) AS k
$$;

-- core.keys.Keys.claim: for a request that was not refused. The one before has ended, or is the
-- holder's own.
CREATE FUNCTION ledger_claim_key(p_tenant text, p_claim claim_word, p_request_id text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO idempotency_keys AS k
        (tenant_id, scope, key, fingerprint, request_id, holder, generation, expires_at)
    VALUES (p_tenant, p_claim.scope, p_claim.key, p_claim.fingerprint, p_request_id,
            p_claim.holder, 1, now() + p_claim.kept_s * interval '1 second')
    ON CONFLICT (tenant_id, scope, key) DO UPDATE
    SET (fingerprint, request_id, holder, generation, superseded, answer, expires_at) =
        (SELECT excluded.fingerprint, excluded.request_id, excluded.holder,
                CASE WHEN k.expires_at <= now() THEN 1 ELSE k.generation + 1 END,
                CASE WHEN k.expires_at <= now() THEN '{}'::text[]
                     WHEN NOT EXISTS (SELECT FROM usage AS u
                                      WHERE u.request_id = k.request_id
                                        AND u.month = ledger_month(k.request_id)
                                        AND u.settled_by = 'gateway'
                                        AND u.cause IN ('failed', 'not_started'))
                     THEN (k.superseded || k.request_id)
                          [greatest(1, cardinality(k.superseded) - 98) :]
                     ELSE k.superseded
                END,
                NULL::bytea, excluded.expires_at)
$$;

-- core.ledger.Book._reverse
CREATE FUNCTION ledger_reverse(
    p_tenant text, p_request_id text, p_answered_by text, p_billing_causes text[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_net bigint;
    v_refused text;
BEGIN
    UPDATE usage AS u SET bill_limit_micro = u.billed_micro
    WHERE u.request_id = p_request_id AND u.month = ledger_month(p_request_id)
      AND u.tenant_id = p_tenant
    RETURNING u.billed_micro + u.adjusted_micro INTO v_net;
    IF v_net > 0 THEN
        SELECT (a.answer).refused INTO v_refused
        FROM ledger_adjust(
            ROW ('idempotency ' || p_request_id, p_tenant, 'refund', v_net, p_request_id, '',
                 'its idempotency key was answered by ' || p_answered_by,
                 'headworks')::adjust_command,
            p_billing_causes) AS a;
        IF v_refused IS NOT NULL THEN
            RAISE EXCEPTION 'the bill of % cannot be taken back: %', p_request_id, v_refused;
        END IF;
    END IF;
END $$;

-- core.keys.Keys.answer, for every settlement that was taken: its request has ended by the
-- gateway's own word. An answer whose key somebody else has by now is dropped.
CREATE FUNCTION ledger_keep_answers(p_settles json, p_billing_causes text[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_word record;
    v_superseded text[];
    v_before text;
BEGIN
    FOR v_word IN
        SELECT s.value ->> 'request_id' AS request_id, s.value ->> 'tenant_id' AS tenant_id,
               json_populate_record(NULL::kept_word, s.value -> 'kept') AS kept
        FROM json_array_elements(p_settles) AS s
        JOIN usage AS u
            ON u.request_id = s.value ->> 'request_id'
           AND u.month = ledger_month(s.value ->> 'request_id')
           AND u.tenant_id = s.value ->> 'tenant_id'
           AND u.settled_by = 'gateway'
        WHERE json_typeof(s.value -> 'kept') = 'object'
    LOOP
        SELECT k.superseded INTO v_superseded FROM idempotency_keys AS k
        WHERE k.tenant_id = v_word.tenant_id AND k.scope = (v_word.kept).scope
          AND k.key = (v_word.kept).key AND k.request_id = v_word.request_id
          AND k.answer IS NULL;
        CONTINUE WHEN NOT FOUND;
        UPDATE idempotency_keys AS k
        SET answer = decode((v_word.kept).answer, 'base64'), superseded = '{}'
        WHERE k.tenant_id = v_word.tenant_id AND k.scope = (v_word.kept).scope
          AND k.key = (v_word.kept).key;
        FOREACH v_before IN ARRAY v_superseded LOOP
            PERFORM ledger_reverse(v_word.tenant_id, v_before, v_word.request_id,
                                   p_billing_causes);
        END LOOP;
    END LOOP;
END $$;

-- One reservation with a claim: a request that is known already, or was refused, has its answer
-- whatever became of the key.
CREATE FUNCTION ledger_reserve_claimed(p_asked reserve_command, p_claim claim_word)
RETURNS ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_answer ledger_answer;
    v_is_new boolean;
BEGIN
    v_is_new := NOT EXISTS (SELECT FROM requests AS q
                            WHERE q.request_id = p_asked.request_id
                              AND q.month = ledger_month(p_asked.request_id))
                AND NOT EXISTS (SELECT FROM refusals AS f
                                WHERE f.request_id = p_asked.request_id);
    IF v_is_new THEN
        v_answer.refused := ledger_key_refused(p_asked.tenant_id, p_claim);
    END IF;
    IF v_answer.refused IS NULL THEN
        SELECT * INTO STRICT v_answer FROM ledger_reserve(ARRAY[p_asked]);
        IF v_is_new AND v_answer.refused IS NULL THEN
            PERFORM ledger_claim_key(p_asked.tenant_id, p_claim, p_asked.request_id);
        END IF;
    END IF;
    v_answer.kind := 'reserve';
    RETURN v_answer;
END $$;

-- Those without a claim together, as ever; then the others one by one, each of which sees what
-- the one before it has claimed.
CREATE FUNCTION ledger_reserve_all(p_reserves json)
RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
DECLARE
    v_asked reserve_command[] :=
        ARRAY(SELECT i FROM json_populate_recordset(NULL::reserve_command, p_reserves) AS i);
    v_plain bigint[];
    v_claiming bigint[];
    v_answer ledger_answer;
    v_n bigint;
BEGIN
    SELECT array_agg(c.n ORDER BY c.n) FILTER (WHERE NOT c.claims),
           array_agg(c.n ORDER BY c.n) FILTER (WHERE c.claims)
    INTO v_plain, v_claiming
    FROM (SELECT r.n, json_typeof(r.value -> 'claim') = 'object' AS claims
          FROM json_array_elements(p_reserves) WITH ORDINALITY AS r (value, n)) AS c;
    IF v_plain IS NOT NULL THEN
        FOR v_answer IN
            SELECT * FROM ledger_reserve(ARRAY(SELECT v_asked[i.n] FROM unnest(v_plain) AS i (n)))
        LOOP
            v_answer.n := v_plain[v_answer.n];
            RETURN NEXT v_answer;
        END LOOP;
    END IF;
    FOREACH v_n IN ARRAY coalesce(v_claiming, '{}') LOOP
        v_answer := ledger_reserve_claimed(
            v_asked[v_n],
            json_populate_record(NULL::claim_word, p_reserves -> (v_n - 1)::integer -> 'claim'));
        v_answer.n := v_n;
        RETURN NEXT v_answer;
    END LOOP;
END $$;

-- A batch in which somebody speaks of an idempotency key; `ledger_apply` is for the others.
CREATE FUNCTION ledger_apply_keyed(
    p_tenants text[], p_settles json, p_top_ups json, p_reserves json, p_billing_causes text[]
) RETURNS SETOF ledger_answer LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY SELECT * FROM ledger_apply(p_tenants, p_settles, p_top_ups, NULL, p_billing_causes);
    IF p_settles IS NOT NULL THEN
        PERFORM ledger_keep_answers(p_settles, p_billing_causes);
    END IF;
    IF p_reserves IS NOT NULL THEN
        RETURN QUERY SELECT * FROM ledger_reserve_all(p_reserves);
    END IF;
END $$;

-- As the others: a plan made while the tables were empty must still go by key.
ALTER FUNCTION ledger_apply_keyed SET enable_seqscan = off SET enable_bitmapscan = off
    SET enable_hashjoin = off SET enable_mergejoin = off
    SET plan_cache_mode = force_generic_plan SET jit = off;

-- Tenants that have opted in to exact repeats being answered from memory.
CREATE TABLE answer_cache_policies (
    tenant_id text PRIMARY KEY REFERENCES tenants (id),
    ttl_s     integer NOT NULL CHECK (ttl_s BETWEEN 1 AND 86400),
    charge    text NOT NULL CHECK (charge IN ('free', 'cached_input'))
);
