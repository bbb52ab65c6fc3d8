-- Which tenants may be given answers again.

-- name: policies
SELECT tenant_id, ttl_s, charge FROM answer_cache_policies ORDER BY tenant_id

-- name: policy_of
SELECT ttl_s, charge FROM answer_cache_policies WHERE tenant_id = :tenant_id

-- name: put_policy
INSERT INTO answer_cache_policies (tenant_id, ttl_s, charge)
VALUES (:tenant_id, :ttl_s, :charge)
ON CONFLICT (tenant_id) DO UPDATE SET ttl_s = excluded.ttl_s, charge = excluded.charge

-- name: drop_policy
DELETE FROM answer_cache_policies WHERE tenant_id = :tenant_id
