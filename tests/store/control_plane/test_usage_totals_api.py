"""Totals of usage, and requests by any filter, through the admin API."""

import base64
import secrets

import pytest

from core.money import EndCause
from store.rollups import freshness, roll_up
from tests.support.control_plane import assert_refused
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
MARCH_MS = 1_772_323_200_000  # the 1st in 2026
ENDS = [
    # hours into March, key, model, cause
    (0, "a", "smol", EndCause.COMPLETE),
    (1, "a", "large", EndCause.COMPLETE),
    (1, "b", "smol", EndCause.FAILED),
    (25, "b", "smol", EndCause.COMPLETE),
    (31 * 24, "a", "smol", EndCause.LENGTH),  # in April
]
PERIOD = {"from_ms": MARCH_MS, "to_ms": MARCH_MS + 60 * DAY_MS}


@pytest.fixture
async def tenant(plane):
    tenant = await a_tenant(plane.services.postgres)
    for hours, key, model, cause in ENDS:
        request_id = f"req_{secrets.token_hex(8)}"
        asked = a_reserve(
            request_id,
            tenant_id=tenant,
            key_id=f"{tenant}_{key}",
            model=f"{tenant}_{model}",
            created_ms=MARCH_MS + hours * HOUR_MS + 5,
        )
        await plane.services.ledger.reserve(asked)
        await plane.services.ledger.settle(a_settle(request_id, tenant_id=tenant, cause=cause))
    async with plane.services.postgres.connection() as conn:
        # The plane's own job may be at it.
        while (await freshness(conn, tenant)).entries_behind:
            await roll_up(plane.services.postgres)
    return tenant


