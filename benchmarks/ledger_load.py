"""What drives the ledger in `benchmarks.ledger`: callers, and the two ways to say a command.

A caller reserves, settles, and starts again. Grouped, its commands go through one `Ledger` as
in a gateway. One statement each, they take a connection from a pool, and are a statement and a
transaction of their own on it: the same SQL functions, and nobody waits for anyone's batch.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from core.metering import (
    AttemptTotals,
    LedgerRefused,
    RequestTimings,
    Reserve,
    Reserved,
    Settle,
    Settled,
)
from core.money import EndCause, Price
from core.protocol import Usage
from store.group_commit import GroupCommitConfig
from store.ledger import Ledger
from store.postgres import PostgresConfig

POOL = 16
PRICE = Price(
    id="price_bench", input_micro=1_000_000, cached_input_micro=100_000, output_micro=2_000_000
)

_numbers = itertools.count()


class Way(Protocol):
    """How commands reach Postgres."""

    async def reserve(self, asked: Reserve) -> Reserved | LedgerRefused:
        """As `Ledger.reserve`."""

    async def settle(self, word: Settle) -> Settled:
        """As `Ledger.settle`."""


class Pair(msgspec.Struct, frozen=True):
    """One request: when it was done, and how long its caller waited for each answer."""

    tenant: str
    done_s: float  # from the start of the run
    reserve_ms: float
    settle_ms: float


class OneStatementEach:
    """A pool of connections, first come, first served. A lane of one command at a time is one."""

    def __init__(self, connections: Sequence[Ledger]) -> None:
        self._free = list(connections)
        self._turn = asyncio.Semaphore(len(connections))

    async def reserve(self, asked: Reserve) -> Reserved | LedgerRefused:
        async with self._connection() as connection:
            return await connection.reserve(asked)

    async def settle(self, word: Settle) -> Settled:
        async with self._connection() as connection:
            return await connection.settle(word)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Ledger]:
        async with self._turn:
            connection = self._free.pop()
            try:
                yield connection
            finally:
                self._free.append(connection)


@asynccontextmanager
async def grouped(url: str) -> AsyncIterator[Way]:
    ledger = await Ledger.open(url)
    yield ledger
    await ledger.close()


@asynccontextmanager
async def one_each(url: str) -> AsyncIterator[Way]:
    postgres = PostgresConfig(database_url=url, application_name="one statement each")
    # Its connections queue for a busy account, as any pool's would: no siding.
    config = GroupCommitConfig(
        postgres=postgres, batch_max=1, lock_timeout_ms=4_000, try_timeout_s=5.0
    )
    connections = [Ledger(config, lanes=1) for _ in range(POOL)]
    yield OneStatementEach(connections)
    for connection in connections:
        await connection.close()


WAYS = {"grouped": grouped, "one_each": one_each}


async def drive(way: Way, tenants: Sequence[str], concurrency: int, seconds: float) -> list[Pair]:
    """So many callers at once, each with its share of the tenants, or one that it shares."""
    pairs: list[Pair] = []
    start = time.monotonic()
    async with asyncio.TaskGroup() as callers:
        for n in range(concurrency):
            mine = itertools.cycle(tenants[n % len(tenants) :: concurrency])
            callers.create_task(_caller(way, mine, start, seconds, pairs))
    return pairs


async def _caller(
    way: Way, tenants: Iterator[str], start: float, seconds: float, pairs: list[Pair]
) -> None:
    clock = time.monotonic
    while (asked_at := clock()) - start < seconds:
        tenant = next(tenants)
        asked = a_reserve(tenant)
        held = await way.reserve(asked)
        assert isinstance(held, Reserved)
        held_at = clock()
        await way.settle(a_settle(asked.request_id, tenant))
        done = clock()
        pairs.append(Pair(tenant, done - start, (held_at - asked_at) * 1e3, (done - held_at) * 1e3))


def a_reserve(tenant: str) -> Reserve:
    now_ms = time.time_ns() // 1_000_000
    return Reserve(
        request_id=f"req_local_{now_ms:012x}{next(_numbers):016x}",
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
        created_ms=now_ms,
    )


_ATTEMPTS = (
    AttemptTotals(
        attempt=1,
        replica_id="rep_bench",
        usage=Usage(prompt_tokens=200, cached_tokens=150, output_tokens=128),
    ),
)
_TIMINGS = RequestTimings(queue_ms=1.0, first_token_ms=20.0, total_ms=400.0)


def a_settle(request_id: str, tenant: str) -> Settle:
    return Settle(
        request_id=request_id,
        tenant_id=tenant,
        cause=EndCause.COMPLETE,
        attempts=_ATTEMPTS,
        delivered_tokens=128,
        timings=_TIMINGS,
        ended_ms=time.time_ns() // 1_000_000,
    )
