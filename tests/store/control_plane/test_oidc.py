"""Signing in through an identity provider that is real, and sometimes lies."""

import asyncio
import secrets
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest

from tests.support.browser import Browser, a_user, run
from tests.support.control_plane import assert_refused, running, the_settings
from tests.support.oidc_server import CLIENT, CLIENT_SECRET, OidcServer, SigningKey

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def server():
    server = OidcServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
async def plane(postgres_url, valkey_server, server):
    async with running(settings(postgres_url, valkey_server.embedded.url, server)) as plane:
        yield plane


@pytest.fixture
def provider(server, plane):
    """As nobody has asked it for anything yet."""
    server.begin_anew()
    server.claims = somebody()
    plane.services.doors.oidc.forget()
    return server


def settings(postgres_url, valkey_url, provider, **changes):
    told = {
        "public_url": "http://localhost:8001",
        "oidc_issuer": provider.issuer,
        "oidc_client_id": CLIENT,
        "oidc_client_secret": CLIENT_SECRET,
        "oidc_domains": "example.com",
        "oidc_roles": "sre=operator,finance=billing",
        "sign_in_address_free": 1000,
    }
    return the_settings(postgres_url, valkey_url, **(told | changes))


def somebody(**claims):
    name = secrets.token_hex(6)
    return {"sub": name, "email": f"{name}@example.com", "groups": ["sre"]} | claims


async def begin(plane, provider, to="/console"):
    """The browser goes to the provider, and comes back with what it was given."""
    browser = Browser(plane)
    start = await browser.send("GET", "/oidc/start", to=to)
    assert start.status_code == 302, start.text
    assert start.headers["location"].startswith(f"{provider.issuer}/authorize?")
    return browser, provider.consent(start.headers["location"])


async def sign_in(plane, provider):
    browser, back = await begin(plane, provider)
    return browser, await browser.send("GET", "/oidc/callback", **back)


async def test_somebody_with_a_groups_role_gets_in_and_is_made(plane, provider):
    browser, answer = await sign_in(plane, provider)
    assert answer.status_code == 303, answer.text
    assert answer.headers["location"] == "/console"
    assert list(browser.cookies) == ["__Host-headworks"]
    me = (await browser.send("GET", "/me")).json()
    assert me["actor"] == provider.claims["email"]
    assert (me["user"]["roles"], me["user"]["source"]) == (["operator"], "oidc")
    assert not me["user"]["has_password"]
    (session,) = (await browser.send("GET", "/sessions")).json()["sessions"]
    assert session["method"] == "oidc"


async def test_they_are_known_again_by_subject_and_their_roles_follow_their_groups(plane, provider):
    first, _ = await sign_in(plane, provider)
    user = (await first.send("GET", "/me")).json()["user"]
    provider.claims |= {"groups": ["finance"], "email": f"moved.{user['email']}"}
    again, answer = await sign_in(plane, provider)
    assert answer.status_code == 303
    now = (await again.send("GET", "/me")).json()["user"]
    assert (now["id"], now["email"], now["roles"]) == (user["id"], user["email"], ["billing"])
    assert_refused(await first.send("GET", "/me"), 401, "invalid_api_key")
    provider.claims |= {"groups": []}
    _, gone = await sign_in(plane, provider)
    assert_refused(gone, 401, "invalid_api_key")


async def test_a_user_made_here_keeps_the_roles_given_here(plane, provider):
    user = await a_user(plane, "viewer")
    provider.claims = somebody(email=user["email"], groups=["sre"])
    browser, answer = await sign_in(plane, provider)
    assert answer.status_code == 303
    now = (await browser.send("GET", "/me")).json()["user"]
    assert (now["id"], now["roles"], now["source"]) == (user["id"], ["viewer"], "local")
    await plane.admin("PATCH", f"/users/{user['id']}", {"disabled": True})
    _, refused = await sign_in(plane, provider)
    assert_refused(refused, 401, "invalid_api_key")


async def test_an_address_that_somebody_else_has_now_does_not_make_them_its_last_owner(
    plane, provider
):
    boss = await a_user(plane, "admin")
    provider.claims = somebody(email=boss["email"])
    first, _ = await sign_in(plane, provider)
    assert (await first.send("GET", "/me")).json()["user"]["id"] == boss["id"]
    provider.claims |= {"sub": secrets.token_hex(6)}
    browser, answer = await sign_in(plane, provider)
    assert_refused(answer, 401, "invalid_api_key")
    assert "__Host-headworks" not in browser.cookies
    await plane.admin("POST", f"/users/{boss['id']}/reset")
    again, _ = await sign_in(plane, provider)
    assert (await again.send("GET", "/me")).json()["user"]["id"] == boss["id"]


