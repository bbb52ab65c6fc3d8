"""Forgets idempotency keys that have expired, with the answers that were kept for them."""

import logging

from control_plane.background import Job
from control_plane.services import Services
from store.idempotency import forget

EVERY_MS = 60_000
AT_ONCE = 500  # in one transaction: answers are large
ROUNDS_MAX = 200  # a minute

_log = logging.getLogger(__name__)


def idempotency_job(services: Services) -> Job:
    """Any number of control planes may run it at once: none waits for another's rows."""

    async def forget_all() -> None:
        forgotten = 0
        for _ in range(ROUNDS_MAX):
            async with services.postgres.transaction() as conn:
                count = await forget(conn, limit=AT_ONCE)
            forgotten += count
            if count < AT_ONCE:
                break
        if forgotten:
            _log.info("forgot idempotency keys", extra={"facts": {"keys": forgotten}})

    return Job(name="idempotency", every_ms=EVERY_MS, run=forget_all)
