"""Tells operators of soft caps that were passed: one line in the log for each window.

The ledger notes the moment; here it is told. A line is written before it is noted as told, so
that a death between the two repeats it rather than losing it. Any number of control planes may
do this at once: each window is one of theirs.
"""

import logging

import msgspec

from control_plane.background import Job
from control_plane.services import Services
from store.accounts import take_passed_caps

EVERY_MS = 2_000
CAPS_MAX = 100  # in one round; more wait for the next

_log = logging.getLogger(__name__)


def soft_caps_job(services: Services) -> Job:
    """A round every two seconds."""

    async def run() -> None:
        await tell_passed_caps(services)

    return Job(name="soft_caps", every_ms=EVERY_MS, run=run)


async def tell_passed_caps(services: Services) -> int:
    """One round; returns how many were told. Raises StoreAwayError."""
    async with services.postgres.transaction() as conn:
        passed = await take_passed_caps(conn, limit=CAPS_MAX)
        for cap in passed:
            _log.warning("a soft cap was passed", extra={"facts": msgspec.to_builtins(cap)})
    for cap in passed:
        scope = "key" if cap.key_id else "account"
        services.metrics.soft_caps_passed.labels(scope, cap.period.value).inc()
    return len(passed)
