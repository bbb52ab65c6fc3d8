"""Every route the application has, with every role and every kind of credential.

What the table says is asked of the real application: 401 for strangers, 403 for who may not,
and anything else for who may. Bodies are broken and ids unknown, so that nothing is changed.
"""

import re

import pytest

from control_plane.access.roles import CALLS, PUBLIC, ROLES, Permission, Role
from control_plane.app import create_app
from tests.support.browser import Browser, a_browser, a_token, a_user
from tests.support.control_plane import (
    ADMIN_TOKEN,
    assert_refused,
    running,
    the_settings,
    worker_headers,
)

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def plane(postgres_url, valkey_server):
    """One for all tests here: they tell themselves apart by the users that they make."""
    async with running(the_settings(postgres_url, valkey_server.embedded.url)) as plane:
        yield plane


# They end the session that they are asked with.
LAST = {("POST", "/admin/logout")}


def routes():
    """Method, path template, and a path with ids that nothing has."""
    app = create_app(the_settings("postgresql://", "redis://"))
    found = {
        (method, route.path_format, re.sub(r"{\w+:int}", "1", route.path))
        for route in app.routes
        if route.path.startswith("/admin")
        for method in route.methods
        if method != "OPTIONS"
    }
    return sorted((m, t, re.sub(r"{\w+(:\w+)?}", "none", path)) for m, t, path in found)


ROUTES = routes()
GUARDED = [route for route in ROUTES if route[:2] not in PUBLIC]


def test_every_route_has_a_row_and_every_row_a_route():
    assert {(method, template) for method, template, _ in ROUTES} == set(CALLS) | PUBLIC
    assert not set(CALLS) & PUBLIC


async def outcome(plane, method, path, headers):
    answer = await plane.client.request(method, path, content=b"{", headers=headers)
    assert answer.status_code not in (405, 500), (method, path, answer.text)
    return answer


async def walk(plane, headers, permissions):
    """Ask every route with a credential; those that end it come last."""
    for method, template, path in sorted(GUARDED, key=lambda route: route[:2] in LAST):
        answer = await outcome(plane, method, path, headers)
        needs = CALLS[method, template]
        if needs in permissions:
            assert answer.status_code not in (401, 403), (method, path, answer.text)
        else:
            assert_refused(answer, 403, "permission_denied")
            assert needs.value in answer.json()["error"]["message"]


def headers_of(browser):
    return {
        "cookie": "; ".join(f"{k}={v}" for k, v in browser.cookies.items()),
        "origin": "http://control-plane",
        "x-csrf-token": browser.csrf,
    }


@pytest.mark.parametrize("role", Role)
async def test_a_session_may_what_its_users_role_may(plane, role):
    browser = await a_browser(plane, role)
    await walk(plane, headers_of(browser), ROLES[role])


@pytest.mark.parametrize("role", Role)
async def test_a_token_of_a_role_may_the_same_but_for_people_alone(plane, role):
    text = await a_token(plane, role=role)
    allowed = ROLES[role] - {Permission.SELF}
    await walk(plane, {"authorization": f"Bearer {text}"}, allowed)


async def test_a_token_of_one_permission_may_nothing_else(plane):
    one_each = {CALLS[method, template]: (method, path) for method, template, path in GUARDED}
    for permission in sorted(set(Permission) - {Permission.SELF}):
        headers = {"authorization": f"Bearer {await a_token(plane, permissions=[permission])}"}
        for needs, (method, path) in one_each.items():
            answer = await outcome(plane, method, path, headers)
            may = needs in (permission, Permission.IDENTIFY)
            assert (answer.status_code not in (401, 403)) == may, (permission, method, path)


async def test_a_user_without_a_role_may_only_look_at_themselves(plane):
    browser = await a_browser(plane)
    await walk(plane, headers_of(browser), frozenset())


async def test_the_admin_token_opens_everything_in_the_table(plane):
    await walk(plane, {"authorization": f"Bearer {ADMIN_TOKEN}"}, frozenset(Permission))


async def test_strangers_are_told_nothing_of_any_route(plane):
    user = await a_user(plane, "admin")
    signed_out = Browser(plane)
    await signed_out.sign_in(user["email"])
    stale = headers_of(signed_out)
    assert (await signed_out.send("POST", "/logout")).status_code == 200
    revoked = await plane.made("/tokens", {"name": "t", "role": "admin"})
    await plane.admin("DELETE", f"/tokens/{revoked['token']['id']}")
    strangers = {
        "nobody": {},
        "a forged token": {"authorization": "Bearer hwt_" + "A" * 43},
        "a revoked token": {"authorization": f"Bearer {revoked['text']}"},
        "a session that is over": stale,
        "a forged session": {"cookie": "__Host-headworks=hws_" + "A" * 43},
        "a session as a bearer": {"authorization": f"Bearer {stale['cookie'].partition('=')[2]}"},
        "a token as a session": {"cookie": f"__Host-headworks={revoked['text']}"},
        "a worker": worker_headers(),
    }
    for headers in strangers.values():
        for method, _, path in GUARDED:
            assert_refused(await outcome(plane, method, path, headers), 401, "invalid_api_key")


async def test_a_route_that_nobody_decided_about_is_closed_to_everybody(plane, monkeypatch):
    # A row taken away is what a new handler without one looks like.
    monkeypatch.delitem(CALLS, ("GET", "/admin/tenants"))
    assert_refused(await plane.admin("GET", "/tenants"), 403, "permission_denied")
    browser = await a_browser(plane, "admin")
    assert_refused(await browser.send("GET", "/tenants"), 403, "permission_denied")
