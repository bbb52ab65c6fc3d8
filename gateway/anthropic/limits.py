"""Rate-limit headers in Anthropic's form: `anthropic-ratelimit-<bucket>-{limit,remaining,reset}`.

An unlimited bucket has no headers. `tokens` repeats the token bucket that will run out first.
"""

from core.tickets import Headroom, Remaining
from gateway.anthropic.moment import rfc3339
from gateway.headroom import tightest


def limit_headers(headroom: Headroom, now_ms: int) -> dict[str, str]:
    """Headers for any answer to a tenant, refusals included."""
    buckets = {
        "requests": headroom.requests,
        "tokens": tightest(headroom.input_tokens, headroom.output_tokens),
        "input-tokens": headroom.input_tokens,
        "output-tokens": headroom.output_tokens,
    }
    headers: dict[str, str] = {}
    for name, bucket in buckets.items():
        if bucket.limit:
            headers |= _headers(f"anthropic-ratelimit-{name}", bucket, now_ms)
    return headers


def _headers(prefix: str, bucket: Remaining, now_ms: int) -> dict[str, str]:
    reset_s = -(-(now_ms + max(0, bucket.reset_ms)) // 1000)
    return {
        f"{prefix}-limit": str(bucket.limit),
        f"{prefix}-remaining": str(max(0, bucket.remaining)),
        f"{prefix}-reset": rfc3339(reset_s),
    }
