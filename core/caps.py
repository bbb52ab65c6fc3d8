"""Spending caps: on an account or one key of it, for a day, a month or for good.

A cap counts what its requests hold and were billed in a window: UTC days and months by the
database's clock when a request was reserved, whatever day it ends on. A hard cap refuses, a
soft one only tells. Counters are kept from the window in which the cap was set; that one starts
from what its requests held and were billed before.
"""

from datetime import date
from enum import StrEnum

import msgspec

FOR_GOOD = date(1, 1, 1)


class Period(StrEnum):
    """How long a window is, in the order in which caps are tried."""

    DAY = "day"
    MONTH = "month"
    TOTAL = "total"


class Cap(msgspec.Struct, frozen=True, kw_only=True):
    """`key_id` "" caps the whole account. None is no cap of that kind."""

    tenant_id: str
    key_id: str
    period: Period
    soft_micro: int | None
    hard_micro: int | None
    since: date  # the day it was set

    @property
    def limit(self) -> str:
        """Its name in a refusal."""
        return f"{'key' if self.key_id else 'account'}.{self.period}"


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What one cap has counted in one window."""

    posted_micro: int = 0
    reserved_micro: int = 0
    soft_passed: bool = False  # stays, though a refund may follow


def window_start(period: Period, day: date) -> date:
    """The first day of the window that `day` falls in."""
    if period is Period.DAY:
        return day
    return day.replace(day=1) if period is Period.MONTH else FOR_GOOD


def counts(cap: Cap, *, key_id: str, day: date) -> bool:
    """Whether a request of this key, reserved on this day, is under the cap."""
    return cap.key_id in ("", key_id) and window_start(cap.period, day) >= window_start(
        cap.period, cap.since
    )


def order(cap: Cap) -> tuple[bool, int]:
    """Caps in the order in which they refuse: the account's before its key's, the shorter first."""
    return cap.key_id != "", list(Period).index(cap.period)


def posted(window: Window, cap: Cap, *, reserved: int, posted: int) -> Window:
    """The window after a change of what is held and billed in it."""
    total = window.posted_micro + posted
    passed = cap.soft_micro is not None and total >= cap.soft_micro
    return Window(
        posted_micro=total,
        reserved_micro=window.reserved_micro + reserved,
        soft_passed=window.soft_passed or passed,
    )
