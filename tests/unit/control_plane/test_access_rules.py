"""Waits after failures, passwords, secrets, pages and identity providers' words: pure rules."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.access import credentials, origins, passwords
from control_plane.access.credentials import Kind
from control_plane.access.lockout import Attempts, Patience, begun, forgiven, wait_ms
from control_plane.access.oidc_claims import (
    ClaimsRefused,
    Identity,
    OidcRules,
    identity,
    read_domains,
    read_roles,
)
from control_plane.access.roles import Role

PATIENCE = Patience(free=3, first_ms=1000, most_ms=60_000, forget_ms=3_600_000)
PEPPER = b"a pepper for tests"


def test_the_first_failures_cost_nothing_and_each_later_one_doubles():
    attempts, now_ms, waits = Attempts(), 10_000_000, []
    for _ in range(10):
        attempts = begun(attempts, PATIENCE, now_ms=now_ms)
        waits.append(wait_ms(attempts, now_ms=now_ms))
        now_ms += waits[-1]
    assert waits == [0, 0, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]


@given(st.lists(st.integers(0, 100_000), max_size=200))
def test_whoever_asks_gets_no_more_tries_than_the_waits_allow(pauses):
    attempts, now_ms, tries = Attempts(), 1_000_000_000, 0
    began = now_ms
    for pause in pauses:
        now_ms += pause
        if wait_ms(attempts, now_ms=now_ms) == 0:
            attempts, tries = begun(attempts, PATIENCE, now_ms=now_ms), tries + 1
    needed_ms = sum(min(60_000, 1000 << n) for n in range(max(0, tries - PATIENCE.free)))
    assert now_ms - began >= needed_ms


def test_failures_are_forgotten_after_a_while_and_forgiven_one_by_one():
    attempts = begun(Attempts(failures=9, last_ms=1000, until_ms=2000), PATIENCE, now_ms=5_000_000)
    assert attempts.failures == 1
    assert forgiven(Attempts(failures=4, last_ms=7, until_ms=9)) == Attempts(failures=3, last_ms=7)
    assert forgiven(Attempts()).failures == 0


def test_a_wait_never_grows_past_its_bound_however_many_fail():
    attempts = begun(Attempts(failures=10_000, last_ms=5), PATIENCE, now_ms=10)
    assert wait_ms(attempts, now_ms=10) == PATIENCE.most_ms


REFUSED = {
    "eleven letters": "correct-hor",
    "common": "Password1234",
    "common in full width": "\uff30assword1234",
    "one letter": "zzzzzzzzzzzzzz",
    "a rhythm": "abcabcabcabcabc",
    "the email": "ada.lovelace@example.com",
    "the name": "AdaLovelace2024!",
    "the address's first half": "ada.lovelace99",
    "too long": "ab cd ef gh " * 30,
}


@pytest.mark.parametrize("password", REFUSED.values(), ids=REFUSED)
def test_a_password_that_anybody_would_guess_is_refused(password):
    who = {"email": "ada.lovelace@example.com", "name": "Ada Lovelace"}
    assert passwords.weakness(password, **who)


@pytest.mark.parametrize(
    "password",
    ["three plain words", "correct-hors", "七転び八起きという言葉だよね", "9384720193847"],
)
def test_a_long_password_needs_no_signs(password):
    assert passwords.weakness(password, email="ada@example.com", name="1234") is None


@given(st.text(min_size=0, max_size=11))
def test_no_short_password_passes(password):
    if len(passwords.normal(password)) < passwords.LENGTH_MIN:
        assert passwords.weakness(password, email="a@b", name="c")


def test_the_commonest_are_long_enough_to_be_asked_about():
    assert all(len(password) >= passwords.LENGTH_MIN for password in passwords.COMMONEST)


def test_a_secret_of_one_kind_opens_nothing_of_another():
    entropy = bytes(range(32))
    texts = {kind: credentials.mint(kind, entropy) for kind in Kind}
    assert len({text[4:] for text in texts.values()}) == 1
    digests = {credentials.digest(PEPPER, kind, "same") for kind in Kind}
    assert len(digests) == len(Kind)
    assert credentials.digest(b"another pepper!!", Kind.TOKEN, "same") not in digests
    assert credentials.csrf_token(PEPPER, texts[Kind.SESSION]) not in texts[Kind.SESSION]
    assert credentials.an_id("usr", bytes(12)) == "usr_" + "0" * 24


@given(st.text(max_size=50))
def test_strangers_share_a_bounded_number_of_places(name):
    assert 0 <= credentials.slot(PEPPER, name, slots=7) < 7


OURS = {"host": "ops.example.com", "public_url": ""}
PAGES = [
    ("https://ops.example.com", "same-origin", True),
    ("https://ops.example.com", None, True),
    (None, "same-origin", True),
    (None, None, True),
    ("HTTPS://OPS.EXAMPLE.COM", None, True),
    ("https://evil.example", None, False),
    ("https://ops.example.com.evil.example", None, False),
    ("null", None, False),
    ("https://[", None, False),
    ("", None, False),
    ("https://ops.example.com", "same-site", False),
    ("https://ops.example.com", "cross-site", False),
    (None, "none", False),
]


@pytest.mark.parametrize(("origin", "site", "is_ours"), PAGES)
def test_a_page_is_ours_by_what_the_browser_says(origin, site, is_ours):
    assert (origins.fault(origin=origin, fetch_site=site, **OURS) is None) == is_ours
    told = {"host": "inside:8001", "public_url": "https://ops.example.com/console"}
    assert (origins.fault(origin=origin, fetch_site=site, **told) is None) == is_ours


def test_with_an_address_of_ours_the_scheme_counts_too():
    told = {"host": "ops.example.com", "public_url": "https://ops.example.com"}
    assert origins.fault(origin="http://ops.example.com", fetch_site=None, **told)
    assert origins.fault(origin="http://x", fetch_site=None, host="", public_url="")


@pytest.mark.parametrize("path", ["//evil", "https://evil", "/\\evil", "", "evil", "/a\nb", "/é"])
def test_one_lands_on_a_page_of_ours(path):
    assert origins.landing(path, default="/") == "/"
    assert origins.landing("/console?x=1", default="/") == "/console?x=1"


def test_what_travels_is_private():
    assert origins.is_private("https://idp.example")
    assert origins.is_private("http://127.0.0.1:9/x")
    assert not origins.is_private("http://idp.example")
    assert not origins.is_private("ftp://localhost")


CLAIMS = {"sub": "s", "email": "Ada@Example.com", "email_verified": True, "name": "Ada"}
RULES = OidcRules(domains=frozenset({"example.com"}), roles=(("sre", Role.OPERATOR),))


def test_somebody_is_who_their_provider_says_with_their_groups_roles():
    who = identity(CLAIMS | {"groups": ["sre", "x", 7]}, RULES)
    assert who == Identity(subject="s", email="ada@example.com", name="Ada", roles=(Role.OPERATOR,))
    assert identity(CLAIMS | {"groups": "sre"}, RULES).roles == (Role.OPERATOR,)
    assert identity(CLAIMS | {"groups": None, "name": " "}, RULES).name == "ada@example.com"
    assert identity(CLAIMS | {"email": "x@y.z"}, OidcRules()).roles == ()


@pytest.mark.parametrize(
    "lie",
    [
        {"sub": ""},
        {"sub": 7},
        {"email": None},
        {"email": "ada"},
        {"email": "a@b@example.com"},
        {"email": "a\n@example.com"},
        {"email_verified": False},
        {"email_verified": "true"},
        {"email_verified": None},
        {"email": "ada@example.org"},
        {"email": "ada@example.com.evil"},
    ],
)
def test_what_a_provider_has_not_verified_is_nobodys(lie):
    assert isinstance(identity(CLAIMS | lie, RULES), ClaimsRefused)


def test_the_settings_of_groups_and_domains_are_read():
    assert read_roles("sre = operator, cn=ops,dc=x=admin".replace(",dc", ";dc")) == (
        ("sre", Role.OPERATOR),
        ("cn=ops;dc=x", Role.ADMIN),
    )
    assert read_roles("") == ()
    assert read_domains(" Example.com, ,b.org") == {"example.com", "b.org"}
    for text in ("sre", "=admin", "sre=root", ",".join(f"g{n}=viewer" for n in range(201))):
        with pytest.raises(ValueError, match=r"GROUP=ROLE|no role|more than"):
            read_roles(text)


def test_the_letters_of_a_password_are_what_is_compared_with_a_name():
    assert passwords.weakness(string.digits + "12", email="1@2", name="3") is None
