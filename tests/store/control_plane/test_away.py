"""Postgres or Valkey away: what still works, what says so, and that it all comes back."""

import asyncio
import time

import pytest

from store.migrate import upgrade
from tests.support.control_plane import assert_refused, running, the_settings
from tests.support.registry import a_beat
from tests.support.services import free_port

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def ready(plane):
    answer = await plane.client.get("/health/ready")
    return answer.status_code, answer.json()


async def becomes_ready(plane):
    async with asyncio.timeout(30):
        while (await ready(plane))[0] != 200:  # noqa: ASYNC110 - bounded
            await asyncio.sleep(0.05)


async def test_without_valkey_changes_are_made_and_the_loss_is_told(postgres_url):
    settings = the_settings(postgres_url, f"redis://127.0.0.1:{free_port()}")
    async with running(settings) as plane:
        tenant = await plane.made("/tenants", {"name": "no valkey"})
        key = await plane.made(f"/tenants/{tenant['id']}/keys", {"name": "k"})
        began = time.monotonic()
        assert (await plane.admin("DELETE", f"/keys/{key['id']}")).status_code == 200
        assert time.monotonic() - began < 3
        status, state = await ready(plane)
        assert (status, state["ready"], state["degraded"]) == (200, True, True)
        assert state["valkey"] != "ok"
        report = (await plane.admin("GET", "/check")).json()
        off = {item["name"]: item["detail"] for item in report["items"] if not item["ok"]}
        assert set(off) == {"tickets", "dispatcher_accounts"}
        assert off["tickets"].startswith("could not be checked: Valkey: ")
        text = plane.services.metrics.exposition().decode()
        assert 'version_pushes_total{outcome="failed"}' in text


async def test_without_postgres_everything_is_refused_and_then_comes_back(own_postgres, valkey_url):
    url = own_postgres.create_database("away")
    await asyncio.to_thread(upgrade, url)
    async with running(the_settings(url, valkey_url)) as plane:
        await becomes_ready(plane)
        tenant = await plane.made("/tenants", {"name": "before"})
        await asyncio.to_thread(own_postgres.running.kill)

        began = time.monotonic()
        status, state = await ready(plane)
        assert (status, state["ready"]) == (503, False)
        assert state["postgres"] != "ok"
        assert (await plane.client.get("/health/live")).status_code == 200
        answers = await asyncio.gather(
            plane.admin("GET", "/tenants"),
            plane.admin("POST", "/tenants", {"name": "during"}),
            plane.says("/beat", a_beat()),
        )
        for answer in answers:
            assert_refused(answer, 503, "service_unavailable")
        report = (await plane.admin("GET", "/check")).json()
        off = {item["name"] for item in report["items"] if not item["ok"]}
        assert {"reservations", "entries", "kv_blocks"} <= off
        assert time.monotonic() - began < 30

        await asyncio.to_thread(own_postgres.running.start)
        await becomes_ready(plane)
        assert (await plane.admin("GET", f"/tenants/{tenant['id']}")).json() == tenant
        assert (await plane.admin("GET", "/check", quiescent=True)).json()["ok"]


async def test_a_database_nobody_has_migrated_is_a_reason_not_to_be_ready(
    empty_postgres_url, valkey_url, caplog
):
    caplog.set_level("CRITICAL")
    async with running(the_settings(empty_postgres_url, valkey_url)) as plane:
        status, state = await ready(plane)
        assert status == 503
        assert "change_clock" in state["postgres"]
