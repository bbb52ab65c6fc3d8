"""Who fails too often waits, and what strangers may cost: by user, by address, by hash."""

import asyncio
import secrets

import pytest

from store import attempts
from tests.support.browser import PASSWORD, Browser, a_user, forget_addresses, run
from tests.support.control_plane import assert_refused, running, the_settings

pytestmark = [pytest.mark.services, pytest.mark.anyio]

WRONG = "not the password at all"
FIRST_MS = 60_000  # the first wait: no machine is so slow that it passes within a test


def waiting(postgres_url, valkey_url, **changes):
    return the_settings(postgres_url, valkey_url, sign_in_first_ms=FIRST_MS, **changes)


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def plane(postgres_url, valkey_server):
    async with running(waiting(postgres_url, valkey_server.embedded.url)) as plane:
        yield plane


@pytest.fixture(autouse=True)
async def fresh_address(plane):
    await forget_addresses(plane)
    yield
    await forget_addresses(plane)


async def test_who_fails_too_often_waits_longer_and_longer(plane, postgres_url):
    user = await a_user(plane, "viewer")
    for _ in range(5):
        assert_refused(await Browser(plane).sign_in(user["email"], WRONG), 401, "invalid_api_key")
    locked = await Browser(plane).sign_in(user["email"])
    assert_refused(locked, 429, "rate_limit_exceeded")
    assert int(locked.headers["retry-after"]) >= 1
    shown = (await plane.admin("GET", f"/users/{user['id']}")).json()
    assert (shown["failures"], shown["locked_until_ms"] > 0) == (5, True)
    passed = "UPDATE sign_in_attempts SET until_ms = 0 WHERE name = %s"
    run(postgres_url, passed, f"user:{user['id']}")
    assert_refused(await Browser(plane).sign_in(user["email"], WRONG), 401, "invalid_api_key")
    waits = "SELECT until_ms - last_ms FROM sign_in_attempts WHERE name = %s"
    assert run(postgres_url, waits, f"user:{user['id']}") == [(2 * FIRST_MS,)]
    run(postgres_url, passed, f"user:{user['id']}")
    assert (await Browser(plane).sign_in(user["email"])).status_code == 200
    assert (await plane.admin("GET", f"/users/{user['id']}")).json()["failures"] == 0


async def test_an_unknown_email_waits_as_a_known_one_does(plane):
    email = f"{secrets.token_hex(6)}@nowhere.example"
    codes = [(await Browser(plane).sign_in(email, WRONG)).status_code for _ in range(6)]
    assert codes == [401] * 5 + [429]


async def test_many_at_once_get_no_more_tries_than_one_after_the_other(plane):
    user = await a_user(plane, "viewer")
    answers = await asyncio.gather(
        *(Browser(plane).sign_in(user["email"], f"guess number {n}") for n in range(20))
    )
    assert sum(answer.status_code == 401 for answer in answers) == 5
    assert {answer.status_code for answer in answers} == {401, 429}


async def test_every_control_plane_counts_the_same_failures(plane, postgres_url, valkey_url):
    user = await a_user(plane, "viewer")
    async with running(waiting(postgres_url, valkey_url)) as other:
        for n in range(5):
            answer = await Browser((plane, other)[n % 2]).sign_in(user["email"], WRONG)
            assert_refused(answer, 401, "invalid_api_key")
        for each in (plane, other):
            assert (await Browser(each).sign_in(user["email"])).status_code == 429


async def test_one_address_tries_many_names_in_vain(postgres_url, valkey_url):
    settings = waiting(postgres_url, valkey_url, sign_in_address_free=3)
    async with running(settings) as plane:
        await forget_addresses(plane)
        names = [f"{secrets.token_hex(6)}@nowhere.example" for _ in range(4)]
        codes = [(await Browser(plane).sign_in(name, WRONG)).status_code for name in names]
        assert codes == [401, 401, 401, 429]


async def test_what_is_refused_for_something_else_is_no_failure(plane):
    user = await a_user(plane, "viewer")
    browser = Browser(plane)
    hasher, places = plane.services.doors.hasher, 0
    while hasher._places.acquire(blocking=False):
        places += 1
    for _ in range(6):
        crowded = await browser.sign_in(user["email"])
        assert_refused(crowded, 503, "server_is_overloaded")
    for _ in range(places):
        hasher._places.release()
    assert (await browser.sign_in(user["email"])).status_code == 200
    weak = {"current": PASSWORD, "password": "password1234"}
    for _ in range(6):
        answer = await browser.send("POST", "/me/password", weak)
        assert_refused(answer, 422, "unprocessable", "password")
    shown = (await plane.admin("GET", f"/users/{user['id']}")).json()
    assert (shown["failures"], shown["locked_until_ms"]) == (0, 0)
    assert (await Browser(plane).sign_in(user["email"])).status_code == 200


async def test_a_weak_password_does_not_lock_an_invitation_out(postgres_url, valkey_url):
    settings = waiting(postgres_url, valkey_url, sign_in_address_free=3)
    async with running(settings) as plane:
        await forget_addresses(plane)
        body = {"email": f"{secrets.token_hex(6)}@example.com", "name": "N", "roles": []}
        invitation = (await plane.made("/users", body))["invitation"]
        for password, status in (*[("short", 422)] * 4, (PASSWORD, 200)):
            shown = {"invitation": invitation, "password": password}
            answer = await Browser(plane).send("POST", "/invitations/accept", shown)
            assert answer.status_code == status, answer.text


async def test_what_is_about_to_be_counted_is_not_forgotten_meanwhile(plane, postgres_url):
    name = f"user:{secrets.token_hex(6)}"
    run(postgres_url, "INSERT INTO sign_in_attempts VALUES (%s, 4, 1, 1)", name)
    postgres = plane.services.postgres
    async with postgres.transaction() as conn:
        await conn.execute(attempts._sql["know_attempts"], {"names": [name]})
        async with postgres.transaction() as other:
            await attempts.forget(other, age_ms=3_600_000)
        (row,) = await attempts.attempts_for_change(conn, (name,))
    assert row.failures == 4


async def test_too_many_hashes_at_once_are_refused_and_none_is_lost(postgres_url, valkey_url):
    settings = the_settings(
        postgres_url,
        valkey_url,
        argon2_time_cost=8,
        argon2_memory_kib=8192,
        argon2_at_once=1,
        argon2_waiting_max=1,
    )
    async with running(settings) as plane:
        hasher = plane.services.doors.hasher
        answers = await asyncio.gather(
            *(hasher.matches(None, "x") for _ in range(10)), return_exceptions=True
        )
        assert answers.count(False) >= 2
        refused = [answer for answer in answers if answer is not False]
        assert {answer.refusal.status for answer in refused} == {503}
        assert await hasher.matches(None, "x") is False
