"""Route tables as operators write them: what is taken, refused, and never overwritten unseen."""

import secrets

import pytest

from store import registry, tenants
from tests.support.control_plane import assert_refused
from tests.support.registry import a_deployment

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def two_deployments(plane):
    names = [f"dep-{secrets.token_hex(4)}" for _ in range(2)]
    async with plane.services.postgres.transaction() as conn:
        for name in names:
            await a_deployment(conn, name)
    return names


def a_name():
    return f"org/{secrets.token_hex(4)}"


async def put(plane, name, body, **query):
    return await plane.admin("PUT", f"/routes/{name}", body, **query)


async def test_a_table_is_written_and_read_back(plane):
    one, two = await two_deployments(plane)
    name = a_name()
    body = {
        "targets": [
            {"deployment": one, "weight": 95},
            {"deployment": two, "weight": 5, "when": {"tiers": ["gold"], "tags": {"a": "b"}}},
        ],
        "fallbacks": [{"on": ["capacity", "timeout"], "target": {"deployment": two}}],
        "max_output_tokens": 9,
    }
    written = await put(plane, name, body)
    assert written.status_code == 200, written.text
    assert written.json()["replaced"] is None
    read = (await plane.admin("GET", f"/routes/{name}")).json()
    assert [t["deployment"] for t in read["targets"]] == [one, two]
    assert read["targets"][1]["when"] == {"tiers": ["gold"], "tags": {"a": "b"}}
    assert read["fallbacks"][0]["on"] == ["capacity", "timeout"]
    assert (read["max_output_tokens"], read["deployment"]) == (9, "")
    listed = (await plane.admin("GET", "/routes", limit=1000)).json()["routes"]
    assert read in listed
    async with plane.services.postgres.connection() as conn:
        assert await registry.version_in_use(conn, "v1")
        assert not await registry.provider_in_use(conn, "none")


async def test_two_policies_do_not_overwrite_each_other_silently(plane):
    # agentgateway: of two policies on one target the later one won, and nobody was told.
    one, two = await two_deployments(plane)
    name = a_name()
    split = {"targets": [{"deployment": one}, {"deployment": two}]}
    first = (await put(plane, name, {"deployment": one})).json()
    # A plain route is moved by a plain route, as ever, and the answer says what it replaced.
    moved = (await put(plane, name, {"deployment": two})).json()
    assert (moved["replaced"]["deployment"], moved["replaced"]["version"]) == (
        one,
        first["version"],
    )
    for body in (split, {"deployment": one, "if_version": first["version"]}):
        assert_refused(await put(plane, name, body), 409, "conflict", "if_version")
    table = await put(plane, name, split | {"if_version": moved["version"]})
    assert table.status_code == 200
    for body in ({"deployment": one}, split, split | {"if_version": 0}):
        assert_refused(await put(plane, name, body), 409, "conflict", "if_version")
    assert (await plane.admin("GET", f"/routes/{name}")).json()["version"] == (
        table.json()["version"]
    )
    log = (await plane.admin("GET", "/audit-log", subject=name)).json()
    assert "before" in str(log)


async def test_what_cannot_be_is_refused_by_its_field_and_changes_nothing(plane):
    one, two = await two_deployments(plane)
    name = a_name()
    target = {"deployment": one}
    for body, status, param in [
        ({}, 422, "deployment"),
        ({"deployment": one, "alias": "x"}, 422, "deployment"),
        ({"deployment": one, "fallbacks": [{"on": ["error"], "target": target}]}, 422, "fallbacks"),
        ({"targets": [{"deployment": one, "weight": 0}]}, 422, "targets"),
        ({"targets": [{"deployment": one, "weight": -1}]}, 422, None),
        ({"targets": [{"deployment": one, "share": 1}]}, 422, None),
        ({"targets": [target, {"deployment": "none"}]}, 404, "targets.1.deployment"),
        (
            {"targets": [{"provider": "none", "model": "m", "context_tokens": 9}]},
            404,
            "targets.0.provider",
        ),
        ({"targets": [target], "fallbacks": [{"on": ["bad"], "target": target}]}, 422, None),
        ({"alias": "none"}, 404, "alias"),
        ({"alias": name}, 422, "alias"),
    ]:
        answer = await put(plane, name, body)
        assert answer.status_code == status, (body, answer.text)
        if param is not None:
            assert answer.json()["error"]["param"] == param
    answer = await put(plane, name, {"deployment": two}, tenant="ten_none")
    assert_refused(answer, 404, "not_found")
    assert_refused(await plane.admin("GET", f"/routes/{name}"), 404, "not_found")


