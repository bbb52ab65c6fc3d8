"""Sealed secrets: what opens them, and what must not."""

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.providers import key_context, provider_replica
from core.secrets import CannotOpenError, KeyRing, Sealed, read_key_ring

OLD, NEW = b"o" * 32, b"n" * 32
NONCE = b"123456789012"
HERE = key_context("acme", "openai", "https://api.acme.test/v1")


def text_of(**keys: bytes) -> str:
    return ",".join(f"{name}:{base64.b64encode(key).decode()}" for name, key in keys.items())


@given(secret=st.text(max_size=60), nonce=st.binary(min_size=12, max_size=12))
def test_what_was_sealed_opens_in_its_context_and_nowhere_shows_the_secret(secret, nonce):
    ring = KeyRing({"k1": OLD})
    sealed = ring.seal(secret, context=HERE, nonce=nonce)
    assert ring.open(sealed, context=HERE) == secret
    assert len(secret) < 4 or secret.encode() not in msgspec.json.encode(sealed)


@pytest.mark.parametrize(
    "elsewhere",
    [
        key_context("other", "openai", "https://api.acme.test/v1"),
        key_context("acme", "anthropic", "https://api.acme.test/v1"),
        key_context("acme", "openai", "https://evil.test/v1"),
    ],
)
def test_a_key_moved_to_another_provider_or_address_does_not_open(elsewhere):
    ring = KeyRing({"k1": OLD})
    with pytest.raises(CannotOpenError):
        ring.open(ring.seal("sk-1", context=HERE, nonce=NONCE), context=elsewhere)


def test_the_first_key_seals_and_every_key_opens():
    before = read_key_ring(text_of(k1=OLD)).seal("sk-1", context=HERE, nonce=NONCE)
    ring = read_key_ring(text_of(k2=NEW, k1=OLD))
    assert ring.sealing_id == "k2"
    assert ring.open(before, context=HERE) == "sk-1"
    again = ring.seal("sk-1", context=HERE, nonce=NONCE)
    assert again.key_id == "k2"
    with pytest.raises(CannotOpenError, match="no key 'k2'"):
        read_key_ring(text_of(k1=OLD)).open(again, context=HERE)


def test_a_changed_byte_or_a_short_one_does_not_open():
    ring = KeyRing({"k1": OLD})
    sealed = ring.seal("sk-1", context=HERE, nonce=NONCE)
    changed = bytes([sealed.sealed[0] ^ 1]) + sealed.sealed[1:]
    for bad in (
        msgspec.structs.replace(sealed, sealed=changed),
        msgspec.structs.replace(sealed, sealed=b""),
        msgspec.structs.replace(sealed, nonce=b""),
    ):
        with pytest.raises(CannotOpenError):
            ring.open(bad, context=HERE)


def test_an_empty_ring_seals_nothing_and_opens_nothing():
    ring = read_key_ring(" ")
    assert ring.sealing_id is None
    with pytest.raises(CannotOpenError):
        ring.open(Sealed(key_id="k1", nonce=NONCE, sealed=b"x"), context=HERE)


@pytest.mark.parametrize(
    "text",
    [
        "k1",
        "k1:%%%",
        "k1:" + base64.b64encode(b"short").decode(),
        "k 1:" + "A" * 44,
        text_of(k1=OLD) + "," + text_of(k1=NEW),
    ],
)
def test_a_bad_setting_is_refused_without_showing_it(text):
    with pytest.raises(ValueError, match="key") as refused:
        read_key_ring(text)
    assert base64.b64encode(OLD).decode() not in str(refused.value)


def test_a_settled_row_says_who_answered_and_who_counted():
    assert provider_replica("acme", "told") == "provider:acme:told"


def test_bytes_are_sealed_as_they_are_and_are_no_text():
    ring = KeyRing({"k1": OLD})
    sealed = ring.seal_bytes(b"\xff\x00", context=HERE, nonce=NONCE)
    assert ring.open_bytes(sealed, context=HERE) == b"\xff\x00"
    with pytest.raises(CannotOpenError):
        ring.open(sealed, context=HERE)
