"""What a caller claims with an Idempotency-Key, and what it is told of one in use."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, Refusal, RefusedError
from core.idempotency import Claim
from gateway.idempotency import REFUSALS, UNKEPT, claim_of, key_of, told_of

BODY = b'{"model": "m", "messages": [], "max_tokens": 5}'


def claim(
    *headers: tuple[bytes, bytes], key: bytes | None = b"k", body: bytes = BODY
) -> Claim | None:
    given = [*headers] if key is None else [(b"idempotency-key", key), *headers]
    named = key_of(given)
    if named is None:
        return None
    return claim_of(named, given, scope="POST /v1/messages", body=body, kept_s=9, holder="h")


def fingerprint(*headers: tuple[bytes, bytes], body: bytes = BODY) -> str:
    made = claim(*headers, body=body)
    assert made is not None
    return made.fingerprint


def test_who_sends_no_key_claims_nothing() -> None:
    assert claim(key=None) is None


def test_a_claim_is_of_a_path_for_a_time() -> None:
    made = claim(key="Grüße".encode())
    assert made is not None
    assert (made.scope, made.key, made.kept_s, made.holder) == (
        "POST /v1/messages",
        "Grüße",
        9,
        "h",
    )


def test_the_same_key_twice_is_one_and_another_beside_it_is_refused() -> None:
    assert claim((b"idempotency-key", b"k")) == claim()
    with pytest.raises(RefusedError, match="twice"):
        claim((b"idempotency-key", b"other"))


@pytest.mark.parametrize("key", [b"", b"  ", b"\xff", b"a\x00b", b"a\nb", b"a" * 256])
def test_a_key_of_anything_but_printable_characters_is_refused(key: bytes) -> None:
    with pytest.raises(RefusedError) as error:
        claim(key=key)
    assert error.value.refusal.code is Code.BAD_REQUEST
    assert error.value.refusal.param == "Idempotency-Key"


def test_the_longest_key_is_taken() -> None:
    assert claim(key=b"a" * 255) is not None


def test_how_a_body_is_written_and_told_is_not_what_it_asks() -> None:
    same = (
        b'{"max_tokens":5,"messages":[],"model":"m"}',
        b'{"model":"m","messages":[],"max_tokens":5,"stream":true}',
        b'{"model":"m","messages":[],"max_tokens":5,"stream_options":{"include_usage":true}}',
        b'{"model":"m","messages":[],"max_tokens":5,"timeout":9}',
    )
    assert {fingerprint(body=body) for body in (BODY, *same)} == {fingerprint()}


def test_headers_that_an_answer_follows_from_are_part_of_it() -> None:
    waiting = [(b"x-headworks-deadline-ms", b"9"), (b"user-agent", b"x"), (b"x-request-id", b"1")]
    assert fingerprint(*waiting) == fingerprint()
    asked = {
        fingerprint((name, b"1"))
        for name in (b"anthropic-version", b"anthropic-beta", b"x-headworks-tags")
    }
    assert len({fingerprint(), *asked}) == 4


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
bodies = st.dictionaries(st.text(max_size=4), values, max_size=4)


@given(one=bodies, other=bodies)
def test_two_bodies_have_one_fingerprint_only_if_they_ask_the_same(
    one: dict[str, object], other: dict[str, object]
) -> None:
    prints = [fingerprint(body=json.dumps(body).encode()) for body in (one, other)]
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (prints[0] == prints[1]) == same


def told(**changes: object) -> bytes | Refusal | None:
    state = {"fingerprint": fingerprint(), "answer": None, "is_open": False} | changes
    made = claim()
    assert made is not None
    return told_of(made, **state)


def test_a_key_tells_its_answer_or_why_there_is_none() -> None:
    assert told(answer=b"whole") == b"whole"
    assert told(answer=b"") is UNKEPT
    assert told(is_open=True) is REFUSALS["key_open"]
    assert told(fingerprint="other", answer=b"whole") is REFUSALS["key_reused"]
    assert told() is None


def test_only_what_is_over_soon_may_be_tried_again() -> None:
    waits = {reason: refusal.retry_after_ms for reason, refusal in REFUSALS.items()}
    assert waits == {"key_open": 1_000, "key_done": 100, "key_reused": None}
