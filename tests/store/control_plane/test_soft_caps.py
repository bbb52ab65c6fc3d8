"""A soft cap that is passed is told to operators: in the log and by a count, once a window."""

import asyncio
import logging
import secrets
from contextlib import suppress

import pytest

from control_plane.jobs import jobs
from control_plane.launchers.external import ExternalLauncher
from control_plane.soft_caps import tell_passed_caps
from store.accounts import take_passed_caps
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def tenant(plane):
    return await a_tenant(plane.services.postgres)


async def spend_50(plane, tenant, key="key_1"):
    request_id = f"req_{secrets.token_hex(8)}"
    await plane.services.ledger.reserve(a_reserve(request_id, tenant_id=tenant, key_id=key))
    await plane.services.ledger.settle(a_settle(request_id, tenant_id=tenant))


def told(caplog, tenant):
    """The alarm lines about it, as they stand."""
    lines = [record for record in caplog.records if record.message == "a soft cap was passed"]
    assert all(record.levelno == logging.WARNING for record in lines)
    return [record.facts for record in lines if record.facts["tenant_id"] == tenant]


async def counted(plane, scope, period):
    text = (await plane.client.get("/metrics")).text
    name = "headworks_control_plane_soft_caps_passed_total"
    label = f'{name}{{period="{period}",scope="{scope}"}} '
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(label))


async def test_each_window_is_told_once_however_many_look(plane, tenant, caplog):
    await plane.admin("PUT", f"/tenants/{tenant}/caps/day", {"soft_micro": 100})
    await plane.admin("PUT", f"/tenants/{tenant}/caps/month", {"soft_micro": 1_000})
    before = await counted(plane, "account", "day")
    await spend_50(plane, tenant)
    await tell_passed_caps(plane.services)
    assert told(caplog, tenant) == []
    await spend_50(plane, tenant)
    await asyncio.gather(*(tell_passed_caps(plane.services) for _ in range(5)))
    await spend_50(plane, tenant)
    await tell_passed_caps(plane.services)
    (facts,) = told(caplog, tenant)
    seen = {name: facts[name] for name in ("key_id", "period", "posted_micro", "soft_micro")}
    assert seen == {"key_id": "", "period": "day", "posted_micro": 100, "soft_micro": 100}
    assert await counted(plane, "account", "day") == before + 1
    assert await counted(plane, "account", "month") == 0


async def test_a_keys_cap_is_told_with_its_key(plane, tenant, caplog):
    key = (await plane.made(f"/tenants/{tenant}/keys", {"name": "k"}))["id"]
    await spend_50(plane, tenant, key)
    await plane.admin("PUT", f"/keys/{key}/caps/total", {"soft_micro": 50})
    await tell_passed_caps(plane.services)
    (facts,) = told(caplog, tenant)
    assert (facts["key_id"], facts["period"], facts["starts"]) == (key, "total", "0001-01-01")
    assert await counted(plane, "key", "total") == 1


async def test_what_was_not_committed_is_told_the_next_time(plane, tenant, caplog):
    await plane.admin("PUT", f"/tenants/{tenant}/caps/day", {"soft_micro": 0})
    with suppress(RuntimeError):
        async with plane.services.postgres.transaction() as conn:
            await take_passed_caps(conn, limit=100)
            raise RuntimeError("it dies here")
    await tell_passed_caps(plane.services)
    assert len(told(caplog, tenant)) == 1


async def test_a_window_that_the_ledger_is_writing_to_is_waited_for(plane, tenant, caplog):
    await plane.admin("PUT", f"/tenants/{tenant}/caps/day", {"soft_micro": 0})
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("UPDATE cap_windows SET posted_micro = 0 WHERE tenant_id = %s", [tenant])
        async with asyncio.timeout(1):
            await tell_passed_caps(plane.services)
        assert told(caplog, tenant) == []
    await tell_passed_caps(plane.services)
    assert len(told(caplog, tenant)) == 1


async def test_it_is_a_job_of_every_control_plane(plane, tenant, caplog):
    await plane.admin("PUT", f"/tenants/{tenant}/caps/day", {"soft_micro": 0})
    (job,) = [job for job in jobs(plane.services, ExternalLauncher()) if job.name == "soft_caps"]
    await job.run()
    assert len(told(caplog, tenant)) == 1
