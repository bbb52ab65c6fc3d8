-- What a gateway caches, said once: every reader of a key or a tenant reads the same columns.
CREATE VIEW key_rows AS
SELECT k.id, k.tenant_id, k.name, k.revoked_at IS NOT NULL AS revoked, k.version,
       (SELECT jsonb_agg(l.said) FROM limits_said l
         WHERE l.subject = 'key' AND l.id = k.id) AS said,
       EXISTS (
           SELECT FROM caps c
            WHERE c.tenant_id = k.tenant_id AND c.key_id = k.id AND c.hard_micro IS NOT NULL
       ) AS hard_capped,
       (SELECT m.models FROM model_access m
         WHERE m.tenant_id = k.tenant_id AND m.key_id = k.id) AS models
  FROM api_keys k;

CREATE VIEW tenant_rows AS
SELECT t.id, t.name, t.salt, t.output_policy, t.overload_output_tokens, t.weight, t.price_book,
       t.tier, t.billed, t.disabled, t.version, a.hard_cap_micro,
       (SELECT jsonb_agg(l.said) FROM limits_said l
         WHERE (l.subject, l.id) IN (('tenant', t.id), ('tier', t.tier), ('tier_key', t.tier))
       ) AS said,
       a.hard_cap_micro IS NOT NULL OR a.prepaid OR EXISTS (
           SELECT FROM caps c
            WHERE c.tenant_id = t.id AND c.key_id = '' AND c.hard_micro IS NOT NULL
       ) AS hard_capped,
       (SELECT m.models FROM model_access m WHERE m.tenant_id = t.id AND m.key_id = '') AS models
  FROM tenants t JOIN accounts a ON a.tenant_id = t.id;

-- The version of a policy that holds for a tenant; no row for one without a policy.
CREATE VIEW safety_held AS
SELECT s.tenant_id, s.keep_text, p.name, p.version
  FROM tenant_safety s
 CROSS JOIN LATERAL (
     SELECT v.name, v.version FROM safety_policies v
      WHERE v.name = s.policy AND (s.version IS NULL OR v.version = s.version)
      ORDER BY v.version DESC
      LIMIT 1
 ) p;
