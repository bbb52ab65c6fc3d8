"""Jobs that keep usage in order: sums brought up to date, partitions made, old months dropped.

Any number of control planes may run them at once.
"""

import asyncio
import logging
import time
from contextlib import suppress

from control_plane.background import Job
from control_plane.services import Services
from store.postgres import StoreAwayError
from store.retention import NotYetError, make_partitions, old_months, retire_month
from store.rollups import ENTRIES_MAX, Rolled, freshness, roll_up

# At most half of the time between rounds, so that a backlog leaves Postgres to others.
DUTY = 0.5
ENTRIES_MIN = 500  # in one transaction, where more take Postgres too long
MONTHS_EVERY_MS = 3_600_000
CATCH_UP_S = 1.0  # for one reader
PAUSE_S = 0.02

_log = logging.getLogger(__name__)


def usage_jobs(services: Services) -> list[Job]:
    """The sums every few seconds, the months every hour."""
    sums = Sums(services)

    async def months() -> None:
        made = await make_partitions(services.postgres)
        if made:
            _log.info("made partitions", extra={"facts": {"partitions": made}})
        await drop_old_months(services)

    return [
        Job(name="usage_sums", every_ms=sums.every_ms, run=sums.round),
        Job(name="usage_months", every_ms=MONTHS_EVERY_MS, run=months),
    ]


class Sums:
    """Brings usage's sums up to date, in transactions no longer than Postgres bears."""

    def __init__(self, services: Services) -> None:
        self.every_ms = services.settings.usage_rollup_ms
        self._services = services
        self._entries_max = ENTRIES_MAX

    async def round(self) -> None:
        """Raises StoreAwayError; what was committed stays."""
        until = time.monotonic() + DUTY * self.every_ms / 1000
        while await self._some() and time.monotonic() < until:
            pass
        async with self._services.postgres.connection() as conn:
            behind = await freshness(conn)
        self._services.metrics.rollup_behind.set(behind.entries_behind)

    async def _some(self) -> bool:
        """Whether there was anything to do."""
        try:
            rolled = await roll_up(self._services.postgres, entries_max=self._entries_max)
        except StoreAwayError:
            # Perhaps it was too much for its bound; the same again would be, for ever.
            self._entries_max = max(ENTRIES_MIN, self._entries_max // 2)
            raise
        self._entries_max = min(ENTRIES_MAX, 2 * self._entries_max)
        _count(self._services, rolled)
        return rolled.entries > 0


async def catch_up(services: Services, within_s: float = CATCH_UP_S) -> None:
    """Bring the sums up to date for a reader, or as near as the time allows.

    What others are at is waited for. With Postgres too slow for it, the reader has older sums.
    """
    until = time.monotonic() + within_s
    with suppress(StoreAwayError):
        while time.monotonic() < until:
            rolled = await roll_up(services.postgres, entries_max=ENTRIES_MIN)
            _count(services, rolled)
            if rolled.entries:
                continue
            async with services.postgres.connection() as conn:
                if not (await freshness(conn)).entries_behind:
                    return
            await asyncio.sleep(PAUSE_S)


def _count(services: Services, rolled: Rolled) -> None:
    services.metrics.rolled_requests.inc(rolled.requests)
    if rolled.missing:
        # Nobody drops a month before it is counted, so this is a fault of ours.
        facts = {"missing": rolled.missing}
        _log.error("ended requests have no usage row", extra={"facts": facts})


async def drop_old_months(services: Services) -> None:
    """Those that may go now, each in its own transaction. Raises StoreAwayError."""
    kept_months = services.settings.usage_kept_months
    if kept_months == 0:
        return
    async with services.postgres.connection() as conn:
        months = await old_months(conn, kept_months=kept_months)
    for month in months:
        try:
            retired = await retire_month(services.books, month)
        except NotYetError as reason:
            _log.warning("a month's usage has to stay", extra={"facts": {"reason": str(reason)}})
            continue
        if retired is not None:
            facts = {"month": month, "requests": retired.requests}
            _log.info("dropped a month of usage", extra={"facts": facts})
