"""Signing in and out: cookies, proofs against other sites' pages, waits, and what ends it."""

import secrets

import pytest
from argon2 import PasswordHasher

from store import attempts, sessions
from tests.support.browser import PASSWORD, Browser, a_browser, a_user, forget_addresses, run
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


WRONG = "not the password at all"


@pytest.fixture(autouse=True)
async def fresh_address(plane):
    await forget_addresses(plane)
    yield
    await forget_addresses(plane)


async def test_signing_in_gives_a_cookie_that_only_this_host_sees(plane):
    user = await a_user(plane, "viewer")
    browser = Browser(plane)
    answer = await browser.sign_in(user["email"].upper())
    assert answer.status_code == 200, answer.text
    name, _, rest = browser.set_cookie.partition("=")
    parts = {part.strip().lower() for part in rest.split(";")}
    assert name == "__Host-headworks"
    assert {"secure", "httponly", "path=/", "samesite=lax"} <= parts
    assert not any(part.startswith("domain") for part in parts)
    me = (await browser.send("GET", "/me")).json()
    assert (me["actor"], me["kind"], me["csrf"]) == (user["email"], "session", browser.csrf)
    assert me["user"]["id"] == user["id"]
    assert "password" not in me["user"]
    assert answer.headers["cache-control"] == "no-store"


async def test_a_wrong_password_and_an_unknown_user_are_told_the_same(plane, postgres_url):
    user, disabled = await a_user(plane), await a_user(plane)
    invited = (await plane.made("/users", {**new_user(), "password": None}))["user"]
    await plane.admin("PATCH", f"/users/{disabled['id']}", {"disabled": True})
    answers = [
        await Browser(plane).sign_in(user["email"], WRONG),
        await Browser(plane).sign_in("nobody@example.com", WRONG),
        await Browser(plane).sign_in(disabled["email"], PASSWORD),
        await Browser(plane).sign_in(invited["email"], PASSWORD),
    ]
    for answer in answers:
        assert_refused(answer, 401, "invalid_api_key")
        assert answer.json() == answers[0].json()
        assert "set-cookie" not in answer.headers


def new_user():
    email = f"{secrets.token_hex(6)}@example.com"
    return {"email": email, "name": "N", "roles": ["viewer"], "password": PASSWORD}


async def test_nobody_is_tried_as_dearly_as_somebody(plane):
    # The work is the hash's own parameters: the one that stands for nobody has them all.
    hasher = plane.services.doors.hasher
    cost = (await hasher.hash("whatever else")).rpartition("$")[0].rpartition("$")[0]
    assert hasher._nobodys.startswith(cost + "$")
    assert not hasher.is_outdated(hasher._nobodys)
    assert not await hasher.matches(None, "whatever else")


async def test_the_default_hash_is_argon2id_with_64_mib(postgres_url, valkey_url):
    settings = the_settings(
        postgres_url, valkey_url, argon2_time_cost=3, argon2_memory_kib=65_536, argon2_lanes=4
    )
    async with running(settings) as plane:
        await forget_addresses(plane)
        browser = await a_browser(plane, "viewer")
        user_id = (await browser.send("GET", "/me")).json()["user"]["id"]
        ((stored,),) = run(postgres_url, "SELECT password FROM users WHERE id = %s", user_id)
        assert stored.startswith("$argon2id$v=19$m=65536,t=3,p=4$")
        assert PasswordHasher().verify(stored, PASSWORD)


async def test_an_old_hash_is_made_anew_when_its_password_is_shown(plane, postgres_url):
    user = await a_user(plane)
    old = PasswordHasher(time_cost=2, memory_cost=128, parallelism=1).hash(PASSWORD)
    run(postgres_url, "UPDATE users SET password = %s WHERE id = %s", old, user["id"])
    assert (await Browser(plane).sign_in(user["email"])).status_code == 200
    ((now,),) = run(postgres_url, "SELECT password FROM users WHERE id = %s", user["id"])
    assert "t=1" in now
    assert (await Browser(plane).sign_in(user["email"])).status_code == 200


