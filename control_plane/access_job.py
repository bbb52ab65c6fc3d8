"""Forgetting what is over: sessions, invitations, and failures that nobody repeats."""

from control_plane.background import Job
from control_plane.services import Services
from store import attempts, sessions

EVERY_MS = 60_000


def access_job(services: Services) -> Job:
    """Any number of control planes may run it at once."""
    settings = services.settings

    async def forget() -> None:
        async with services.postgres.transaction() as conn:
            await sessions.forget(conn, idle_ms=settings.session_idle_ms)
        age_ms = max(settings.sign_in_forget_ms, settings.sign_in_most_ms)
        async with services.postgres.transaction() as conn:
            await attempts.forget(conn, age_ms=age_ms)

    return Job(name="access", every_ms=EVERY_MS, run=forget)
