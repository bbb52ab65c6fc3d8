"""Opting a tenant in to answers given again."""

import pytest

from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def test_a_tenant_opts_in_and_out(plane):
    tenant = await a_tenant(plane.services.postgres)
    path = f"/tenants/{tenant}/answer-cache"
    assert (await plane.admin("GET", path)).json() == {"tenant_id": tenant, "policy": None}
    put = await plane.admin("PUT", path, {"charge": "cached_input"})
    policy = {"ttl_s": 3_600, "charge": "cached_input"}
    assert put.json() == {"tenant_id": tenant, "policy": policy}
    assert (await plane.admin("GET", path)).json()["policy"] == policy
    for _ in range(2):
        gone = await plane.admin("DELETE", path)
        assert (gone.status_code, gone.json()["policy"]) == (200, None)
    log = (await plane.admin("GET", "/audit-log", subject=tenant)).json()
    actions = [entry["action"] for entry in log["records"]]
    assert actions.count("answer_cache.put") == actions.count("answer_cache.drop") == 1


async def test_bad_words_and_unknown_tenants_are_refused(plane):
    tenant = await a_tenant(plane.services.postgres)
    for body in ({"ttl_s": 0}, {"ttl_s": 86_401}, {"charge": "half"}, {"unknown": 1}):
        refused = await plane.admin("PUT", f"/tenants/{tenant}/answer-cache", body)
        assert refused.status_code == 422, body
    for method, body in (("GET", None), ("PUT", {}), ("DELETE", None)):
        path = "/tenants/ten_nobody/answer-cache"
        assert (await plane.admin(method, path, body)).status_code == 404
