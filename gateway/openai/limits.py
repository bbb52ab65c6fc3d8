"""Rate-limit headers in OpenAI's form: `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`.

An unlimited bucket has no headers. OpenAI has one bucket of tokens where we have two: told is
the one that will run out first.
"""

from core.tickets import Headroom, Remaining
from gateway.headroom import tightest


def limit_headers(headroom: Headroom, now_ms: int) -> dict[str, str]:  # noqa: ARG001 - the signature is both dialects'; here a reset is a duration
    """Headers for any answer to a tenant, refusals included."""
    buckets = {
        "requests": headroom.requests,
        "tokens": tightest(headroom.input_tokens, headroom.output_tokens),
    }
    headers: dict[str, str] = {}
    for name, bucket in buckets.items():
        if bucket.limit:
            headers |= _headers(name, bucket)
    return headers


def _headers(name: str, bucket: Remaining) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(bucket.limit),
        f"x-ratelimit-remaining-{name}": str(max(0, bucket.remaining)),
        f"x-ratelimit-reset-{name}": duration(bucket.reset_ms),
    }


def duration(ms: int) -> str:
    """`12ms`, `6s`, `1.5s`, `6m0s`, `1h0m0s`; a negative one is `0s`."""
    if 0 < ms < 1000:  # noqa: PLR2004 - milliseconds in a second
        return f"{ms}ms"
    seconds, rest_ms = divmod(max(0, ms), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{rest_ms:03d}".rstrip("0") if rest_ms else ""
    text = f"{seconds}{fraction}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
