"""Users, their tokens and sessions, as operators change them; and what the log says of it."""

import secrets

import psycopg
import pytest

from tests.support.browser import PASSWORD, Browser, a_browser, a_user
from tests.support.control_plane import ADMIN_TOKEN, assert_refused, running, the_settings

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def plane(postgres_url, valkey_server):
    """One for all tests here: they tell themselves apart by the users that they make."""
    async with running(the_settings(postgres_url, valkey_server.embedded.url)) as plane:
        yield plane


def email():
    return f"{secrets.token_hex(6)}@example.com"


async def me(browser):
    return (await browser.send("GET", "/me")).json()


async def ask(plane, text, method, path, body=None):
    headers = {"authorization": f"Bearer {text}"}
    return await plane.client.request(method, f"/admin{path}", json=body, headers=headers)


async def test_a_user_is_made_once_and_shown_without_a_hash(plane):
    address = email()
    body = {"email": address.upper(), "name": "Ada", "roles": ["viewer"], "password": PASSWORD}
    made = await plane.made("/users", body)
    assert made["invitation"] is None
    assert made["user"]["email"] == address
    assert made["user"]["has_password"]
    assert "password" not in made["user"]
    again = await plane.admin("POST", "/users", body)
    assert_refused(again, 409, "conflict", "email")
    assert again.json()["error"]["existing_id"] == made["user"]["id"]
    listed = (await plane.admin("GET", "/users", email=address)).json()
    assert [user["id"] for user in listed["users"]] == [made["user"]["id"]]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"email": "ada"}, "email"),
        ({"email": "a b@c"}, "email"),
        ({"name": ""}, "name"),
        ({"roles": ["root"]}, "roles[0]"),
        ({"password": "short"}, "password"),
        ({"password": "password1234"}, "password"),
        ({"admin": True}, "admin"),
    ],
)
async def test_a_bad_user_is_refused_by_field(plane, change, param):
    body = {"email": email(), "name": "Ada", "roles": [], "password": PASSWORD} | change
    assert_refused(await plane.admin("POST", "/users", body), 422, "unprocessable", param)


async def test_users_are_listed_page_by_page(plane):
    for _ in range(3):
        await a_user(plane)
    seen, after = [], ""
    while after is not None:
        page = (await plane.admin("GET", "/users", after=after, limit=2)).json()
        seen += [user["email"] for user in page["users"]]
        after = page["after"]
    assert seen == sorted(set(seen))
    assert len(seen) >= 3


async def test_who_changes_what_they_read_loses_nobodys_change(plane):
    user = await a_user(plane, "viewer")
    path = f"/admin/users/{user['id']}"
    read = await plane.client.get(path, headers={"authorization": f"Bearer {ADMIN_TOKEN}"})
    tag = read.headers["etag"]

    async def change(name, tag):
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}", "if-match": tag}
        return await plane.client.patch(path, json={"name": name}, headers=headers)

    first = await change("First", tag)
    assert first.status_code == 200
    assert first.headers["etag"] != tag
    assert_refused(await change("Second", tag), 412, "precondition_failed")
    assert (await plane.admin("GET", f"/users/{user['id']}")).json()["name"] == "First"
    assert (await change("Third", f'"x", {first.headers["etag"]}')).status_code == 200
    assert (await change("Fourth", "*")).status_code == 200


async def test_unknown_ids_are_404(plane):
    for method, path in (
        ("GET", "/users/usr_0"),
        ("PATCH", "/users/usr_0"),
        ("POST", "/users/usr_0/reset"),
        ("DELETE", "/sessions/ses_0"),
        ("DELETE", "/tokens/tok_0"),
    ):
        body = {} if method == "PATCH" else None
        assert_refused(await plane.admin(method, path, body), 404, "not_found")


async def test_a_token_for_users_alone_makes_and_touches_nobody_who_may_more(plane):
    text = (
        await plane.made("/tokens", {"name": "hr", "permissions": ["users.write", "users.read"]})
    )["text"]
    boss = await a_user(plane, "admin")
    body = {"email": email(), "name": "N", "roles": ["admin"]}
    attempts = [
        await ask(plane, text, "POST", "/users", body),
        await ask(plane, text, "PATCH", f"/users/{boss['id']}", {"disabled": True}),
        await ask(plane, text, "POST", f"/users/{boss['id']}/reset"),
    ]
    for answer in attempts:
        assert_refused(answer, 403, "permission_denied", "roles")
    nobody = await a_user(plane)
    up = await ask(plane, text, "PATCH", f"/users/{nobody['id']}", {"roles": ["viewer"]})
    assert_refused(up, 403, "permission_denied", "roles")
    ok = await ask(plane, text, "PATCH", f"/users/{nobody['id']}", {"disabled": True})
    assert ok.status_code == 200


