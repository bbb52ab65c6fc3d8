"""Deletes kept responses that are past their time. Nobody is told of one meanwhile.

Any number of control planes may run it at once: each takes rows that no other has.
"""

import logging

from control_plane.background import Job
from control_plane.services import Services
from store.responses import SWEPT_AT_ONCE, delete_expired

EVERY_MS = 600_000
ROUNDS_MAX = 100  # of so many rows; the rest waits for the next time

_log = logging.getLogger(__name__)


def responses_job(services: Services) -> Job:
    """Every ten minutes."""

    async def sweep() -> None:
        swept = await sweep_responses(services)
        if swept:
            _log.info("deleted responses past their time", extra={"facts": {"responses": swept}})

    return Job(name="kept_responses", every_ms=EVERY_MS, run=sweep)


async def sweep_responses(services: Services) -> int:
    """How many were deleted. Raises StoreAwayError; what was committed stays."""
    swept = 0
    for _ in range(ROUNDS_MAX):
        async with services.postgres.transaction() as conn:
            deleted = await delete_expired(conn)
        swept += deleted
        if deleted < SWEPT_AT_ONCE:
            break
    return swept
