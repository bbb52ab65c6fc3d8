"""What becomes of requests that a pool cannot serve in time: pure decisions.

The pool decides who is sent away (`core.shed`); a gateway foresees what it would say, so that
a refusal costs no rendering, no reservation and no call. In this order, as waits grow: batch
waits, batch is refused, then tenants above their share, then what cannot meet its deadline,
then answers are cut to what the tenant's policy allows, then all are refused.
"""

from zlib import crc32

import msgspec

from core.errors import Code, Refusal
from core.tickets import Dropped

LASTING = frozenset({"batch_refused", "over_share", "too_late", "queue_full"})
RETRY_MS_MIN = 500
RETRY_MS_MAX = 60_000
JITTER_PERCENT = 50  # of the wait, more or less, so that those refused together come back apart


class OverloadRules(msgspec.Struct, frozen=True, kw_only=True):
    """How long an answer of the pool holds, and when answers are cut."""

    hold_ms_min: int = 20
    hold_ms_max: int = 250
    hold_part: int = 8  # of the expected wait, which shrinks as it is held
    shorten_wait_ms: int = 20_000


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool last told a tenant in a class, and what was asked for."""

    dropped: Dropped
    left_ms: int  # to the deadline of the one that was dropped
    at_ms: int


def foresee(
    last: Sighting | None, *, left_ms: int, now_ms: int, rules: OverloadRules
) -> Dropped | None:
    """What the pool would tell this tenant now, if that is known.

    Exact but for what has ended since: another tenant's refusals say nothing, nor does one of a
    request with less time left than this one has.
    """
    if last is None or last.dropped.reason not in LASTING:
        return None
    age_ms = now_ms - last.at_ms
    if not 0 <= age_ms < _hold_ms(last.dropped, rules):
        return None
    if last.dropped.reason == "too_late" and left_ms > last.left_ms:
        return None
    wait_ms = max(0, last.dropped.expected_wait_ms - age_ms)
    return Dropped(reason=last.dropped.reason, expected_wait_ms=wait_ms)


def shortened(asked: int | None, most: int, congestion_ms: int, rules: OverloadRules) -> int | None:
    """`max_tokens` of an answer while others wait; `most` 0 is a tenant that wants all of it."""
    if most == 0 or congestion_ms < rules.shorten_wait_ms:
        return asked
    return most if asked is None else min(asked, most)


def told(dropped: Dropped, request_id: str, *, service_class: str) -> Refusal:
    """What a request that found no replica is told. The wait is in the text and the headers."""
    match dropped.reason:
        case "expired":
            return Refusal(code=Code.TIMEOUT, message="The request waited past its deadline.")
        case "fits_never":
            return Refusal(
                code=Code.CONTEXT_LENGTH,
                message="The prompt and its answer need more memory than any replica has. "
                "Ask for fewer tokens.",
                param="max_tokens",
            )
        case reason if reason in LASTING:
            wait_ms = dropped.expected_wait_ms
            offer = "" if service_class == "batch" else " Batch requests may wait longer."
            return Refusal(
                code=Code.OVERLOADED,
                message=f"This model is overloaded: {_WHY[reason]}{_wait_text(wait_ms)}{offer}",
                retry_after_ms=retry_after_ms(wait_ms, request_id),
            )
        case _:
            return Refusal(
                code=Code.UNAVAILABLE,
                message="This model is not available at the moment.",
                retry_after_ms=retry_after_ms(RETRY_MS_MIN, request_id),
            )


def retry_after_ms(wait_ms: int, request_id: str) -> int:
    """About the wait: each request its own, and the same one always the same."""
    base_ms = min(RETRY_MS_MAX, max(RETRY_MS_MIN, wait_ms))
    spread_ms = base_ms * JITTER_PERCENT // 100
    return base_ms - spread_ms + crc32(request_id.encode()) % (2 * spread_ms + 1)


_WHY = {
    "batch_refused": "it takes no more batch requests now.",
    "over_share": "your requests wait for more than your share of it.",
    "too_late": "it would not be done by its deadline.",
    "queue_full": "its queue is full.",
}


def _hold_ms(dropped: Dropped, rules: OverloadRules) -> int:
    part_ms = dropped.expected_wait_ms // rules.hold_part
    return max(rules.hold_ms_min, min(rules.hold_ms_max, part_ms))


def _wait_text(wait_ms: int) -> str:
    return f" It would wait about {-(-wait_ms // 1_000)} s." if wait_ms else ""