async def test_a_tokens_text_is_shown_once_and_its_name_is_the_actor(plane):
    browser = await a_browser(plane, "operator")
    made = (await browser.send("POST", "/tokens", {"name": "ci-1", "role": "operator"})).json()
    assert made["text"].startswith("hwt_")
    listed = (await browser.send("GET", "/tokens")).json()["tokens"]
    assert [token["id"] for token in listed] == [made["token"]["id"]]
    assert made["text"] not in str(listed)
    tenant = await ask(plane, made["text"], "POST", "/tenants", {"name": secrets.token_hex(8)})
    who = f"token:ci-1/{made['token']['id']}"
    rows = (await plane.admin("GET", "/audit-log", actor=who)).json()["records"]
    assert [(row["action"], row["subject"]) for row in rows] == [
        ("tenant.create", tenant.json()["id"])
    ]
    (used,) = (await browser.send("GET", "/tokens")).json()["tokens"]
    assert used["last_used_ms"] is not None
    told = (await ask(plane, made["text"], "GET", "/me")).json()
    assert (told["kind"], told["actor"], told["csrf"]) == ("token", who, None)


async def test_a_token_never_does_more_than_its_owner_may_now(plane):
    browser = await a_browser(plane, "operator")
    user_id = (await me(browser))["user"]["id"]
    text = (await browser.send("POST", "/tokens", {"name": "t", "role": "operator"})).json()["text"]
    assert (await ask(plane, text, "GET", "/audit-log")).status_code == 200
    await plane.admin("PATCH", f"/users/{user_id}", {"roles": ["viewer"]})
    assert_refused(await ask(plane, text, "GET", "/audit-log"), 403, "permission_denied")
    assert (await ask(plane, text, "GET", "/tenants")).status_code == 200
    await plane.admin("PATCH", f"/users/{user_id}", {"disabled": True})
    assert_refused(await ask(plane, text, "GET", "/tenants"), 401, "invalid_api_key")


async def test_nobody_makes_a_token_that_may_more(plane):
    browser = await a_browser(plane, "viewer")
    cases = [
        ({"role": "operator"}, 403, "permission_denied", None),
        ({"permissions": ["read", "users.write"]}, 403, "permission_denied", None),
        ({"permissions": ["self"]}, 422, "unprocessable", "permissions"),
        ({"permissions": []}, 422, "unprocessable", "permissions"),
        ({}, 422, "unprocessable", "permissions"),
        ({"role": "viewer", "permissions": ["read"]}, 422, "unprocessable", "permissions"),
        ({"role": "viewer", "life_ms": 1}, 422, "unprocessable", "life_ms"),
    ]
    for body, status, code, param in cases:
        answer = await browser.send("POST", "/tokens", {"name": "t"} | body)
        assert_refused(answer, status, code, param)


async def test_a_token_ends_by_time_and_when_it_is_revoked(plane, postgres_url):
    browser = await a_browser(plane, "viewer")
    made = (
        await browser.send("POST", "/tokens", {"name": "t", "role": "viewer", "life_ms": 60_000})
    ).json()
    assert made["token"]["expires_ms"] - made["token"]["created_ms"] == 60_000
    assert (await ask(plane, made["text"], "GET", "/tenants")).status_code == 200
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "UPDATE admin_tokens SET expires_at = now() WHERE id = %s", (made["token"]["id"],)
        )
    assert_refused(await ask(plane, made["text"], "GET", "/tenants"), 401, "invalid_api_key")
    other = (await browser.send("POST", "/tokens", {"name": "t", "role": "viewer"})).json()
    first = await browser.send("DELETE", f"/tokens/{other['token']['id']}")
    assert_refused(await ask(plane, other["text"], "GET", "/tenants"), 401, "invalid_api_key")
    again = await browser.send("DELETE", f"/tokens/{other['token']['id']}")
    assert first.json() == again.json()


