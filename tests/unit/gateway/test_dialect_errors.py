"""Every refusal in each dialect's words, with the headers that say when to come back."""

import json

import pytest

from core.errors import DIALECTS, Code
from core.tickets import Headroom, Remaining
from gateway import anthropic, openai
from gateway.openai.limits import duration
from gateway.retry import retry_headers
from tests.support.dialect_events import REQUEST_ID, a_refusal


@pytest.mark.parametrize("code", Code)
def test_every_refusal_is_told_in_openai_s_words(code: Code) -> None:
    status, body = openai.error_body(a_refusal(code=code, param="model"), REQUEST_ID)
    error = json.loads(body)
    assert status == DIALECTS[code][0]
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert error["error"]["type"] == DIALECTS[code][1]
    assert error["error"]["code"] == code.value
    assert error["error"]["param"] == "model"
    assert (REQUEST_ID in error["error"]["message"]) == (status >= 500)


@pytest.mark.parametrize("code", Code)
def test_every_refusal_is_told_in_anthropic_s_words(code: Code) -> None:
    status, body = anthropic.error_body(a_refusal(code=code), REQUEST_ID)
    assert status == (529 if DIALECTS[code][0] == 503 else DIALECTS[code][0])
    assert json.loads(body) == {
        "type": "error",
        "error": {"type": DIALECTS[code][2], "message": "No replica is free."},
        "request_id": REQUEST_ID,
    }


@pytest.mark.parametrize(
    ("code", "wait_ms", "expected"),
    [
        (Code.RATE_LIMITED, 1, {"retry-after": "1", "retry-after-ms": "1"}),
        (Code.RATE_LIMITED, 1000, {"retry-after": "1", "retry-after-ms": "1000"}),
        (Code.RATE_LIMITED, 1001, {"retry-after": "2", "retry-after-ms": "1001"}),
        (Code.RATE_LIMITED, 0, {"retry-after": "1", "retry-after-ms": "0"}),
        (Code.RATE_LIMITED, -5, {"retry-after": "1", "retry-after-ms": "0"}),
        (Code.RATE_LIMITED, None, {"retry-after": "1", "retry-after-ms": "1000"}),
        (Code.OVERLOADED, None, {"retry-after": "1", "retry-after-ms": "1000"}),
        (Code.UNAVAILABLE, 5000, {"retry-after": "5", "retry-after-ms": "5000"}),
        (
            Code.QUOTA,
            None,
            {"retry-after": "3600", "retry-after-ms": "3600000", "x-should-retry": "false"},
        ),
        (
            Code.QUOTA,
            60_000,
            {"retry-after": "60", "retry-after-ms": "60000", "x-should-retry": "false"},
        ),
        (Code.CONFLICT, 500, {"retry-after": "1", "retry-after-ms": "500"}),
        (Code.CONFLICT, None, {"x-should-retry": "false"}),
        (Code.TIMEOUT, None, {"x-should-retry": "false"}),
        (Code.BAD_REQUEST, None, {}),
        (Code.INTERNAL, None, {}),
    ],
)
def test_a_refused_caller_is_told_when_to_come_back(
    code: Code, wait_ms: int | None, expected: dict[str, str]
) -> None:
    assert retry_headers(a_refusal(code=code, retry_after_ms=wait_ms)) == expected


HEADROOM = Headroom(
    requests=Remaining(limit=60, remaining=59, reset_ms=1000),
    input_tokens=Remaining(limit=1000, remaining=900, reset_ms=6000),
    output_tokens=Remaining(limit=100, remaining=-3, reset_ms=61_500),
)
NOW_MS = 1_790_000_000_123  # 2026-09-21T14:13:20Z and a bit


def test_openai_s_limit_headers_tell_of_the_tighter_tokens() -> None:
    assert openai.limit_headers(HEADROOM, NOW_MS) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m1.5s",
    }


def test_anthropic_s_limit_headers_tell_each_bucket_and_a_moment() -> None:
    assert anthropic.limit_headers(HEADROOM, NOW_MS) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2026-09-21T14:13:22Z",
        "anthropic-ratelimit-tokens-limit": "100",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2026-09-21T14:14:22Z",
        "anthropic-ratelimit-input-tokens-limit": "1000",
        "anthropic-ratelimit-input-tokens-remaining": "900",
        "anthropic-ratelimit-input-tokens-reset": "2026-09-21T14:13:27Z",
        "anthropic-ratelimit-output-tokens-limit": "100",
        "anthropic-ratelimit-output-tokens-remaining": "0",
        "anthropic-ratelimit-output-tokens-reset": "2026-09-21T14:14:22Z",
    }


def test_an_unlimited_tenant_has_no_limit_headers() -> None:
    assert openai.limit_headers(Headroom(), NOW_MS) == {}
    assert anthropic.limit_headers(Headroom(), NOW_MS) == {}


def test_an_unlimited_bucket_is_never_the_tighter_one() -> None:
    headroom = Headroom(input_tokens=Remaining(limit=10, remaining=10))
    assert openai.limit_headers(headroom, NOW_MS)["x-ratelimit-limit-tokens"] == "10"


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        (-1, "0s"),
        (0, "0s"),
        (12, "12ms"),
        (999, "999ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (1005, "1.005s"),
        (6000, "6s"),
        (60_000, "1m0s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (90_061_500, "25h1m1.5s"),
    ],
)
def test_a_duration_is_written_as_openai_writes_it(ms: int, expected: str) -> None:
    assert duration(ms) == expected
