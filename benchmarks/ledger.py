"""How many reserve+settle pairs one hot tenant gets through the group commit, as JSON.

    python -m benchmarks.ledger DATABASE_URL [--concurrency 128] [--seconds 5] [--tenants 1]

The database is migrated and then filled: give it one of its own. Each of `concurrency` callers
reserves, then settles, and starts again; a pair's time is what its caller waited in all.
"""

import argparse
import asyncio
import json
import secrets
import sys
import time
from importlib.metadata import version

import uvloop

from core.metering import AttemptTotals, RequestTimings, Reserve, Settle
from core.money import EndCause, Price
from core.protocol import Usage
from store import migrate
from store.accounts import open_account
from store.ledger import Ledger
from store.ledger_audit import audit
from store.postgres import Postgres, PostgresConfig
from store.prices import ListedPrice, seed_prices

PRICE = Price(
    id="price_bench", input_micro=1_000_000, cached_input_micro=100_000, output_micro=2_000_000
)
WARMUP_S = 1.0


async def prepare(pg: Postgres, tenants: int) -> list[str]:
    names = [f"ten_{secrets.token_hex(12)}" for _ in range(tenants)]
    async with pg.transaction() as conn:
        await seed_prices(conn, [ListedPrice(model="bench", effective_ms=0, price=PRICE)])
        for name in names:
            await conn.execute(
                "INSERT INTO tenants (id, name, salt, version) VALUES (%s, %s, %s, 0)",
                (name, name, secrets.token_bytes(16)),
            )
            await open_account(conn, name, 10**15)
    return names


def a_reserve(tenant: str) -> Reserve:
    return Reserve(
        request_id=f"req_local_{secrets.token_hex(12)}",
        gateway_id="gw_bench",
        tenant_id=tenant,
        key_id="key_bench",
        amount_micro=600,
        price_id=PRICE.id,
        model="bench",
        version="v1",
        region="local",
        service_class="standard",
        dialect="openai",
        endpoint="/v1/chat/completions",
        stream=True,
        prompt_tokens=200,
        max_tokens=200,
        created_ms=time.time_ns() // 1_000_000,
    )


def a_settle(request_id: str, tenant: str) -> Settle:
    usage = Usage(prompt_tokens=200, cached_tokens=150, output_tokens=128)
    return Settle(
        request_id=request_id,
        tenant_id=tenant,
        cause=EndCause.COMPLETE,
        attempts=(AttemptTotals(attempt=1, replica_id="rep_bench", usage=usage),),
        delivered_tokens=128,
        timings=RequestTimings(queue_ms=1.0, first_token_ms=20.0, total_ms=400.0),
        ended_ms=time.time_ns() // 1_000_000,
    )


async def caller(ledger: Ledger, tenant: str, until: float, waits_ms: list[float]) -> None:
    while (start := time.monotonic()) < until:
        asked = a_reserve(tenant)
        await ledger.reserve(asked)
        await ledger.settle(a_settle(asked.request_id, tenant))
        waits_ms.append((time.monotonic() - start) * 1000)


async def drive(
    ledger: Ledger, tenants: list[str], concurrency: int, seconds: float
) -> list[float]:
    waits_ms: list[float] = []
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as callers:
        for n in range(concurrency):
            callers.create_task(caller(ledger, tenants[n % len(tenants)], until, waits_ms))
    return sorted(waits_ms)


async def measure(url: str, concurrency: int, seconds: float, tenants: int) -> dict[str, object]:
    pg = await Postgres.open(PostgresConfig(database_url=url, application_name="bench"))
    names = await prepare(pg, tenants)
    ledger = await Ledger.open(url)
    await drive(ledger, names, concurrency, WARMUP_S)
    cpu = time.process_time()
    waits_ms = await drive(ledger, names, concurrency, seconds)
    cpu = time.process_time() - cpu
    await ledger.close()
    async with pg.connection() as conn:
        violations = len((await audit(conn)).violations)
        row = await (await conn.execute("SHOW server_version")).fetchone()
    await pg.close()
    assert row is not None
    return {
        "pairs_per_s": round(len(waits_ms) / seconds),
        "pair_ms_p50": round(waits_ms[len(waits_ms) // 2], 2),
        "pair_ms_p99": round(waits_ms[len(waits_ms) * 99 // 100], 2),
        "client_cpu_us_per_pair": round(cpu / len(waits_ms) * 1e6, 1),
        "concurrency": concurrency,
        "tenants": tenants,
        "seconds": seconds,
        "audit_violations": violations,
        "postgres": row[0],
        "psycopg": version("psycopg"),
        "python": sys.version.split()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database_url")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tenants", type=int, default=1)
    given = parser.parse_args()
    migrate.upgrade(given.database_url)
    work = measure(given.database_url, given.concurrency, given.seconds, given.tenants)
    print(json.dumps(uvloop.run(work)))


if __name__ == "__main__":
    main()
