"""A gateway dies: its requests are settled within its lease, from the worker's journal."""

import asyncio
import secrets

import pytest

from core.fleet import Journal, JournalEntry
from core.protocol import Usage
from store.leases import assert_lease
from tests.support.control_plane import running, the_settings
from tests.support.ledger_commands import a_reserve, a_settle, an_attempt
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]

LEASE_MS = 400


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    async with running(the_settings(fresh_postgres_url, valkey_url, lease_ms=LEASE_MS)) as plane:
        yield plane


async def dying_gateway(plane, *requests):
    """A gateway that reserved these, and was last heard just now."""
    tenant, gateway = await a_tenant(plane.services.postgres), f"gw_{secrets.token_hex(12)}"
    async with plane.services.postgres.transaction() as conn:
        await assert_lease(conn, gateway, "local", LEASE_MS)
    for request_id in requests:
        await plane.services.ledger.reserve(
            a_reserve(request_id, tenant_id=tenant, gateway_id=gateway, amount_micro=1_000)
        )
    return tenant


async def usage_of(plane, request_id):
    (row,) = (await plane.admin("GET", "/usage", request_id=request_id)).json()["usage"]
    return row


async def settled(plane, request_id):
    async with asyncio.timeout(15):
        while (row := await usage_of(plane, request_id))["state"] == "open":  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)
    return row


async def deliver(plane, *entries):
    message = Journal(replica_id="rep-0", boot_id="boot_1", entries=entries)
    assert (await plane.says("/journal", message)).status_code == 200


def last_word(seq, request_id, output):
    return JournalEntry(
        seq=seq,
        request_id=request_id,
        attempt=1,
        usage=Usage(prompt_tokens=10, output_tokens=output),
        final=True,
        cause="aborted",
    )


async def checked(plane):
    report = (await plane.admin("GET", "/check", quiescent=True)).json()
    assert report["ok"], report


async def test_what_the_journal_has_is_billed_and_the_rest_is_free(plane):
    await dying_gateway(plane, "req_served", "req_queued")
    await deliver(plane, last_word(1, "req_served", 7))
    served = await settled(plane, "req_served")
    queued = await settled(plane, "req_queued")
    assert (served["cause"], served["settled_by"]) == ("lost", "sweeper")
    assert served["metered_output_tokens"] == 7
    assert served["billed_micro"] > 0
    assert (queued["cause"], queued["billed_micro"]) == ("not_started", 0)
    await checked(plane)
    text = plane.services.metrics.exposition().decode()
    assert 'headworks_control_plane_swept_requests_total{cause="lost"} 1.0' in text


async def test_a_journal_that_comes_after_the_sweep_is_billed_too(plane):
    await dying_gateway(plane, "req_late")
    assert (await settled(plane, "req_late"))["cause"] == "not_started"
    await deliver(plane, last_word(1, "req_late", 9))
    row = await usage_of(plane, "req_late")
    assert (row["cause"], row["metered_output_tokens"]) == ("lost", 9)
    assert row["billed_micro"] > 0
    await checked(plane)


async def test_the_gateways_own_word_overrules_the_sweepers(plane):
    tenant = await dying_gateway(plane, "req_back")
    await settled(plane, "req_back")
    seen = an_attempt(Usage(prompt_tokens=10, output_tokens=3))
    await plane.services.ledger.settle(
        a_settle("req_back", tenant_id=tenant, attempts=(seen,), delivered_tokens=3)
    )
    await deliver(plane, last_word(1, "req_back", 3))
    row = await usage_of(plane, "req_back")
    assert (row["cause"], row["settled_by"]) == ("complete", "gateway")
    await checked(plane)


async def test_a_living_gateways_requests_are_left_alone(plane):
    gateway = f"gw_{secrets.token_hex(12)}"
    tenant = await a_tenant(plane.services.postgres)
    await plane.services.ledger.reserve(
        a_reserve("req_alive", tenant_id=tenant, gateway_id=gateway, amount_micro=1_000)
    )
    for _ in range(30):
        async with plane.services.postgres.transaction() as conn:
            await assert_lease(conn, gateway, "local", 60_000)
        await asyncio.sleep(0.05)
    assert (await usage_of(plane, "req_alive"))["state"] == "open"
