"""What a failure is a cause of, and what a caller is told when everything has failed: pure.

4xx are the caller's and are never tried elsewhere, but for two: what is too long for one model
may fit another, and what one provider's policy refuses another's may not. A tenant's own limits
and money are refused before any of this.
"""

from collections.abc import Sequence

from core.errors import Code, Refusal
from core.money import EndCause
from core.route_table import FallbackCause

CAUSE_OF: dict[Code, FallbackCause] = {
    Code.OVERLOADED: "capacity",
    Code.UNAVAILABLE: "capacity",
    Code.INTERNAL: "error",
    Code.TIMEOUT: "timeout",
    Code.CONTEXT_LENGTH: "context_window",
    Code.CONTENT_POLICY: "content_policy",
}

# Of several refusals the one that leaves most hope: what a retry may find better comes first,
# and a fault of ours is told only if nothing else was said.
TOLD_FIRST = (
    Code.OVERLOADED,
    Code.UNAVAILABLE,
    Code.TIMEOUT,
    Code.CONTEXT_LENGTH,
    Code.CONTENT_POLICY,
    Code.INTERNAL,
)


def cause_of(refusal: Refusal, end: EndCause = EndCause.NOT_STARTED) -> FallbackCause | None:
    """None: it would be refused anywhere, and is told.

    A target that was lost after it began has erred; one that could not begin has no room.
    """
    if refusal.code is Code.UNAVAILABLE and end is EndCause.FAILED:
        return "error"
    return CAUSE_OF.get(refusal.code)


def told(refusals: Sequence[Refusal]) -> Refusal:
    """Of what all targets answered, the last in doubt. Some one was refused."""
    assert refusals
    best = min(reversed(refusals), key=_rank)
    waits = [r.retry_after_ms for r in refusals if r.retry_after_ms is not None]
    if best.status < 500 or not waits:  # noqa: PLR2004 - ours from here on
        return best
    return Refusal(
        code=best.code, message=best.message, param=best.param, retry_after_ms=min(waits)
    )


def _rank(refusal: Refusal) -> int:
    return TOLD_FIRST.index(refusal.code) if refusal.code in TOLD_FIRST else len(TOLD_FIRST)
