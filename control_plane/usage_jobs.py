"""Jobs that keep usage in order: sums brought up to date, partitions made, old months dropped.

Any number of control planes may run them at once.
"""

import logging
import time

from control_plane.background import Job
from control_plane.services import Services
from store.retention import NotYetError, make_partitions, old_months, retire_month
from store.rollups import freshness, roll_up

# At most half of the time between rounds, so that a backlog leaves Postgres to others.
DUTY = 0.5
MONTHS_EVERY_MS = 3_600_000

_log = logging.getLogger(__name__)


def usage_jobs(services: Services) -> list[Job]:
    """The sums every few seconds, the months every hour."""
    every_ms = services.settings.usage_rollup_ms

    async def sums() -> None:
        until = time.monotonic() + DUTY * every_ms / 1000
        while True:
            rolled = await roll_up(services.postgres)
            services.metrics.rolled_requests.inc(rolled.requests)
            if rolled.missing:
                # Nobody drops a month before it is counted, so this is a fault of ours.
                facts = {"missing": rolled.missing}
                _log.error("ended requests have no usage row", extra={"facts": facts})
            if rolled.entries == 0 or time.monotonic() > until:
                break
        async with services.postgres.connection() as conn:
            behind = await freshness(conn)
        services.metrics.rollup_behind.set(behind.entries_behind)

    async def months() -> None:
        made = await make_partitions(services.postgres)
        if made:
            _log.info("made partitions", extra={"facts": {"partitions": made}})
        await drop_old_months(services)

    return [
        Job(name="usage_sums", every_ms=every_ms, run=sums),
        Job(name="usage_months", every_ms=MONTHS_EVERY_MS, run=months),
    ]


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
