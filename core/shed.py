"""Whom a pool sends away rather than let wait, and how long a wait it expects.

A pool that is full sheds in this order, each step from a longer wait on: batch, then whoever
waits for more than a fair share, then whoever could not be done by its deadline. What may be
placed at once is never asked. Not in here: what a tenant is offered instead (`gateway`).
"""

import msgspec

from core.protocol import ServiceClass

SMOOTHING = 16  # requests that a measured time is the average of, roughly
LEARNING, FORGETTING = 4, 32  # promises broken count for more than those kept
STRETCH_ONE = 1_000
STRETCH_MAX = 16 * STRETCH_ONE
PROMISE_MS_MIN = 50  # a shorter promise says nothing of how promises are kept


class ShedRules(msgspec.Struct, frozen=True, kw_only=True):
    """From which wait of a newcomer to the higher classes on a pool sheds what."""

    batch_wait_ms: int = 10_000
    batch_kept: int = 64  # tickets that may wait whatever happens, so that a share is used
    share_wait_ms: int = 20_000
    margin_percent: int = 150  # of the time it is expected to take, all of which it must have
    samples_min: int = 16  # finished tickets, before any time is known


class ServiceTime:
    """How long a ticket is on its replica, as measured: placed to finished.

    By Little's law a full pool of `open` tickets frees a place each `stay / open`, whatever it
    does while it is not full: arrivals alone would be taken for its capacity. What that leaves
    out, higher classes that come later above all, is measured by class: waits over promises.
    """

    def __init__(self) -> None:
        self.stay_us = 0
        self.samples = 0
        self.stretch: dict[ServiceClass, int] = {
            "interactive": STRETCH_ONE,
            "standard": STRETCH_ONE,
            "batch": STRETCH_ONE,
        }

    def measure(self, stay_ms: int) -> None:
        """One more ticket finished."""
        us = stay_ms * 1_000
        self.stay_us += us if self.samples == 0 else (us - self.stay_us) // SMOOTHING
        self.samples += 1

    def least_ms(self, rules: ShedRules) -> int:
        """What a ticket needs once it is placed, as far as known."""
        return self.stay_us // 1_000 if self.samples >= rules.samples_min else 0

    def waited(self, service_class: ServiceClass, waited_ms: int, promised_ms: int) -> None:
        """A ticket's turn came, or its deadline did, after so long."""
        if promised_ms >= PROMISE_MS_MIN:
            ratio = min(STRETCH_MAX, waited_ms * STRETCH_ONE // promised_ms)
            off = ratio - self.stretch[service_class]
            self.stretch[service_class] += off // (LEARNING if off > 0 else FORGETTING)

    def stretched_ms(self, service_class: ServiceClass, promised_ms: int) -> int:
        """What a promise is worth in this class."""
        return promised_ms * self.stretch[service_class] // STRETCH_ONE

    def wait_ms(self, place: int, open_tickets: int) -> int:
        """Until the ticket at this place is served; 0 while nothing was measured."""
        return place * self.stay_us // (1_000 * open_tickets) if open_tickets else 0


class Prospect(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket that has to wait. Counts are of its class and include it."""

    service_class: ServiceClass
    waiting: int
    own: int  # of its tenant
    tenants: int
    congestion_ms: int  # a newcomer's wait behind all interactive and standard tickets
    wait_ms: int
    stay_ms: int
    left_ms: int  # to its deadline; 0 is none
    samples: int


def shed(prospect: Prospect, rules: ShedRules, queue_max: int) -> str | None:
    """Why it is sent away, or None: the first of batch_refused, over_share, too_late."""
    p = prospect
    is_over_share = p.own * p.tenants > p.waiting
    if is_over_share and 2 * p.waiting > queue_max:
        return "over_share"  # the rest of the queue is for those with less in it
    if p.samples < rules.samples_min:
        return None
    if p.service_class == "batch":
        is_long = p.congestion_ms >= rules.batch_wait_ms
        if is_long and p.waiting > rules.batch_kept:
            return "batch_refused"
    elif is_over_share and p.congestion_ms >= rules.share_wait_ms:
        return "over_share"
    done_ms = (p.wait_ms + p.stay_ms) * rules.margin_percent // 100
    if p.left_ms and done_ms > p.left_ms:
        return "too_late"
    return None
