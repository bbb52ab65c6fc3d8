"""A ledger under load while something goes wrong, and what must be true of it afterwards."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from core.metering import Reserved
from core.money import EndCause
from store.ledger import Ledger, LedgerAwayError
from store.ledger_audit import audit
from store.postgres import Postgres
from tests.support.ledger_commands import a_reserve, a_settle

Answer = TypeVar("Answer")

STREAMS = 20


async def until_answered(
    ask: Callable[[], Awaitable[Answer]], *, within_s: float = 10.0
) -> tuple[Answer, int]:
    """Repeat the same words until they are answered; also how often they were not."""
    unanswered = 0
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await ask(), unanswered
            except LedgerAwayError:
                unanswered += 1
                await asyncio.sleep(0.02)


async def one_request(ledger: Ledger, tenant: str, name: str) -> int:
    """Reserved and settled; how often a word had to be repeated."""
    asked = a_reserve(name, tenant_id=tenant)
    held, first = await until_answered(lambda: ledger.reserve(asked))
    assert held == Reserved(reserved_micro=100)
    word = a_settle(name, tenant_id=tenant)
    settled, second = await until_answered(lambda: ledger.settle(word))
    assert (settled.billed_micro, settled.cause) == (50, EndCause.COMPLETE)
    return first + second


async def under_load(
    ledger: Ledger, tenants: list[str], meanwhile: Callable[[], Awaitable[object]]
) -> tuple[int, int]:
    """Requests done, and words that had to be repeated, while something happens."""
    over = asyncio.Event()
    streams = [
        asyncio.create_task(_requests(ledger, tenants[n % len(tenants)], over, str(n)))
        for n in range(STREAMS)
    ]
    await meanwhile()
    await asyncio.sleep(0.1)
    over.set()
    ended = await asyncio.gather(*streams)
    return sum(done for done, _ in ended), sum(unanswered for _, unanswered in ended)


async def _requests(ledger: Ledger, tenant: str, over: asyncio.Event, name: str) -> tuple[int, int]:
    done = unanswered = 0
    while not over.is_set():
        unanswered += await one_request(ledger, tenant, f"{tenant}_{name}_{done}")
        done += 1
    return done, unanswered


async def assert_exact(pg: Postgres, tenants: list[str], requests: int) -> None:
    """Each request reserved once and settled once, nothing held, and the books in order."""
    async with pg.connection() as conn:
        report = await audit(conn)
        assert report.violations == ()
        cursor = await conn.execute(
            "SELECT request_id, kind FROM entries WHERE tenant_id = ANY (%s)", (tenants,)
        )
        effects = Counter(await cursor.fetchall())
        cursor = await conn.execute(
            "SELECT sum(reserved_micro), sum(posted_micro) FROM accounts"
            " WHERE tenant_id = ANY (%s)",
            (tenants,),
        )
        balances = await cursor.fetchone()
    assert set(effects.values()) <= {1}
    assert len(effects) == 2 * requests
    assert balances == (0, 50 * requests)
