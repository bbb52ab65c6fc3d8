"""Who changes what they read loses nobody's change: ETag and If-Match on what is changed."""

import secrets

import pytest

from tests.support.control_plane import ADMIN_TOKEN, assert_refused
from tests.support.registry import a_deployment

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def call(plane, method, path, body=None, tag=None):
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"} | ({"if-match": tag} if tag else {})
    return await plane.client.request(method, f"/admin{path}", json=body, headers=headers)


async def lost_update(plane, path, method, one, other):
    """Two read the same; the second to write is told, and what the first wrote stands."""
    tag = (await call(plane, "GET", path)).headers["etag"]
    first = await call(plane, method, path, one, tag)
    assert first.status_code == 200, first.text
    assert first.headers["etag"] != tag
    assert_refused(await call(plane, method, path, other, tag), 412, "precondition_failed")
    now = await call(plane, "GET", path)
    assert now.headers["etag"] == first.headers["etag"]
    listed = await call(plane, method, path, other, f'"old", {now.headers["etag"]}')
    assert listed.status_code == 200, listed.text
    for said in ("*", None):
        answer = await call(plane, method, path, one, said)
        assert answer.status_code == 200, answer.text


async def test_a_tenant(plane):
    tenant = await plane.made("/tenants", {"name": secrets.token_hex(8)})
    path = f"/tenants/{tenant['id']}"
    await lost_update(plane, path, "PATCH", {"weight": 2}, {"weight": 3})


async def test_limits_of_a_tenant_and_of_a_key(plane):
    tenant = await plane.made("/tenants", {"name": secrets.token_hex(8)})
    key = await plane.made(f"/tenants/{tenant['id']}/keys", {"name": "k"})
    for path in (f"/tenants/{tenant['id']}/limits", f"/keys/{key['id']}/limits"):
        one, other = {"all": {"concurrency": 2}}, {"all": {"concurrency": 3}}
        await lost_update(plane, path, "PUT", one, other)


async def test_a_route_and_its_absence(plane):
    name = secrets.token_hex(6)
    async with plane.services.postgres.transaction() as conn:
        await a_deployment(conn, name)
    path, body = f"/routes/{name}", {"deployment": name}
    assert_refused(await call(plane, "PUT", path, body, "*"), 412, "precondition_failed")
    assert (await call(plane, "PUT", path, body, '"0"')).status_code == 200
    assert_refused(await call(plane, "PUT", path, body, '"0"'), 412, "precondition_failed")
    await lost_update(
        plane, path, "PUT", body | {"max_output_tokens": 5}, body | {"max_output_tokens": 6}
    )
    assert_refused(await call(plane, "DELETE", path, None, '"1"'), 412, "precondition_failed")
    tag = (await call(plane, "GET", path)).headers["etag"]
    assert (await call(plane, "DELETE", path, None, tag)).status_code == 200
