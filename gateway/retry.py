"""When a refused caller should come back, as headers that both SDKs obey.

Both SDKs retry 409, 429 and 5xx twice on their own. `x-should-retry` overrides that, then
`retry-after-ms` and `retry-after` set the wait. An unknown wait still gets a value: without
one the SDKs come back after half a second, together.
"""

from core.errors import Code, Refusal

RETRY_AFTER_MS_DEFAULT = 1_000
QUOTA_RETRY_AFTER_MS_DEFAULT = 3_600_000  # nobody knows when a spent budget is raised

FINAL = frozenset({Code.QUOTA, Code.TIMEOUT})

_WAITS = {
    Code.RATE_LIMITED: RETRY_AFTER_MS_DEFAULT,
    Code.QUOTA: QUOTA_RETRY_AFTER_MS_DEFAULT,
    Code.OVERLOADED: RETRY_AFTER_MS_DEFAULT,
    Code.UNAVAILABLE: RETRY_AFTER_MS_DEFAULT,
}


def retry_headers(refusal: Refusal) -> dict[str, str]:
    """`retry-after` in whole seconds rounded up, the same in ms, and `x-should-retry: false`.

    A conflict without a wait (another request under the same key) is final, a spent budget is
    too: retrying either by itself changes nothing. So is a deadline: the caller's time is up, and
    the SDKs would take it twice more.
    """
    headers: dict[str, str] = {}
    wait_ms = refusal.retry_after_ms
    if wait_ms is None:
        wait_ms = _WAITS.get(refusal.code)
    if wait_ms is not None:
        headers["retry-after"] = str(max(1, -(-wait_ms // 1000)))
        headers["retry-after-ms"] = str(max(0, wait_ms))
    final = refusal.code is Code.CONFLICT and refusal.retry_after_ms is None
    if final or refusal.code in FINAL:
        headers["x-should-retry"] = "false"
    return headers