FORGERIES = {
    "no token": {"x-csrf-token": None},
    "a wrong token": {"x-csrf-token": "0" * 64},
    "a token that is no text": {"x-csrf-token": "\u00e4".encode("latin-1")},
    "another origin": {"origin": "https://evil.example"},
    "a sandboxed page": {"origin": "null"},
    "another site": {"sec-fetch-site": "cross-site"},
    "a neighbour's site": {"sec-fetch-site": "same-site"},
    "nothing of a browser": {"origin": None, "sec-fetch-site": None},
}


@pytest.mark.parametrize("forged", FORGERIES.values(), ids=FORGERIES)
async def test_another_sites_page_changes_nothing_with_our_cookie(plane, forged):
    browser = await a_browser(plane, "operator")
    body = {"name": secrets.token_hex(8)}
    answer = await browser.send("POST", "/tenants", body, headers=forged)
    assert_refused(answer, 403, "permission_denied")
    assert (await browser.send("POST", "/tenants", body)).status_code == 201
    assert (await browser.send("GET", "/tenants", headers=forged)).status_code == 200


async def test_a_token_of_another_session_proves_nothing(plane):
    one, other = await a_browser(plane, "operator"), await a_browser(plane, "operator")
    one.csrf = other.csrf
    assert_refused(await one.send("POST", "/tenants", {"name": "x"}), 403, "permission_denied")


async def test_another_sites_page_cannot_sign_anybody_in(plane):
    user = await a_user(plane)
    body = {"email": user["email"], "password": PASSWORD}
    for forged in (FORGERIES["another origin"], FORGERIES["another site"]):
        answer = await Browser(plane).send("POST", "/login", body, headers=forged)
        assert_refused(answer, 403, "permission_denied")


async def test_a_bad_bearer_token_is_not_made_good_by_a_cookie(plane):
    browser = await a_browser(plane, "viewer")
    answer = await browser.send("GET", "/tenants", headers={"authorization": "Bearer nonsense"})
    assert_refused(answer, 401, "invalid_api_key")


async def test_signing_in_again_ends_the_session_that_was_shown(plane):
    browser = await a_browser(plane, "viewer")
    before = dict(browser.cookies)
    email = (await browser.send("GET", "/me")).json()["actor"]
    await browser.sign_in(email)
    assert browser.cookies != before
    assert (await browser.send("GET", "/me")).status_code == 200
    browser.cookies = before
    assert_refused(await browser.send("GET", "/me"), 401, "invalid_api_key")


async def test_signing_out_ends_the_session_and_takes_the_cookie(plane):
    browser = await a_browser(plane, "viewer")
    before = dict(browser.cookies)
    assert (await browser.send("POST", "/logout")).status_code == 200
    assert browser.cookies == {}
    browser.cookies = before
    assert_refused(await browser.send("GET", "/me"), 401, "invalid_api_key")


ENDINGS = {
    "disabled": ("PATCH", "", {"disabled": True}),
    "other roles": ("PATCH", "", {"roles": ["viewer", "billing"]}),
    "no roles": ("PATCH", "", {"roles": []}),
    "reset": ("POST", "/reset", None),
}


@pytest.mark.parametrize(("method", "path", "body"), ENDINGS.values(), ids=ENDINGS)
async def test_sessions_end_with_what_they_were_given_for(plane, method, path, body):
    browser = await a_browser(plane, "viewer")
    user_id = (await browser.send("GET", "/me")).json()["user"]["id"]
    same = await plane.admin("PATCH", f"/users/{user_id}", {"roles": ["viewer"], "name": "New"})
    assert same.status_code == 200
    assert (await browser.send("GET", "/me")).status_code == 200
    assert (await plane.admin(method, f"/users/{user_id}{path}", body)).status_code == 200
    assert_refused(await browser.send("GET", "/me"), 401, "invalid_api_key")


