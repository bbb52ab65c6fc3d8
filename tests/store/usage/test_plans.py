"""How Postgres answers questions about usage: by index and in the partitions that matter."""

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from benchmarks.usage_fill import fill_month, tenant_name
from store.queries import load
from store.usage import EVER_MS, Place, UsageFilter, usage_page

pytestmark = pytest.mark.services

MONTHS = (202609, 202610, 202611)
ROWS = 4_000  # a month: more than Postgres would care to read as a whole
NOVEMBER_MS = 1_793_491_200_000


@pytest.fixture(scope="module")
def filled_url(postgres_url: str) -> str:
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("SELECT setseed(0.5)")
        for month in MONTHS:
            fill_month(conn, month, rows=ROWS, tenants=100)
        conn.execute("ANALYZE")
    return postgres_url


@pytest.fixture
def conn(filled_url: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    with psycopg.connect(filled_url) as conn:
        conn.execute(load("usage")["plan_for_each"])
        yield conn


def plan(conn: psycopg.Connection[tuple[Any, ...]], file: str, name: str, **values: Any) -> str:
    """As it is carried out."""
    explain = b"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, BUFFERS OFF, SUMMARY OFF) "
    return "\n".join(line for (line,) in conn.execute(explain + load(file)[name], values))


def carried_out(plan: str) -> list[str]:
    return [line for line in plan.splitlines() if "never executed" not in line]


def assert_by_index(plan: str) -> None:
    """Nothing that holds rows is read as a whole."""
    filled = ("usage_hourly", "usage_daily", *(f"usage_y2026m{month % 100:02}" for month in MONTHS))
    scans = [line for line in carried_out(plan) if "Seq Scan on" in line]
    assert not any(table in line for line in scans for table in filled), plan


def partitions_read(plan: str) -> set[str]:
    """Those of requests that hold any."""
    return set(re.findall(r" on (usage_y2026m(?:09|10|11))", "\n".join(carried_out(plan))))


def a_search(**changes: Any) -> dict[str, Any]:
    nothing = {"tenant_id": "", "key_id": "", "model": "", "version": "", "cause": ""}
    return {
        **nothing,
        "from_ms": 0,
        "before_ms": EVER_MS,
        "before_id": "",
        "limit": 100,
        **changes,
    }


def test_one_request_is_looked_up_in_the_month_of_its_id(conn):
    (request_id,) = conn.execute("SELECT max(request_id) FROM usage_y2026m10").fetchone()
    seen = plan(conn, "usage", "usage_of", request_id=request_id)
    assert_by_index(seen)
    assert "Subplans Removed" in seen or "usage_y2026m09" not in seen
    assert partitions_read(seen) == {"usage_y2026m10"}


def test_a_page_of_a_tenants_is_read_off_its_index_and_no_further(conn):
    seen = plan(conn, "usage", "usage_page_of_tenant", **a_search(tenant_id=tenant_name(1)))
    assert_by_index(seen)
    # From the newest month a page and from the others the first row each, for the merge.
    read = {
        name: float(rows)
        for name, rows in re.findall(
            r"on (usage_y\w+) .*?actual rows=([\d.]+)", seen.replace("\n", " ")
        )
    }
    assert sum(rows for name, rows in read.items() if name != "usage_y2026m11") <= 2
    assert "Sort Method: top-N" not in seen


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"key_id": "key_3_1"},
        {"key_id": "key_90_1"},
        {"model": "model_2"},
        {"version": "v1_of_model_1"},
        {"cause": "expired"},
        {"tenant_id": tenant_name(2), "cause": "failed"},
        {"version": "v0_of_model_1", "before_ms": NOVEMBER_MS + 25 * 86_400_000},
        {"version": "v0_of_model_1", "before_ms": NOVEMBER_MS - 50 * 86_400_000},
    ],
    ids=str,
)
def test_other_filters_are_answered_through_the_sums(conn, shown):
    search = a_search(**shown, by_time=not shown)
    first = plan(conn, "usage", "hours_to_search", **search)
    assert_by_index(first)
    # What is given up, or not there yet, is not looked for in all of time.
    assert not any(int(n) > 200 for n in re.findall(r"Rows Removed by Filter: (\d+)", first)), first
    hours, _ = conn.execute(load("usage")["hours_to_search"], search).fetchone()
    found = search | {"hours": hours, "open_from_ms": 0}
    second = plan(conn, "usage", "usage_page_found", **found)
    assert_by_index(second)
    if hours and min(hours) >= NOVEMBER_MS:
        assert partitions_read(second) == {"usage_y2026m11"}


@pytest.mark.parametrize("tenant_id", ["", tenant_name(5)])
def test_totals_read_the_sums_of_their_period_alone(conn, tenant_id):
    values = {
        **a_search(tenant_id=tenant_id),
        "span_ms": 3_600_000,
        "by_time": tenant_id == "",
        "from_ms": NOVEMBER_MS,
        "to_ms": NOVEMBER_MS + 86_400_000,
        "bucket": "span",
        "bounds_ms": [],
        **{
            f"by_{name}": name == "model"
            for name in ("tenant", "key", "model", "version", "cause", "class")
        },
        "after_ms": -1,
        **{f"after_{name}": "" for name in ("tenant", "key", "model", "version", "cause", "class")},
    }
    seen = plan(conn, "usage_totals", "usage_totals", **values)
    assert_by_index(seen)
    assert partitions_read(seen) == set()
    assert "usage_daily" not in seen


@pytest.mark.anyio
@pytest.mark.parametrize(
    "shown",
    [
        UsageFilter(),
        UsageFilter(tenant_id=tenant_name(1)),
        UsageFilter(key_id="key_2_1"),
        UsageFilter(model="model_3", cause="complete"),
        UsageFilter(version="v0_of_model_1", tenant_id=tenant_name(1)),
        UsageFilter(cause="length", from_ms=NOVEMBER_MS),
    ],
    ids=str,
)
async def test_pages_are_newest_first_and_miss_nothing(pg, filled_url, shown):
    seen, place = [], Place(NOVEMBER_MS + 2 * 86_400_000)
    begin_ms = NOVEMBER_MS - 86_400_000 if not shown.from_ms else shown.from_ms
    shown = UsageFilter(
        **{**{f: getattr(shown, f) for f in shown.__struct_fields__}, "from_ms": begin_ms}
    )
    async with pg.connection() as conn:
        while place is not None:
            page = await usage_page(conn, shown, place, limit=70)
            seen += [(row.created_ms, row.request_id) for row in page.rows]
            place = page.older
        filters = {
            f: v
            for f in ("tenant_id", "key_id", "model", "version", "cause")
            if (v := getattr(shown, f))
        }
        where = " AND ".join([f"{name} = %({name})s" for name in filters] + ["true"])
        cursor = await conn.execute(
            f"SELECT created_ms, request_id FROM usage WHERE {where}"
            " AND created_ms >= %(from_ms)s AND created_ms < %(to_ms)s"
            " ORDER BY created_ms DESC, request_id DESC",
            {**filters, "from_ms": begin_ms, "to_ms": NOVEMBER_MS + 2 * 86_400_000},
        )
        assert seen == await cursor.fetchall()
        assert seen