async def totals(plane, **query):
    answer = await plane.admin("GET", "/usage/totals", **query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_period_has_one_total_with_its_means_and_its_freshness(plane, tenant):
    answer = await totals(plane, tenant_id=tenant, **PERIOD)
    (total,) = answer["totals"]
    assert (total["requests"], total["billed_micro"], total["output_tokens"]) == (5, 200, 100)
    assert (total["first_token_ms_mean"], total["inter_token_ms_mean"]) == (20.0, None)
    assert (total["bucket_ms"], total["tenant_id"], total["key_id"]) == (0, "", "")
    assert (answer["entries_behind"], answer["after"]) == (0, None)
    assert answer["fresh_as_of_ms"] > PERIOD["to_ms"]
    assert {name: answer[name] for name in PERIOD} == PERIOD


async def test_time_is_told_apart_by_hour_day_or_month(plane, tenant):
    expected = {
        "month": [(0, 4), (31 * 24, 1)],
        "day": [(0, 3), (24, 1), (31 * 24, 1)],
        "hour": [(0, 1), (1, 2), (25, 1), (31 * 24, 1)],
    }
    for by, told in expected.items():
        found = (await totals(plane, tenant_id=tenant, by=by, **PERIOD))["totals"]
        assert [((t["bucket_ms"] - MARCH_MS) // HOUR_MS, t["requests"]) for t in found] == told
    part = {"from_ms": MARCH_MS + HOUR_MS, "to_ms": MARCH_MS + 25 * HOUR_MS}
    found = (await totals(plane, tenant_id=tenant, by="day", **part))["totals"]
    assert [(t["bucket_ms"], t["requests"]) for t in found] == [(MARCH_MS, 2)]


async def test_totals_are_told_apart_by_any_dimensions_and_filtered_by_any(plane, tenant):
    async def told(by, **query):
        found = (await totals(plane, by=by, **{"tenant_id": tenant, **PERIOD, **query}))["totals"]
        fields = {"tenant": "tenant_id", "key": "key_id", "class": "service_class"}
        return [
            (
                *(t[fields.get(d, d)].removeprefix(f"{tenant}_") for d in by.split(",")),
                t["requests"],
            )
            for t in found
        ]

    assert await told("key,model") == [("a", "large", 1), ("a", "smol", 2), ("b", "smol", 2)]
    assert await told("cause") == [("complete", 3), ("failed", 1), ("length", 1)]
    assert await told("cause", key_id=f"{tenant}_b") == [("complete", 1), ("failed", 1)]
    assert await told("class,version", model=f"{tenant}_large") == [("standard", "v1", 1)]
    assert await told("tenant", tenant_id="", model=f"{tenant}_smol", version="v1") == [(tenant, 4)]
    assert await told("key", cause="length") == [("a", 1)]
    assert await told("key", cause="lost") == []


async def test_totals_come_in_pages(plane, tenant):
    query = {"tenant_id": tenant, "by": "hour,key,model,cause", **PERIOD}
    whole = (await totals(plane, **query))["totals"]
    seen, after = [], ""
    while after is not None:
        page = await totals(plane, limit=2, after=after, **query)
        assert len(page["totals"]) <= 2
        seen += page["totals"]
        after = page["after"]
    assert seen == whole
    assert len(whole) == 5


async def test_requests_are_found_by_any_filter(plane, tenant):
    async def count(**query):
        answer = await plane.admin("GET", "/usage", **query)
        assert answer.status_code == 200, answer.text
        return len(answer.json()["usage"])

    assert await count(key_id=f"{tenant}_a") == 3
    assert await count(key_id=f"{tenant}_a", cause="length") == 1
    assert await count(model=f"{tenant}_smol") == 4
    assert await count(tenant_id=tenant, version="v1") == 5
    assert await count(tenant_id=tenant, version="v2") == 0
    assert await count(tenant_id=tenant, from_ms=MARCH_MS + HOUR_MS) == 4
    assert await count(tenant_id=tenant, to_ms=MARCH_MS + HOUR_MS + 5) == 1
    one = (await plane.admin("GET", "/usage", tenant_id=tenant, limit=1)).json()
    assert one["usage"][0]["cause"] == "length"
    request_id = one["usage"][0]["request_id"]
    assert await count(request_id=request_id, key_id=f"{tenant}_a", cause="length") == 1
    for other in ({"key_id": f"{tenant}_b"}, {"cause": "lost"}, {"to_ms": MARCH_MS}):
        assert await count(request_id=request_id, **other) == 0


async def test_what_makes_no_sense_is_refused_by_its_name(plane):
    no_key = base64.urlsafe_b64encode(b'{"bucket_ms": "x"}').decode()
    for name, value in (
        ("by", "week"),
        ("by", "hour,day"),
        ("from_ms", MARCH_MS + 1),
        ("from_ms", MARCH_MS + 61 * DAY_MS),
        ("after", "x"),
        ("after", "é"),
        ("after", no_key),
        ("limit", 0),
        ("to_ms", -1),
    ):
        answer = await plane.admin("GET", "/usage/totals", **{**PERIOD, name: value})
        assert_refused(answer, 422, "unprocessable", name)
    # Without a period it is this month up to now.
    answer = await totals(plane)
    assert 0 < answer["to_ms"] - answer["from_ms"] <= 31 * DAY_MS
    assert answer["from_ms"] % DAY_MS == answer["to_ms"] % DAY_MS == 0


async def test_an_operator_in_doubt_has_totals_taken_anew(plane, tenant):
    async with plane.services.postgres.transaction() as conn:
        await conn.execute(
            "UPDATE usage_sums SET requests = requests + 1 WHERE tenant_id = %s", (tenant,)
        )
    assert (await totals(plane, tenant_id=tenant, **PERIOD))["totals"][0]["requests"] > 5
    answer = await plane.admin("POST", "/usage/totals/rebuild", {"tenant_id": tenant})
    assert (answer.status_code, answer.json()) == (200, {"tenant_id": tenant, "entry": 10})
    assert (await totals(plane, tenant_id=tenant, **PERIOD))["totals"][0]["requests"] == 5
    refused = await plane.admin("POST", "/usage/totals/rebuild", {"tenant_id": "ten_0"})
    assert_refused(refused, 404, "not_found")
    refused = await plane.admin("POST", "/usage/totals/rebuild", {"tenant_id": tenant, "x": 1})
    assert_refused(refused, 422, "unprocessable", "x")
