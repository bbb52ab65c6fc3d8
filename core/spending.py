"""What each cap has counted in each of its windows, and what that leaves of them.

Invariant: a window holds what its cap's requests hold and were billed, from the day on that the
cap was set in.
"""

from collections.abc import Iterable
from datetime import date
from typing import TypeAlias

import msgspec

from core.accounts import Account, account_limits
from core.caps import Cap, Period, Window, counts, order, posted, window_start
from core.grants import Limit
from core.requests import Row

WindowKey: TypeAlias = tuple[str, str, Period, date]  # tenant, key, period, first day


class Spending:
    """Every tenant's caps, and their windows that have counted anything."""

    def __init__(self) -> None:
        self.caps: dict[tuple[str, str, Period], Cap] = {}
        self.windows: dict[WindowKey, Window] = {}

    def set_cap(self, cap: Cap, rows: Iterable[Row], *, today: date) -> None:
        """A new one counts from its current window on, with all that is in it already.

        One that is changed keeps the day it was set.
        """
        place = (cap.tenant_id, cap.key_id, cap.period)
        before = self.caps.get(place)
        if before is not None:
            cap = msgspec.structs.replace(cap, since=before.since)
        self.caps[place] = cap
        window = (*place, window_start(cap.period, today))
        if before is None:
            self.windows[window] = _counted(cap, rows, today=today)
        elif window in self.windows:
            self.windows[window] = posted(self.windows[window], cap, reserved=0, posted=0)

    def remove_cap(self, tenant_id: str, key_id: str, period: Period) -> None:
        """Its counters go with it."""
        place = (tenant_id, key_id, period)
        self.caps.pop(place, None)
        for window in [window for window in self.windows if window[:3] == place]:
            del self.windows[window]

    def limits(self, account: Account, row: Row) -> list[Limit]:
        """What bounds a request, in the order in which it refuses: its account, then its caps."""
        limits = account_limits(account)
        for cap in self._caps_on(row):
            if cap.hard_micro is not None:
                window = self.windows.get(_place(cap, row.day), Window())
                limits.append(
                    Limit(
                        name=cap.limit,
                        cap_micro=cap.hard_micro,
                        posted_micro=window.posted_micro,
                        reserved_micro=window.reserved_micro,
                    )
                )
        return limits

    def count(self, row: Row, *, reserved: int, posted_micro: int) -> None:
        """Add a change of what the request holds and is billed to the windows it counts in."""
        for cap in self._caps_on(row):
            place = _place(cap, row.day)
            self.windows[place] = posted(
                self.windows.get(place, Window()), cap, reserved=reserved, posted=posted_micro
            )

    def _caps_on(self, row: Row) -> list[Cap]:
        return sorted(
            (
                cap
                for cap in self.caps.values()
                if cap.tenant_id == row.asked.tenant_id
                and counts(cap, key_id=row.asked.key_id, day=row.day)
            ),
            key=order,
        )


def _counted(cap: Cap, rows: Iterable[Row], *, today: date) -> Window:
    """What a new cap's current window holds already."""
    start = window_start(cap.period, today)
    mine = [
        row
        for row in rows
        if row.asked.tenant_id == cap.tenant_id
        and cap.key_id in ("", row.asked.key_id)
        and window_start(cap.period, row.day) == start
    ]
    held = sum(row.reserved_micro for row in mine if row.cause is None)
    return posted(Window(), cap, reserved=held, posted=sum(row.net_micro for row in mine))


def _place(cap: Cap, day: date) -> WindowKey:
    return cap.tenant_id, cap.key_id, cap.period, window_start(cap.period, day)
