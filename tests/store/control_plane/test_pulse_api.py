"""Pictures of the last minutes, through the admin API."""

import asyncio
import secrets
import time

import pytest

from core.money import EndCause
from store.rollups import freshness, roll_up
from tests.support.control_plane import assert_refused
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def ended(plane, tenant, model, causes):
    """Requests that began a minute ago and ended now, summed."""
    now_ms = time.time_ns() // 1_000_000
    for cause in causes:
        request_id = f"req_local_{now_ms - 60_000:012x}{secrets.token_hex(8)}"
        asked = a_reserve(request_id, tenant_id=tenant, model=model, created_ms=now_ms - 60_000)
        await plane.services.ledger.reserve(asked)
        await plane.services.ledger.settle(
            a_settle(request_id, tenant_id=tenant, cause=cause, ended_ms=now_ms - 1_000)
        )
    async with plane.services.postgres.connection() as conn:
        while (await freshness(conn, tenant)).entries_behind:
            await roll_up(plane.services.postgres)


async def test_what_ended_is_in_the_picture_by_how_it_ended(plane):
    model = f"m-{secrets.token_hex(4)}"
    tenant, other = [await a_tenant(plane.services.postgres) for _ in range(2)]
    await ended(plane, tenant, model, [EndCause.COMPLETE, EndCause.LENGTH, EndCause.FAILED])
    await ended(plane, other, model, [EndCause.FILTERED, EndCause.CLIENT_CANCELLED])
    await ended(plane, other, f"{model}-other", [EndCause.COMPLETE])
    answer = await plane.admin("GET", "/pulse", model=model)
    assert answer.status_code == 200, answer.text
    picture = answer.json()
    points = picture["points"]
    assert all((p["at_ms"] - picture["from_ms"]) % picture["step_ms"] == 0 for p in points)
    told = {n: sum(p[n] for p in points) for n in ("requests", "good", "failed", "filtered")}
    assert told == {"requests": 5, "good": 2, "failed": 1, "filtered": 1}
    assert points[-1]["ttft_ms_p95"] == 20.0
    assert points[-1]["output_tokens"] > 0


async def test_many_watchers_take_one_picture(plane):
    model = f"m-{secrets.token_hex(4)}"
    answers = await asyncio.gather(
        *(plane.admin("GET", "/pulse", minutes=60, model=model) for _ in range(8))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["as_of_ms"] for answer in answers}) == 1


async def test_only_some_periods_have_pictures(plane):
    assert_refused(await plane.admin("GET", "/pulse", minutes=7), 422, "unprocessable", "minutes")
