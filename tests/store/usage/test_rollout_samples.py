"""What is measured of a rollout's sides: which requests, in which buckets, at what cost."""

import math
import re
from datetime import UTC, datetime

import pytest

from control_plane.rollout_samples import assemble, compare
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.samples import Window, bucket, unsound
from store import rollouts
from store.ledger import Ledger
from store.queries import load
from store.rollouts import Measured
from tests.support.ledger_commands import a_reserve
from tests.support.ledger_database import a_tenant
from tests.support.rollout_rows import add_requests

pytestmark = [pytest.mark.services, pytest.mark.anyio]

# A window over the end of a year: two partitions, had they been made.
FROM_MS = int(datetime(2026, 12, 31, 23, 59, 30, tzinfo=UTC).timestamp() * 1000)
TO_MS = FROM_MS + 60_000
PLAN = Plan(model="smol", stable="old", canary="new", stable_version="v1", canary_version="v2")


def measured(**changes):
    fields = {
        "model": "smol",
        "tenant": "",
        "region": "local",
        "versions": ("v2", "v1"),
        "from_ms": FROM_MS,
        "to_ms": TO_MS,
    }
    return Measured(**(fields | changes))


async def sampled(pg, **changes):
    asked = measured(**changes)
    async with pg.connection() as conn:
        counted = await rollouts.sample(conn, asked)
        still_open = await rollouts.still_open(conn, asked)
    window = Window(from_ms=asked.from_ms, to_ms=asked.to_ms)
    sample = assemble(PLAN, window, counted, still_open)
    assert unsound(sample) is None
    return sample


@pytest.fixture
async def pg(fresh_postgres_url):
    from store.postgres import Postgres, PostgresConfig  # noqa: PLC0415 - shadows the fixture's

    pg = await Postgres.open(
        PostgresConfig(database_url=fresh_postgres_url, application_name="test")
    )
    yield pg
    await pg.close()


async def test_sides_are_told_apart_by_version_and_requests_by_how_they_ended(pg):
    async with pg.transaction() as conn:
        await add_requests(conn, 3, at_ms=FROM_MS)
        await add_requests(conn, 2, at_ms=TO_MS - 1, version="v2", output=64, first_token=200.0)
        failed = {"cause": "failed", "first_token": None, "inter_token": None, "output": 1}
        await add_requests(conn, 1, at_ms=FROM_MS + 31_000, version="v2", **failed)
        await add_requests(conn, 1, at_ms=FROM_MS, cause="length", prompt=5000)
        # None of these is meant.
        await add_requests(conn, 9, at_ms=FROM_MS - 1)
        await add_requests(conn, 9, at_ms=TO_MS)
        await add_requests(conn, 9, at_ms=FROM_MS, model="other")
        await add_requests(conn, 9, at_ms=FROM_MS, version="v3")
        await add_requests(conn, 9, at_ms=FROM_MS, region="elsewhere")
    sample = await sampled(pg)
    assert (sample.canary.requests, sample.stable.requests) == (3, 4)
    (canary,) = sample.canary.strata
    assert canary.name == "standard/4"
    assert canary.causes == {"complete": 2, "failed": 1}
    assert canary.first_token == ((bucket(200), 2),)
    assert canary.output_tokens == ((bucket(64), 2),)
    assert canary.tokens == ((bucket(164), 2),)
    assert canary.cost == ((bucket(140), 2),)
    assert canary.refused is None
    assert {s.name: s.causes for s in sample.stable.strata} == {
        "standard/4": {"complete": 3},
        "standard/7": {"length": 1},
    }
    read = compare(PLAN, sample)
    assert (read.canary.version, read.canary.requests) == ("v2", 3)
    assert read.canary.error_rate == pytest.approx(1 / 3)
    assert read.canary.first_token_ms.p95 == pytest.approx(200, rel=0.05)
    assert read.stable.causes == {"complete": 3, "length": 1}
    assert read.stable.tokens.mean == pytest.approx((3 * 120 + 5020) / 4, rel=0.05)


async def test_a_tenants_own_table_is_judged_by_its_own_requests(pg):
    async with pg.transaction() as conn:
        await add_requests(conn, 3, at_ms=FROM_MS, tenant="ten_a")
        await add_requests(conn, 2, at_ms=FROM_MS, tenant="ten_b")
    assert (await sampled(pg, tenant="ten_a")).stable.requests == 3
    assert (await sampled(pg)).stable.requests == 5


async def test_open_requests_and_the_demand_are_counted(pg, fresh_postgres_url):
    tenant = await a_tenant(pg)
    ledger = await Ledger.open(fresh_postgres_url)
    for at, version in enumerate(("v2", "v2", "v1")):
        name = f"req_local_{FROM_MS:012x}{at:016x}"
        asked = a_reserve(name, tenant_id=tenant, version=version, created_ms=FROM_MS)
        await ledger.reserve(asked)
    await ledger.close()
    async with pg.transaction() as conn:
        await add_requests(conn, 57, at_ms=FROM_MS)
    sample = await sampled(pg)
    assert (sample.canary.open, sample.stable.open) == (2, 1)
    row = rollouts.RolloutRow(
        name="r", tenant="", model="smol", region="local", stable="old", canary="new",
        stable_version="v1", canary_version="v2", asked={}, body={}, wanted=[], state="",
        ended=False, closed=False, created_by="",
    )  # fmt: skip
    async with pg.connection() as conn:
        assert await rollouts.demand(conn, row, FROM_MS + 30_000) == 1.0
        assert await rollouts.demand(conn, row, FROM_MS + 60_001) == 0.0


async def test_buckets_are_those_of_the_machine(pg):
    values = [-1.0, 0.0, 0.5, 1.0, 1.0001, 1e300, math.inf, math.nan]
    values += [float(2**power) for power in range(40)] + [float(n) for n in range(2, 400)]
    values += [2 ** (k / 16) * off for k in range(1, 200, 7) for off in (0.999, 1.001)]
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT rollout_bucket(v) FROM unnest(%s::double precision[]) WITH ORDINALITY"
            " AS t (v, n) ORDER BY n",
            (values,),
        )
        assert [found for (found,) in await cursor.fetchall()] == [bucket(v) for v in values]
        cursor = await conn.execute("SELECT rollout_bucket(NULL)")
        assert await cursor.fetchone() == (None,)


async def test_a_window_reads_its_own_rows_and_not_the_month(pg):
    async with pg.transaction() as conn:
        await conn.execute("SELECT ledger_make_partitions('2026-12-01', 2)")
        for step in range(200):
            await add_requests(conn, 20, at_ms=FROM_MS - 600_000 * step)
    async with pg.transaction() as conn:
        await conn.execute("ANALYZE usage")
        for name in ("sample", "demand"):
            explain = b"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, BUFFERS OFF, SUMMARY OFF) "
            cursor = await conn.execute(
                explain + load("rollouts")[name], rollouts._window(measured())
            )
            seen = "\n".join(line for (line,) in await cursor.fetchall())
            assert "Seq Scan on usage_y2026m12" not in seen, seen
            assert "usage_y2026m11" not in seen, seen
            read = [int(rows) for rows in re.findall(r"on usage_y\S+ .*?rows=(\d+)", seen)]
            assert sum(read) <= 60, seen
