"""Tenants and keys through the admin API: successes, refusals, and what is never told."""

import secrets

import pytest

from core.tenancy import key_digest, well_formed
from store import tenants
from tests.support.control_plane import PEPPER, assert_refused

pytestmark = [pytest.mark.services, pytest.mark.anyio]


def a_name():
    return f"tenant {secrets.token_hex(4)}"


async def test_a_tenant_is_made_read_and_found_by_name(plane):
    body = {
        "name": a_name(),
        "limits": {"requests_per_min": 60},
        "weight": 3,
        "hard_cap_micro": 5_000_000,
    }
    answer = await plane.admin("POST", "/tenants", body)
    assert answer.status_code == 201
    made = answer.json()
    assert made["id"].startswith("ten_")
    assert "salt" not in made
    assert made["limits"] == {
        "requests_per_min": 60,
        "input_tokens_per_min": 0,
        "output_tokens_per_min": 0,
        "concurrency": 0,
    }
    assert made["bounds"] == {"prompt_tokens_max": 0, "output_tokens_max": 0, "deadline_ms_max": 0}
    assert made["output_policy"] == "clamp"
    assert (made["weight"], made["hard_cap_micro"], made["disabled"]) == (3, 5_000_000, False)
    assert (await plane.admin("GET", f"/tenants/{made['id']}")).json() == made
    found = (await plane.admin("GET", "/tenants", name=body["name"])).json()
    assert found == {"tenants": [made], "after": None}


async def test_how_long_answers_may_be_under_overload_is_the_tenant_s_to_say(plane):
    made = await plane.made("/tenants", {"name": a_name()})
    assert made["overload_output_tokens"] == 0
    changes = {"overload_output_tokens": 64}
    changed = (await plane.admin("PATCH", f"/tenants/{made['id']}", changes)).json()
    assert changed["overload_output_tokens"] == 64
    assert (await plane.admin("GET", f"/tenants/{made['id']}")).json() == changed
    bad = {"overload_output_tokens": -1}
    answer = await plane.admin("PATCH", f"/tenants/{made['id']}", bad)
    assert_refused(answer, 422, "unprocessable", "overload_output_tokens")


async def test_a_taken_name_is_refused_with_the_id_that_has_it(plane):
    name = a_name()
    made = await plane.made("/tenants", {"name": name})
    answer = await plane.admin("POST", "/tenants", {"name": name})
    assert_refused(answer, 409, "conflict", "name")
    assert answer.json()["error"]["existing_id"] == made["id"]


async def test_what_is_not_a_tenant_is_refused_by_its_field(plane):
    for body, param in [
        ({"name": "x", "frobnicate": 1}, "frobnicate"),
        ({"name": "x", "limits": {"frobnicate": 1}}, "limits.frobnicate"),
        ({"name": "x", "limits": {"concurrency": -1}}, "limits.concurrency"),
        ({"name": "x", "limits": {"concurrency": "4"}}, "limits.concurrency"),
        ({"name": "x", "limits": {"concurrency": 2**60}}, "limits.concurrency"),
        ({"name": "x", "weight": 0}, "weight"),
        ({"name": "x", "weight": 1.5}, "weight"),
        ({"name": "x", "hard_cap_micro": -1}, "hard_cap_micro"),
        ({"name": "x", "disabled": "no"}, "disabled"),
        ({"name": "x", "price_book": "none such"}, "price_book"),
        ({"name": "x", "tier": ""}, "tier"),
        ({"name": "x", "tier": "Gold"}, "tier"),
        ({"name": "x", "billed": 1}, "billed"),
        ({"name": ""}, "name"),
        ({"name": " x"}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"name": "line\nbreak"}, "name"),
        ({"name": None}, "name"),
        ({}, "name"),
        ([], None),
    ]:
        assert_refused(await plane.admin("POST", "/tenants", body), 422, "unprocessable", param)


async def test_a_patch_changes_what_it_names_and_raises_the_version(plane):
    limits = {"requests_per_min": 60, "concurrency": 2}
    made = await plane.made("/tenants", {"name": a_name(), "limits": limits})
    path = f"/tenants/{made['id']}"
    answer = await plane.admin("PATCH", path, {"limits": {"concurrency": 9}, "disabled": True})
    assert answer.status_code == 200
    changed = answer.json()
    assert changed["limits"] == made["limits"] | {"concurrency": 9}
    assert changed["disabled"]
    assert changed["version"] > made["version"]
    assert (await plane.admin("GET", path)).json() == changed


async def test_a_hard_cap_is_set_and_taken_away(plane):
    made = await plane.made("/tenants", {"name": a_name()})
    assert made["hard_cap_micro"] is None
    path = f"/tenants/{made['id']}"
    for cap in (7, None):
        answer = await plane.admin("PATCH", path, {"hard_cap_micro": cap})
        assert answer.json()["hard_cap_micro"] == cap


async def test_a_tenants_terms_are_list_prices_until_something_else_is_said(plane):
    made = await plane.made("/tenants", {"name": a_name()})
    terms = {"price_book": "list", "tier": "standard", "billed": True}
    assert {name: made[name] for name in terms} == terms
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("INSERT INTO price_books (id) VALUES ('acme') ON CONFLICT DO NOTHING")
    path = f"/tenants/{made['id']}"
    other = {"price_book": "acme", "tier": "gold_2", "billed": False}
    changed = (await plane.admin("PATCH", path, other)).json()
    assert {name: changed[name] for name in other} == other
    assert (await plane.admin("GET", path)).json() == changed
    with_them = await plane.made("/tenants", {"name": a_name()} | other)
    assert {name: with_them[name] for name in other} == other
    answer = await plane.admin("PATCH", path, {"price_book": "none such"})
    assert_refused(answer, 422, "unprocessable", "price_book")
    assert (await plane.admin("GET", path)).json() == changed