async def test_a_changed_password_ends_every_other_session(plane):
    user = await a_user(plane, "viewer")
    here, there = Browser(plane), Browser(plane)
    await here.sign_in(user["email"])
    await there.sign_in(user["email"])
    wrong = {"current": WRONG, "password": "another walk by the weir"}
    assert_refused(await here.send("POST", "/me/password", wrong), 401, "invalid_api_key")
    weak = {"current": PASSWORD, "password": "password1234"}
    assert_refused(await here.send("POST", "/me/password", weak), 422, "unprocessable", "password")
    right = wrong | {"current": PASSWORD}
    changed = await here.send("POST", "/me/password", right)
    here.csrf = changed.json()["csrf"]
    assert (await here.send("GET", "/me")).status_code == 200
    assert_refused(await there.send("GET", "/me"), 401, "invalid_api_key")
    assert_refused(await Browser(plane).sign_in(user["email"]), 401, "invalid_api_key")
    assert (await Browser(plane).sign_in(user["email"], right["password"])).status_code == 200


async def test_a_session_ends_idle_and_ends_in_any_case(plane, postgres_url):
    for late in ("seen_at = now() - interval '3 hours'", "expires_at = now()"):
        browser = await a_browser(plane, "viewer")
        session = (await browser.send("GET", "/me")).json()["credential_id"]
        run(postgres_url, f"UPDATE sessions SET {late} WHERE id = %s", session)
        assert_refused(await browser.send("GET", "/me"), 401, "invalid_api_key")


async def test_use_keeps_a_session_from_being_idle_but_is_not_written_each_time(
    plane, postgres_url
):
    browser = await a_browser(plane, "viewer")
    session = (await browser.send("GET", "/me")).json()["credential_id"]
    seen = "SELECT seen_at, seen_at > now() - interval '1 minute' FROM sessions WHERE id = %s"
    before = run(postgres_url, seen, session)
    await browser.send("GET", "/me")
    assert run(postgres_url, seen, session) == before
    aged = "UPDATE sessions SET seen_at = now() - interval '100 minutes' WHERE id = %s"
    run(postgres_url, aged, session)
    renewal = {"hx-request": "true"}
    assert (await browser.send("GET", "/me", headers=renewal)).status_code == 200
    assert not run(postgres_url, seen, session)[0][1]
    await browser.send("GET", "/me")
    assert run(postgres_url, seen, session)[0][1]


async def test_of_a_users_sessions_only_the_newest_go_on(postgres_url, valkey_url):
    async with running(the_settings(postgres_url, valkey_url, sessions_max=2)) as plane:
        await forget_addresses(plane)
        user = await a_user(plane, "viewer")
        browsers = [Browser(plane) for _ in range(3)]
        for browser in browsers:
            await browser.sign_in(user["email"])
        alive = [(await browser.send("GET", "/me")).status_code for browser in browsers]
        assert alive == [401, 200, 200]


async def test_an_invitation_works_once_and_signs_in(plane):
    made = await plane.made("/users", {**new_user(), "password": None})
    assert made["user"]["invited"]
    assert not made["user"]["has_password"]
    browser = Browser(plane)
    body = {"invitation": made["invitation"], "password": "short"}
    assert_refused(
        await browser.send("POST", "/invitations/accept", body), 422, "unprocessable", "password"
    )
    body["password"] = PASSWORD
    answer = await browser.send("POST", "/invitations/accept", body)
    assert answer.json()["user"]["id"] == made["user"]["id"]
    assert (await browser.send("GET", "/me")).status_code == 200
    again = await Browser(plane).send("POST", "/invitations/accept", body)
    assert_refused(again, 401, "invalid_api_key")