async def test_one_sees_and_ends_ones_own_and_an_admin_everybodys(plane):
    one, other = await a_browser(plane, "viewer"), await a_browser(plane, "viewer")
    admin = await a_browser(plane, "admin")
    mine, theirs = (await me(one))["credential_id"], (await me(other))["credential_id"]
    token = (await other.send("POST", "/tokens", {"name": "t", "role": "viewer"})).json()["token"]
    assert [s["id"] for s in (await one.send("GET", "/sessions")).json()["sessions"]] == [mine]
    asked = {"user_id": (await me(other))["user"]["id"]}
    stranger = (await one.send("GET", "/sessions", **asked)).json()["sessions"]
    assert [session["id"] for session in stranger] == [mine]
    assert_refused(await one.send("DELETE", f"/sessions/{theirs}"), 404, "not_found")
    assert_refused(await one.send("DELETE", f"/tokens/{token['id']}"), 404, "not_found")
    assert (await one.send("GET", "/tokens")).json()["tokens"] == []
    (shown,) = (await admin.send("GET", "/sessions", **asked)).json()["sessions"]
    assert (shown["id"], shown["method"], shown["user_agent"]) == (theirs, "password", "a browser")
    assert (await admin.send("DELETE", f"/tokens/{token['id']}")).status_code == 200
    assert (await admin.send("DELETE", f"/sessions/{theirs}")).status_code == 200
    assert_refused(await other.send("GET", "/me"), 401, "invalid_api_key")


async def test_every_change_names_who_made_it(plane):
    browser = await a_browser(plane, "admin")
    actor = (await me(browser))["actor"]
    tenant = (await browser.send("POST", "/tenants", {"name": secrets.token_hex(8)})).json()
    user = (
        await browser.send("POST", "/users", {"email": email(), "name": "N", "roles": []})
    ).json()["user"]
    path = f"/users/{user['id']}"
    await browser.send("PATCH", path, {"roles": ["billing"], "disabled": False})
    await browser.send("POST", f"{path}/reset")
    credit = {"id": "c-1", "amount_micro": 5, "reason": "a gift"}
    entry = await browser.send("POST", f"/tenants/{tenant['id']}/credits", credit)
    assert entry.json()["author"] == actor
    rows = (await plane.admin("GET", "/audit-log", actor=actor)).json()["records"]
    assert [row["action"] for row in reversed(rows)] == [
        "sign_in",
        "tenant.create",
        "user.create",
        "user.change",
        "user.reset",
        "account.credit",
    ]
    changed = next(row for row in rows if row["action"] == "user.change")
    assert changed["detail"] == {"disabled": [False, False], "roles": [[], ["billing"]]}
    assert (await plane.admin("GET", "/me")).json()["actor"] == "admin"


@pytest.mark.parametrize(
    ("field", "value"), [("hard_cap_micro", 5), ("price_book", "of-friends"), ("billed", False)]
)
async def test_what_a_tenant_pays_by_is_for_who_may_write_money(plane, field, value):
    operator = await a_browser(plane, "operator")
    body = {"name": secrets.token_hex(8), "hard_cap_micro": None, "billed": True}
    priced = await operator.send("POST", "/tenants", body | {field: value})
    assert_refused(priced, 403, "permission_denied", field)
    tenant = (await operator.send("POST", "/tenants", body)).json()
    path = f"/tenants/{tenant['id']}"
    for wanted in (value, tenant[field]):
        changed = await operator.send("PATCH", path, {"weight": 2, field: wanted})
        assert_refused(changed, 403, "permission_denied", field)
    assert (await operator.send("GET", path)).json() == tenant
    assert (await operator.send("PATCH", path, {"weight": 2})).status_code == 200
    both = await a_browser(plane, "operator", "billing")
    await plane.admin("POST", "/price-books", {"id": "of-friends"})
    assert (await both.send("PATCH", path, {field: value})).json()[field] == value


async def test_the_log_is_filtered_and_paged(plane):
    user = await a_user(plane, "viewer")
    for n in range(3):
        await plane.admin("PATCH", f"/users/{user['id']}", {"name": f"N {n}"})

    async def log(**query):
        return (await plane.admin("GET", "/audit-log", subject=user["id"], **query)).json()

    assert [row["action"] for row in (await log())["records"]] == ["user.change"] * 3 + [
        "user.create"
    ]
    assert len((await log(action="user"))["records"]) == 4
    assert len((await log(action="user.create"))["records"]) == 1
    assert (await log(action="use"))["records"] == []
    assert (await log(actor="somebody"))["records"] == []
    first = await log(limit=2)
    rest = await log(limit=2, before=first["before"])
    ids = [row["id"] for row in first["records"] + rest["records"]]
    assert ids == sorted(ids, reverse=True)
    assert len(set(ids)) == 4
    made_ms = rest["records"][-1]["at_ms"]
    assert len((await log(from_ms=made_ms))["records"]) == 4
    assert (await log(to_ms=made_ms))["records"] == []


async def test_the_admin_token_has_no_password_to_change(plane):
    body = {"current": PASSWORD, "password": PASSWORD}
    assert_refused(await plane.admin("POST", "/me/password", body), 409, "conflict")
    assert (await Browser(plane).send("GET", "/login")).json() == {"password": True, "oidc": False}
    assert_refused(await Browser(plane).send("GET", "/oidc/start"), 404, "not_found")