async def test_a_patch_of_an_unknown_field_or_tenant_is_refused(plane):
    made = await plane.made("/tenants", {"name": a_name()})
    answer = await plane.admin("PATCH", f"/tenants/{made['id']}", {"name": "other"})
    assert_refused(answer, 422, "unprocessable", "name")
    assert_refused(await plane.admin("PATCH", "/tenants/ten_0", {}), 404, "not_found")
    assert_refused(await plane.admin("GET", "/tenants/ten_0"), 404, "not_found")


async def test_tenants_come_in_pages(plane):
    prefix = secrets.token_hex(4)
    for n in range(5):
        await plane.made("/tenants", {"name": f"page {prefix} {n}"})
    names, after = [], f"page {prefix}"
    while after is not None and len(names) < 5:
        page = (await plane.admin("GET", "/tenants", after=after, limit=2)).json()
        names += [tenant["name"] for tenant in page["tenants"]]
        after = page["after"]
    assert names[:5] == [f"page {prefix} {n}" for n in range(5)]


async def test_a_list_is_bounded(plane):
    for limit in [0, 1001, "x"]:
        answer = await plane.admin("GET", "/tenants", limit=limit)
        assert_refused(answer, 422, "unprocessable", "limit")


async def test_a_key_is_shown_once_and_only_its_digest_is_kept(plane):
    tenant = await plane.made("/tenants", {"name": a_name()})
    path = f"/tenants/{tenant['id']}/keys"
    made = await plane.made(path, {"name": "ci"})
    text = made["key"]
    assert well_formed(text)
    assert text.startswith(made["public"])
    listed = await plane.admin("GET", path)
    assert text not in listed.text
    assert [key["id"] for key in listed.json()["keys"]] == [made["id"]]
    async with plane.services.postgres.connection() as conn:
        found = await tenants.key_by_digest(conn, key_digest(PEPPER.encode(), text))
        assert found is not None
        assert found[0].id == made["id"]
        cursor = await conn.execute(
            "SELECT api_keys::text, audit_log::text FROM api_keys, audit_log"
        )
        secret = text.split("_")[2]
        assert not any(secret in column for row in await cursor.fetchall() for column in row)


async def test_a_revoked_key_has_a_higher_version_and_stays_listed(plane):
    tenant = await plane.made("/tenants", {"name": a_name()})
    path = f"/tenants/{tenant['id']}/keys"
    made = await plane.made(path, {"name": "ci"})
    async with plane.services.postgres.connection() as conn:
        before = (await tenants.changes_since(conn, 0, limit=10_000)).version
    revoked = await plane.admin("DELETE", f"/keys/{made['id']}")
    assert revoked.status_code == 200
    assert revoked.json()["version"] > made["version"]
    assert revoked.json()["revoked_ms"] is not None
    async with plane.services.postgres.connection() as conn:
        changes = await tenants.changes_since(conn, before)
    assert [(key.id, key.revoked) for key in changes.keys] == [(made["id"], True)]
    (listed,) = (await plane.admin("GET", path)).json()["keys"]
    assert listed == revoked.json()
    again = await plane.admin("DELETE", f"/keys/{made['id']}")
    assert again.json()["revoked_ms"] == revoked.json()["revoked_ms"]


async def test_keys_of_nobody_are_not_found(plane):
    assert_refused(
        await plane.admin("POST", "/tenants/ten_0/keys", {"name": "x"}), 404, "not_found"
    )
    assert_refused(await plane.admin("GET", "/tenants/ten_0/keys"), 404, "not_found")
    assert_refused(await plane.admin("DELETE", "/keys/key_0"), 404, "not_found")


async def test_what_is_not_a_key_is_refused_by_its_field(plane):
    for body, param in [({"name": "x", "id": "y"}, "id"), ({"name": ""}, "name"), ({}, "name")]:
        tenant = await plane.made("/tenants", {"name": a_name()})
        answer = await plane.admin("POST", f"/tenants/{tenant['id']}/keys", body)
        assert_refused(answer, 422, "unprocessable", param)


async def test_every_change_is_in_the_audit_log(plane):
    tenant = await plane.made("/tenants", {"name": a_name()})
    await plane.admin("PATCH", f"/tenants/{tenant['id']}", {"weight": 4})
    key = await plane.made(f"/tenants/{tenant['id']}/keys", {"name": "k"})
    await plane.admin("DELETE", f"/keys/{key['id']}")
    of_tenant = (await plane.admin("GET", "/audit-log", subject=tenant["id"])).json()["records"]
    of_key = (await plane.admin("GET", "/audit-log", subject=key["id"])).json()["records"]
    assert [record["action"] for record in of_tenant] == ["tenant.change", "tenant.create"]
    assert [record["action"] for record in of_key] == ["key.revoke", "key.create"]
    assert of_tenant[0]["detail"] == {"weight": 4}
    assert {record["actor"] for record in of_tenant} == {"admin"}
    (newest,) = (await plane.admin("GET", "/audit-log", limit=1)).json()["records"]
    older = await plane.admin("GET", "/audit-log", limit=1, before=newest["id"])
    assert older.json()["records"][0]["id"] < newest["id"]
