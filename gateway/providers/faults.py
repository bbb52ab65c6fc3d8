"""What went wrong at a provider, as three parties see it: the caller, the router, the operator.

    kind            the caller is told          the router may            the breaker
    capacity        503/529, with a wait        go elsewhere              cools down
    timeout         504                         go elsewhere              counts it
    error           503, or 500 when cut        go elsewhere              counts it, if a failure
    context_window  400 of the caller's         go to a larger model      -
    content_policy  400 of the caller's         go elsewhere              -
    refused         400 of the caller's         not: it is refused there  -

A fault of our own account there (its key, its address, its unpaid bill) is an `error` that is
`ours`: the tenant did nothing wrong, and an operator has to hear of it.
"""

from typing import Literal

import msgspec

from core.errors import Code, Refusal
from core.route_table import FallbackCause

FaultKind = FallbackCause | Literal["refused"]

BUSY = Refusal(code=Code.OVERLOADED, message="This model is overloaded. Please retry.")
AWAY = Refusal(
    code=Code.UNAVAILABLE, message="This model is not available at the moment. Please retry."
)
CUT = Refusal(code=Code.INTERNAL, message="The model's answer was cut off. Please retry.")
LATE = Refusal(code=Code.TIMEOUT, message="The model did not answer in time. Please retry.")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`detail` is for the log: it may hold the provider's own words, but never a key."""

    kind: FaultKind
    refusal: Refusal
    detail: str
    counts: bool = False  # the provider failed: not its caller, and not for want of room
    ours: bool = False  # an operator has to act
    key_dead: bool = False  # the provider does not take our key


class FaultError(Exception):
    """A fault on its way to whoever decides what follows."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


def broken(detail: str) -> FaultError:
    """The answer is not what its dialect says an answer is, or is not whole."""
    return FaultError(Fault(kind="error", refusal=CUT, detail=detail, counts=True))


def late(detail: str) -> FaultError:
    """Nothing came for too long."""
    return FaultError(Fault(kind="timeout", refusal=LATE, detail=detail, counts=True))


def away(detail: str) -> FaultError:
    """It cannot be reached, or fails before it has answered."""
    return FaultError(Fault(kind="error", refusal=AWAY, detail=detail, counts=True))


def busy(detail: str, retry_after_ms: int | None = None) -> FaultError:
    """It has no room now."""
    refusal = msgspec.structs.replace(BUSY, retry_after_ms=retry_after_ms)
    return FaultError(Fault(kind="capacity", refusal=refusal, detail=detail))
