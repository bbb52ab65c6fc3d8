"""Forgets what safety policies did once it is old: with it go the texts that tenants had kept.

Any number of control planes may run it at once: each takes rows that no other has.
"""

import logging

from control_plane.background import Job
from control_plane.services import Services
from store.safety import HITS_AT_ONCE, forget_hits

EVERY_MS = 600_000
ROUNDS_MAX = 100  # of so many rows; the rest waits for the next time

_log = logging.getLogger(__name__)


def safety_job(services: Services) -> Job:
    """Every ten minutes; where all is kept it does nothing."""

    async def sweep() -> None:
        forgotten = await forget_old_hits(services)
        if forgotten:
            _log.info("forgot safety hits", extra={"facts": {"hits": forgotten}})

    return Job(name="safety_hits", every_ms=EVERY_MS, run=sweep)


async def forget_old_hits(services: Services) -> int:
    """How many were deleted. Raises StoreAwayError; what was committed stays."""
    kept_days = services.settings.safety_hits_days
    forgotten = 0
    for _ in range(ROUNDS_MAX if kept_days else 0):
        async with services.postgres.transaction() as conn:
            deleted = await forget_hits(conn, kept_days=kept_days)
        forgotten += deleted
        if deleted < HITS_AT_ONCE:
            break
    return forgotten
