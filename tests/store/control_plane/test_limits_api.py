"""Limits of tiers, tenants and keys through the admin API, and who hears of a change."""

import secrets

import pytest

from core.allowance import Allowance
from core.scopes import bounds_of, scopes_of
from core.tickets import Limits, Scope
from store import tenants
from store.changes import current_change
from tests.support.control_plane import assert_refused
from tests.support.registry import a_deployment

pytestmark = [pytest.mark.services, pytest.mark.anyio]

MODEL = "smol"


@pytest.fixture
async def model(plane):
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn, f"smol-{secrets.token_hex(3)}")
    return MODEL


async def a_tenant(plane, **fields):
    body = {"name": f"tenant {secrets.token_hex(4)}", "tier": f"tier-{secrets.token_hex(3)}"}
    return await plane.made("/tenants", body | fields)


async def put(plane, path, body):
    answer = await plane.admin("PUT", path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def in_force(plane, tenant):
    async with plane.services.postgres.connection() as conn:
        found = await tenants.tenant_by_id(conn, tenant)
    assert found is not None
    return found


async def test_a_tier_speaks_for_its_tenants_until_they_speak_themselves(plane, model):
    tenant = await a_tenant(plane, limits={"concurrency": 3})
    tier = f"/tiers/{tenant['tier']}/limits"
    body = {
        "tenants": {"concurrency": 8, "requests_per_min": 100, "prompt_tokens_max": 500},
        "keys": {"requests_per_min": 10},
        "models": {model: {"output_tokens_per_min": 70}},
    }
    told = await put(plane, tier, body)
    assert (await plane.admin("GET", tier)).json() == told
    assert told["tenants"]["concurrency"] == 8
    assert told["tenants"]["input_tokens_per_min"] is None
    found = await in_force(plane, tenant["id"])
    assert found.limits == Limits(requests_per_min=100, concurrency=3)
    assert found.bounds.prompt_tokens_max == 500
    assert found.key_allowance == Allowance(requests_per_min=10)
    assert found.model_allowances == {model: Allowance(output_tokens_per_min=70)}
    shown = (await plane.admin("GET", f"/tenants/{tenant['id']}")).json()
    assert shown["limits"]["requests_per_min"] == 100
    own = {"all": {"requests_per_min": 0}, "models": {model: {"output_tokens_per_min": 9}}}
    both = await put(plane, f"/tenants/{tenant['id']}/limits", own)
    assert both["own"]["all"]["concurrency"] is None
    assert both["effective"]["all"]["concurrency"] == 8
    assert both["effective"]["all"]["requests_per_min"] == 0
    assert both["effective"]["models"][model]["output_tokens_per_min"] == 9
    assert (await in_force(plane, tenant["id"])).limits == Limits(concurrency=8)
    await put(plane, f"/tenants/{tenant['id']}/limits", {})
    await put(plane, tier, {})
    assert (await in_force(plane, tenant["id"])).limits == Limits()


async def test_a_patch_says_one_number_and_null_leaves_it_to_the_tier(plane):
    tenant = await a_tenant(plane, limits={"concurrency": 3, "requests_per_min": 5})
    await put(plane, f"/tiers/{tenant['tier']}/limits", {"tenants": {"concurrency": 8}})
    changes = {"limits": {"concurrency": None, "deadline_ms_max": 900}, "output_policy": "refuse"}
    changed = (await plane.admin("PATCH", f"/tenants/{tenant['id']}", changes)).json()
    assert changed["limits"]["concurrency"] == 8
    assert changed["limits"]["requests_per_min"] == 5
    assert changed["bounds"]["deadline_ms_max"] == 900
    assert changed["output_policy"] == "refuse"


async def test_a_key_has_limits_of_its_own_before_its_tiers(plane, model):
    tenant = await a_tenant(plane)
    await put(plane, f"/tiers/{tenant['tier']}/limits", {"keys": {"requests_per_min": 10}})
    key = await plane.made(f"/tenants/{tenant['id']}/keys", {"name": "k"})
    path = f"/keys/{key['id']}/limits"
    read = (await plane.admin("GET", path)).json()
    assert read["effective"]["all"]["requests_per_min"] == 10
    own = {"all": {"concurrency": 1}, "models": {model: {"requests_per_min": 2}}}
    both = await put(plane, path, own)
    assert (await plane.admin("GET", path)).json() == both
    assert both["effective"]["all"]["requests_per_min"] == 10
    async with plane.services.postgres.connection() as conn:
        changes = await tenants.changes_since(conn, key["version"])
    (record,) = [one for one in changes.keys if one.id == key["id"]]
    found = await in_force(plane, tenant["id"])
    assert scopes_of(found, record, model) == (
        Scope(name=f"key:{key['id']}", limits=Limits(requests_per_min=10, concurrency=1)),
        Scope(name=f"key:{key['id']} model:{model}", limits=Limits(requests_per_min=2)),
    )
    assert bounds_of(found, record, model) == found.bounds


async def test_every_tenant_of_a_tier_hears_of_its_change_in_pages_of_any_size(plane):
    first = await a_tenant(plane)
    tier = first["tier"]
    made = {first["id"]} | {(await a_tenant(plane, tier=tier))["id"] for _ in range(4)}
    async with plane.services.postgres.connection() as conn:
        cursor = await current_change(conn, "tenancy")
    await put(plane, f"/tiers/{tier}/limits", {"tenants": {"concurrency": 8}})
    heard = []
    async with plane.services.postgres.connection() as conn:
        while True:
            page = await tenants.changes_since(conn, cursor, limit=2)
            heard += page.tenants
            cursor = page.version
            if len(page.tenants) < 2:
                break
    assert made <= {tenant.id for tenant in heard}
    assert len({tenant.version for tenant in heard}) == len(heard)
    assert all(tenant.limits.concurrency == 8 for tenant in heard if tenant.id in made)


# envoyproxy/ai-gateway: a QuotaPolicy whose model name matches none is silently not applied.
async def test_a_limit_on_a_model_that_is_none_is_refused_not_ignored(plane, model):
    tenant = await a_tenant(plane)
    key = await plane.made(f"/tenants/{tenant['id']}/keys", {"name": "k"})
    wrong = {"models": {model.upper(): {"requests_per_min": 1}}}
    for path in (
        f"/tiers/{tenant['tier']}/limits",
        f"/tenants/{tenant['id']}/limits",
        f"/keys/{key['id']}/limits",
    ):
        answer = await plane.admin("PUT", path, wrong)
        assert_refused(answer, 422, "unprocessable", f"models.{model.upper()}")
    async with plane.services.postgres.connection() as conn:
        cursor = await conn.execute(
            "SELECT count(*) FROM limits WHERE model = %s", (model.upper(),)
        )
        assert await cursor.fetchone() == (0,)


async def test_what_is_not_a_limit_is_refused_by_its_field(plane):
    tenant = await a_tenant(plane)
    path = f"/tenants/{tenant['id']}/limits"
    for body, param in [
        ({"all": {"frobnicate": 1}}, "all.frobnicate"),
        ({"frobnicate": {}}, "frobnicate"),
        ({"all": {"concurrency": -1}}, "all.concurrency"),
        ({"all": {"concurrency": "4"}}, "all.concurrency"),
        ({"all": {"concurrency": 2**60}}, "all.concurrency"),
        ({"all": {"concurrency": 1.5}}, "all.concurrency"),
    ]:
        assert_refused(await plane.admin("PUT", path, body), 422, "unprocessable", param)
    many = {"models": {f"m{i}": {} for i in range(257)}}
    assert (await plane.admin("PUT", path, many)).status_code == 422
    for missing in ("/tenants/none/limits", "/keys/none/limits", "/tiers/No Tier/limits"):
        assert_refused(await plane.admin("PUT", missing, {}), 404, "not_found", None)
    bad = {"name": "x", "output_policy": "maybe"}
    assert_refused(
        await plane.admin("POST", "/tenants", bad), 422, "unprocessable", "output_policy"
    )


async def test_setting_limits_is_on_the_record(plane):
    tenant = await a_tenant(plane)
    await put(plane, f"/tenants/{tenant['id']}/limits", {"all": {"concurrency": 2}})
    log = (await plane.admin("GET", "/audit-log", subject=tenant["id"])).json()
    actions = [entry["action"] for entry in log["records"]]
    assert "limits.set" in actions