async def test_an_invitation_ends_by_time_by_another_and_with_its_user(plane, postgres_url):
    async def accept(text):
        body = {"invitation": text, "password": PASSWORD}
        return await Browser(plane).send("POST", "/invitations/accept", body)

    made = await plane.made("/users", {**new_user(), "password": None})
    user_id = made["user"]["id"]
    reset = (await plane.admin("POST", f"/users/{user_id}/reset")).json()
    assert_refused(await accept(made["invitation"]), 401, "invalid_api_key")
    old = "UPDATE invitations SET expires_at = now() WHERE user_id = %s"
    run(postgres_url, old, user_id)
    assert_refused(await accept(reset["invitation"]), 401, "invalid_api_key")
    reset = (await plane.admin("POST", f"/users/{user_id}/reset")).json()
    await plane.admin("PATCH", f"/users/{user_id}", {"disabled": True})
    assert_refused(await accept(reset["invitation"]), 401, "invalid_api_key")
    assert_refused(await accept("hwi_nonsense"), 401, "invalid_api_key")


async def test_no_secret_lies_in_the_database(plane, postgres_url):
    made = await plane.made("/users", {**new_user(), "password": None})
    token = await plane.made("/tokens", {"name": "t", "role": "viewer"})
    browser = await a_browser(plane, "viewer")
    secrets_shown = [made["invitation"], token["text"], *browser.cookies.values(), browser.csrf]
    tables = ("users", "sessions", "admin_tokens", "invitations", "sign_in_attempts", "audit_log")
    for table in tables:
        everything = str(run(postgres_url, f"SELECT * FROM {table}"))
        for secret in (*secrets_shown, PASSWORD, ADMIN_TOKEN):
            assert secret not in everything, table


async def test_the_log_tells_who_came_in_and_who_did_not(plane):
    user = await a_user(plane, "viewer")
    browser = Browser(plane)
    await browser.sign_in(user["email"], WRONG)
    await browser.sign_in(user["email"])
    await browser.send("POST", "/logout")
    await browser.sign_in("hunter2 typed here@example.com", WRONG)
    rows = (await plane.admin("GET", "/audit-log", subject=user["id"])).json()["records"]
    assert [(row["actor"], row["action"]) for row in rows] == [
        (user["email"], "sign_out"),
        (user["email"], "sign_in"),
        ("anonymous", "sign_in.refused"),
        ("admin", "user.create"),
    ]
    refused = (await plane.admin("GET", "/audit-log", action="sign_in.refused", limit=1)).json()
    assert refused["records"][0]["subject"] == "unknown"
    assert "hunter2" not in str(refused)


async def test_forgetting_waits_for_nobody(plane, postgres_url):
    # Whoever ends all sessions of a user holds several rows: two who wait could do it in a ring.
    browser = await a_browser(plane, "viewer")
    session = (await browser.send("GET", "/me")).json()["credential_id"]
    run(postgres_url, "UPDATE sessions SET expires_at = now() WHERE id = %s", session)
    postgres, idle_ms = plane.services.postgres, plane.services.settings.session_idle_ms
    async with postgres.transaction() as conn:
        assert await sessions.end_session(conn, session)
        async with postgres.transaction() as other:
            await other.execute("SET LOCAL lock_timeout = 100")
            await sessions.forget(other, idle_ms=idle_ms)


async def test_what_is_over_is_forgotten(plane, postgres_url):
    browser = await a_browser(plane, "viewer")
    session = (await browser.send("GET", "/me")).json()["credential_id"]
    run(postgres_url, "UPDATE sessions SET expires_at = now() WHERE id = %s", session)
    insert = "INSERT INTO sign_in_attempts VALUES (%s, 1, 1, 1)"
    run(postgres_url, insert, f"user:{session}")
    async with plane.services.postgres.transaction() as conn:
        await sessions.forget(conn, idle_ms=plane.services.settings.session_idle_ms)
        await attempts.forget(conn, age_ms=3_600_000)
    assert run(postgres_url, "SELECT id FROM sessions WHERE id = %s", session) == []
    names = "SELECT name FROM sign_in_attempts WHERE name = %s"
    assert run(postgres_url, names, f"user:{session}") == []
