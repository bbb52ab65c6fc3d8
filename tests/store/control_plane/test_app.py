"""What holds for every endpoint: who may call, how refusals look, what is counted."""

import re

import pytest
import redis

from control_plane.access.roles import PUBLIC
from control_plane.app import create_app
from store.keys import ROUTE_VERSIONS, TENANT_PARTS, tenant_keys
from tests.support.control_plane import (
    ADMIN_TOKEN,
    assert_refused,
    the_settings,
    worker_headers,
)
from tests.support.registry import a_deployment

pytestmark = [pytest.mark.services, pytest.mark.anyio]

ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}


def admin_endpoints():
    app = create_app(the_settings("postgresql://", "redis://"))
    return sorted(
        (
            method,
            re.sub(r"{\w+:int}", "1", route.path)
            .replace("{model:path}", "m")
            .replace(":str}", "}"),
        )
        for route in app.routes
        for method in getattr(route, "methods", ())
        if route.path.startswith("/admin/")
        and method != "OPTIONS"
        and (method, route.path_format) not in PUBLIC
    )


BAD_HEADERS = {
    "none": {},
    "wrong": {"authorization": "Bearer an admin token for testz"},
    "empty": {"authorization": "Bearer "},
    "another scheme": {"authorization": f"Basic {ADMIN_TOKEN}"},
    "not ASCII": {"authorization": "Bearer \u00e4".encode("latin-1")},
    "a worker's": worker_headers(),
}


async def test_every_admin_endpoint_asks_for_the_admin_token_first(plane):
    endpoints = admin_endpoints()
    assert len(endpoints) >= 24
    for headers in BAD_HEADERS.values():
        for method, path in endpoints:
            # Not even the shape of a body is told to a stranger.
            answer = await plane.client.request(method, path, content=b"{", headers=headers)
            assert_refused(answer, 401, "invalid_api_key")


async def test_the_scheme_is_read_in_any_case(plane):
    headers = {"authorization": f"bearer {ADMIN_TOKEN}"}
    assert (await plane.client.get("/admin/tenants", headers=headers)).status_code == 200


async def test_malformed_json_is_400(plane):
    for body in [b"", b"{", b"\xff", b'{"name": "\\ud800"}', b"nul"]:
        answer = await plane.client.post("/admin/tenants", content=body, headers=ADMIN)
        assert_refused(answer, 400, "bad_request")


async def test_a_nul_is_refused_wherever_it_comes(plane):
    refused = [
        await plane.admin("POST", "/tenants", {"name": "a\x00b"}),
        await plane.admin("GET", "/tenants", name="a\x00b"),
        await plane.admin("GET", "/tenants/a%00b"),
    ]
    for answer in refused:
        assert_refused(answer, 422, "unprocessable")


async def test_unknown_paths_and_methods_have_the_same_error_body(plane):
    assert_refused(await plane.admin("GET", "/frobnicate"), 404, "not_found")
    answer = await plane.admin("PUT", "/tenants", {})
    assert_refused(answer, 405, "method_not_allowed")
    assert "POST" in answer.headers["allow"]


async def test_a_body_of_33_megabytes_is_refused(plane):
    answer = await plane.client.post(
        "/admin/tenants", content=b" " * (33 * 1024 * 1024), headers=ADMIN
    )
    assert_refused(answer, 413, "request_too_large")


async def test_health_needs_no_token_and_says_what_is_well(plane):
    assert (await plane.client.get("/health/live")).json() == {"status": "live"}
    answer = await plane.client.get("/health/ready")
    assert answer.status_code == 200
    well = answer.json()
    assert isinstance(well.pop("leads"), bool)
    assert well == {"ready": True, "degraded": False, "postgres": "ok", "valkey": "ok"}


async def test_metrics_are_counted_by_template_and_never_by_id(plane):
    await plane.admin("GET", "/tenants/ten_0")
    text = (await plane.client.get("/metrics")).text
    assert (
        'headworks_control_plane_requests_total{method="GET",'
        'path="/admin/tenants/{tenant}",status="404"} 1.0'
    ) in text
    assert "ten_0" not in text
    assert "headworks_control_plane_request_seconds_bucket" in text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}
    prefixes = ("headworks_control_plane_", "headworks_reconciler_")
    assert all(name.startswith(prefixes) for name in names)


async def test_every_endpoint_is_described(plane):
    described = (await plane.client.get("/schema/openapi.json")).json()
    assert described["info"]["title"] == "Headworks control plane"
    operations = [(path, method) for path, ways in described["paths"].items() for method in ways]
    assert ("/admin/tenants", "post") in operations
    assert ("/fleet/journal", "post") in operations


async def test_changes_are_pushed_to_where_gateways_compare_versions(plane, valkey_url):
    tenant = await plane.made("/tenants", {"name": "pushed"})
    changed = await plane.admin("PATCH", f"/tenants/{tenant['id']}", {"weight": 2})
    key = await plane.made(f"/tenants/{tenant['id']}/keys", {"name": "k"})
    revoked = await plane.admin("DELETE", f"/keys/{key['id']}")
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn, "pushed")
    route = await plane.admin("PUT", "/routes/org/m", {"deployment": "pushed"})
    deleted = await plane.admin("DELETE", "/routes/org/m")
    assert route.json()["version"] < deleted.json()["version"]
    with redis.Redis.from_url(valkey_url) as valkey:
        versions = tenant_keys(tenant["id"])[TENANT_PARTS.index("versions")]
        assert int(valkey.hget(versions, "tenant")) == changed.json()["version"]
        assert int(valkey.hget(versions, f"key:{key['id']}")) == revoked.json()["version"]
        assert int(valkey.hget(ROUTE_VERSIONS, "org/m")) == deleted.json()["version"]