async def test_aliases_lead_somewhere_and_never_in_a_circle(plane):
    one, _ = await two_deployments(plane)
    real, first, second = a_name(), a_name(), a_name()
    await put(plane, real, {"deployment": one})
    assert (await put(plane, first, {"alias": real})).status_code == 200
    assert (await put(plane, second, {"alias": first})).status_code == 200
    version = (await plane.admin("GET", f"/routes/{first}")).json()["version"]
    body = {"alias": second, "if_version": version}
    assert_refused(await put(plane, first, body), 409, "conflict", "alias")
    assert_refused(await plane.admin("DELETE", f"/routes/{real}"), 409, "conflict", "model")
    assert (await plane.admin("GET", f"/routes/{real}")).status_code == 200
    for name in (second, first, real):
        assert (await plane.admin("DELETE", f"/routes/{name}")).status_code == 200


async def test_a_tenant_has_a_table_of_its_own_beside_everybodys(plane):
    one, two = await two_deployments(plane)
    name = a_name()
    tenant = (await plane.made("/tenants", {"name": secrets.token_hex(4)}))["id"]
    await put(plane, name, {"deployment": one})
    own = await put(plane, name, {"deployment": two}, tenant=tenant)
    assert (own.json()["tenant"], own.json()["replaced"]) == (tenant, None)
    listed = (await plane.admin("GET", "/routes", tenant=tenant)).json()["routes"]
    assert [route["deployment"] for route in listed] == [two]
    assert (await plane.admin("GET", f"/routes/{name}")).json()["deployment"] == one
    await plane.admin("DELETE", f"/routes/{name}", tenant=tenant)
    assert (await plane.admin("GET", f"/routes/{name}")).json()["deployment"] == one


async def test_models_are_allowed_to_a_tenant_and_to_one_of_its_keys(plane):
    tenant = (await plane.made("/tenants", {"name": secrets.token_hex(4)}))["id"]
    key = (await plane.made(f"/tenants/{tenant}/keys", {"name": "k"}))["id"]
    path, key_path = f"/tenants/{tenant}/models", f"/keys/{key}/models"
    for where in (path, key_path):
        assert_refused(await plane.admin("DELETE", where), 404, "not_found")
        assert_refused(
            await plane.admin("PUT", where, {"models": ["a b"]}), 422, "unprocessable", "models[0]"
        )
    assert (await plane.admin("PUT", path, {"models": ["m", "n", "m"]})).status_code == 200
    assert (await plane.admin("PUT", key_path, {"models": []})).json()["models"] == []
    listed = (await plane.admin("GET", path)).json()["access"]
    assert [(one["key"], one["models"]) for one in listed] == [("", ["m", "n"]), (key, [])]
    async with plane.services.postgres.connection() as conn:
        changed = await tenants.changes_since(conn, 0)
    assert [t.models for t in changed.tenants if t.id == tenant] == [("m", "n")]
    assert [k.models for k in changed.keys if k.id == key] == [()]
    assert (await plane.admin("DELETE", key_path)).json()["access"][0]["key"] == ""
    assert (await plane.admin("DELETE", path)).json() == {"access": []}
    for where in ("/tenants/none/models", "/keys/none/models"):
        assert_refused(await plane.admin("PUT", where, {"models": []}), 404, "not_found")
