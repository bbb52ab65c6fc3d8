"""Personal data: what is found, what only looks like it, and check digits."""

import pytest

from core.safety.pii import SHAPES, iban, ipv6, luhn
from core.safety.policy import PII_KINDS
from core.tenancy import KEY_ENTROPY_BYTES, mint_key
from gateway.safety.screen import Screen
from tests.support.safety_cases import a_book, pii

FOUND = {
    "card": (
        "4111111111111111",
        "4111-1111-1111-1111",
        "378282246310005",
        "\uff16\uff10\uff11\uff111111 1111 1117",
    ),
    "iban": ("DE89370400440532013000", "GB29 NWBK 6016 1331 9268 19", "NO93 8601 1117 947"),
    "email": ("a@b.co", "first.last+tag@sub.example.org", "ü@example.com"),
    "phone": ("+491701234567", "+1 (555) 123-4567", "555-123-4567"),
    "ssn": ("078-05-1120", "899 99 9999"),
    "ipv4": ("0.0.0.0", "192.168.1.254"),
    "ipv6": ("2001:db8::1", "fe80::1", "::1", "::ffff:10.0.0.1", "1:2:3:4:5:6:7:8"),
    "api_key": (
        mint_key(bytes(range(KEY_ENTROPY_BYTES))),
        "sk-proj-abcdefghijklmnopqrstuvwx",
        "sk-ant-api03-" + "a" * 90,
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1" * 18,
        "hf_" + "a" * 34,
        "xoxb-1234567890-abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijklmnopqrstuv",
        "-----BEGIN PRIVATE KEY-----",
    ),
}
NOT_FOUND = {
    "card": ("4111111111111112", "0000000000000000", "123456789012", "41111111111111111111111"),
    "iban": ("DE89370400440532013001", "DE89"),
    "email": ("a@b", "@b.co", "a b.co"),
    "phone": ("+0 123 456 789", "+12", "12-34"),
    "ssn": ("000-12-3456", "666-12-3456", "900-12-3456", "123-00-4567", "123-45-0000"),
    "ipv4": ("256.1.1.1", "1.2.3", "1.2.3.4567"),
    "ipv6": ("12:30:45", "std::vector", "a::b", "::"),
    "api_key": ("sk-short", "AKIA", "hw_short"),
}


def masked(kind, text):
    book = a_book(pii(kind), replacement="#")
    return Screen(book, book.output).feed(text, final=True)


def test_every_kind_is_tried():
    assert set(FOUND) == set(NOT_FOUND) == set(SHAPES) == set(PII_KINDS)


@pytest.mark.parametrize("kind", PII_KINDS)
def test_what_is_personal_data_is_found_in_the_middle_of_a_text(kind):
    for each in FOUND[kind]:
        assert masked(kind, f"It is {each}, or so.") == "It is #, or so.", each


@pytest.mark.parametrize("kind", PII_KINDS)
def test_what_only_looks_like_it_is_left(kind):
    for each in NOT_FOUND[kind]:
        assert masked(kind, f"It is {each} or so.") == f"It is {each} or so.", each


def test_a_card_is_found_though_other_digits_follow_it():
    assert masked("card", "4111 1111 1111 1111 123") == "# 123"


def test_check_digits():
    assert luhn("4222222222222") is True
    assert luhn("4222222222223") is False
    assert luhn("1234") is False
    assert iban("GB29NWBK60161331926819") is True
    assert iban("GB29NWBK60161331926818") is False
    assert iban("GB29") is False
    assert ipv6("1:2:3:4:5:6:7:8:9") is False
    assert ipv6("fe80::1") is True
    assert ipv6("::1") is True
