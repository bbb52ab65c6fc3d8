"""Keys that have expired are forgotten, with their answers."""

import pytest

from control_plane.jobs import jobs
from control_plane.launchers.external import ExternalLauncher
from core.idempotency import Claim, Kept
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def test_it_is_a_job_of_every_control_plane(plane):
    tenant = await a_tenant(plane.services.postgres)
    for key, kept_s in (("old", 0), ("new", 60)):
        claim = Claim(scope="POST /", key=key, fingerprint="f", kept_s=kept_s)
        name = f"{tenant}_{key}"
        await plane.services.ledger.reserve(a_reserve(name, tenant_id=tenant, claim=claim))
        kept = Kept(scope="POST /", key=key, answer=b"answer")
        await plane.services.ledger.settle(a_settle(name, tenant_id=tenant, kept=kept))
    (job,) = [job for job in jobs(plane.services, ExternalLauncher()) if job.name == "idempotency"]
    await job.run()
    async with plane.services.postgres.connection() as conn:
        cursor = await conn.execute(
            "SELECT key FROM idempotency_keys WHERE tenant_id = %s", (tenant,)
        )
        assert await cursor.fetchall() == [("new",)]