async def test_two_windows_may_sign_the_same_person_in_for_the_first_time(plane, provider):
    user = await a_user(plane, "viewer")
    provider.claims = somebody(email=user["email"])
    begun = [await begin(plane, provider) for _ in range(2)]
    answers = await asyncio.gather(
        *(browser.send("GET", "/oidc/callback", **back) for browser, back in begun)
    )
    assert [answer.status_code for answer in answers] == [303, 303]


LIES = {
    "another nonce": {"nonce": "another"},
    "no nonce": {"nonce": None},
    "another issuer": {"iss": "https://evil.example"},
    "another audience": {"aud": "another client"},
    "two audiences and no party": {"aud": [CLIENT, "another"]},
    "made for another party": {"azp": "another"},
    "expired": {"exp": 1_000_000_000, "iat": 999_999_000},
    "no end": {"exp": None},
    "no subject": {"sub": None},
    "issued in the future": {"iat": 10_000_000_000, "exp": 10_000_000_600},
    "an email that nobody verified": {"email_verified": False},
    "an email of another domain": {"email": "ada@evil.example"},
    "no group of ours": {"groups": ["others"]},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_what_is_not_to_be_believed_lets_nobody_in(plane, provider, lie):
    provider.claims |= lie
    browser, answer = await sign_in(plane, provider)
    assert_refused(answer, 401, "invalid_api_key")
    assert "__Host-headworks" not in browser.cookies
    log = (await plane.admin("GET", "/audit-log", action="sign_in.refused", limit=1)).json()
    assert log["records"][0]["detail"]["reason"].startswith("oidc: ")


async def test_two_audiences_with_us_as_the_party_are_believed(plane, provider):
    provider.claims |= {"aud": [CLIENT, "another"], "azp": CLIENT}
    assert (await sign_in(plane, provider))[1].status_code == 303


async def test_a_token_without_a_signature_is_refused(plane, provider):
    provider.unsigned = True
    assert_refused((await sign_in(plane, provider))[1], 401, "invalid_api_key")


async def test_a_key_that_is_not_the_providers_signs_nothing(plane, provider):
    assert (await sign_in(plane, provider))[1].status_code == 303
    provider.signing = SigningKey("two")  # not shown
    assert_refused((await sign_in(plane, provider))[1], 401, "invalid_api_key")
    provider.headers = {"kid": "one"}  # a forger with the name of a true key
    assert_refused((await sign_in(plane, provider))[1], 401, "invalid_api_key")


async def test_a_public_key_is_no_shared_secret(plane, provider):
    # HS256 over the public key as text: what a library that trusts `alg` would take for signed.
    class Confused:
        key_id, algorithm = "one", "HS256"
        private = b"0123456789abcdef0123456789abcdef"

    provider.shown = [
        {"kid": "one", "kty": "oct", "k": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY"}
    ]
    provider.signing = Confused()
    assert_refused((await sign_in(plane, provider))[1], 401, "invalid_api_key")


async def test_a_key_for_something_else_signs_nothing(plane, provider):
    provider.shown[0] |= {"use": "enc"}
    assert_refused((await sign_in(plane, provider))[1], 401, "invalid_api_key")


async def test_new_keys_are_found_and_strangers_do_not_have_them_read_for_ever(plane, provider):
    client = plane.services.doors.oidc
    assert (await sign_in(plane, provider))[1].status_code == 303
    provider.signing = SigningKey("rsa", "RSA")
    provider.shown.append(provider.signing.public)
    reads = provider.key_reads
    assert_refused((await sign_in(plane, provider))[1], 401, "invalid_api_key")
    assert provider.key_reads == reads  # read a moment ago
    client._keys_read -= 11  # ten seconds later
    assert (await sign_in(plane, provider))[1].status_code == 303
    assert provider.key_reads == reads + 1


async def test_an_answer_belongs_to_the_browser_and_the_attempt_that_began(plane, provider):
    browser, back = await begin(plane, provider)
    other, others = await begin(plane, provider)
    cases = [
        (browser, back | {"state": others["state"]}),
        (browser, back | {"state": ""}),
        (Browser(plane), back),
        (browser, back | {"iss": "https://evil.example"}),
        (browser, {"state": back["state"], "error": "access_denied"}),
        (browser, back | {"code": "made up"}),
        (other, others | {"code": back["code"]}),  # a code that was begun with another verifier
    ]
    for who, query in cases:
        answer = await who.send("GET", "/oidc/callback", **query)
        assert_refused(answer, 401, "invalid_api_key")


async def test_a_note_that_was_changed_is_no_note(plane, provider):
    browser, back = await begin(plane, provider)
    note = browser.cookies["__Host-headworks-oidc"]
    for changed in (note[:-6] + "AAAAA=", "", "\u00e4", "A" * 10):
        browser.cookies["__Host-headworks-oidc"] = changed
        said = {"cookie": f"__Host-headworks-oidc={changed}".encode("latin-1")}
        answer = await browser.send("GET", "/oidc/callback", headers=said, **back)
        assert_refused(answer, 401, "invalid_api_key")


async def test_a_code_works_once(plane, provider):
    browser, back = await begin(plane, provider)
    assert (await browser.send("GET", "/oidc/callback", **back)).status_code == 303
    assert_refused(await browser.send("GET", "/oidc/callback", **back), 401, "invalid_api_key")


async def test_what_the_provider_is_asked_holds_a_challenge_and_never_the_verifier(plane, provider):
    browser = Browser(plane)
    start = await browser.send("GET", "/oidc/start", to="https://evil.example")
    query = parse_qs(urlsplit(start.headers["location"]).query)
    assert query["code_challenge_method"] == ["S256"]
    assert query["redirect_uri"] == ["http://localhost:8001/admin/oidc/callback"]
    assert "code_verifier" not in query
    assert len(query["state"][0]) == len(query["nonce"][0]) == 43
    answer = await browser.send(
        "GET", "/oidc/callback", **provider.consent(start.headers["location"])
    )
    assert answer.headers["location"] == "/console"  # never another site's page


async def test_what_a_browser_carries_fits_into_a_cookie(plane, provider):
    browser = Browser(plane)
    assert (await browser.send("GET", "/oidc/start", to="/" + "x" * 1999)).status_code == 302
    assert len(browser.set_cookie) < 4096
    longer = await browser.send("GET", "/oidc/start", to="/" + "x" * 2000)
    assert_refused(longer, 422, "unprocessable", "to")


async def test_any_control_plane_finishes_what_another_began(
    plane, provider, postgres_url, valkey_url
):
    browser, back = await begin(plane, provider)
    async with running(settings(postgres_url, valkey_url, provider)) as other:
        there = Browser(other)
        there.cookies = browser.cookies
        assert (await there.send("GET", "/oidc/callback", **back)).status_code == 303
    assert (await browser.send("GET", "/me")).status_code == 200


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://evil.example"},
        {"token_endpoint": "http://evil.example/token"},
        {"jwks_uri": None},
    ],
)
async def test_a_provider_that_says_nonsense_of_itself_is_away(plane, provider, document):
    provider.discovery = document
    answer = await Browser(plane).send("GET", "/oidc/start")
    assert_refused(answer, 503, "service_unavailable")


async def test_a_provider_that_is_away_is_told_as_that(postgres_url, valkey_url, provider):
    gone = OidcServer()
    gone.close()
    async with running(settings(postgres_url, valkey_url, gone)) as plane:
        answer = await Browser(plane).send("GET", "/oidc/start")
        assert_refused(answer, 503, "service_unavailable")


async def test_a_provider_that_is_away_is_nobodys_failure(plane, provider, postgres_url):
    failures = (
        "SELECT coalesce(sum(failures), 0) FROM sign_in_attempts WHERE name LIKE 'address:%%'"
    )
    browser, back = await begin(plane, provider)
    before = run(postgres_url, failures)
    provider.discovery = {"issuer": "https://evil.example"}
    plane.services.doors.oidc.forget()
    answer = await browser.send("GET", "/oidc/callback", **back)
    assert_refused(answer, 503, "service_unavailable")
    assert run(postgres_url, failures) == before


def test_the_server_of_these_tests_signs_what_the_library_believes():
    key = SigningKey("k")
    token = jwt.encode({"a": 1}, key.private, algorithm=key.algorithm)
    assert jwt.decode(token, jwt.PyJWK(key.public), algorithms=["ES256"]) == {"a": 1}
