"""A gateway's books with a real spool, and a real ledger beyond a fault proxy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from core.metering import Reserved
from gateway.books import AWAY, Books
from gateway.spool import Spool
from store.accounts import account
from store.ledger import Ledger
from store.ledger_audit import audit
from store.postgres import Postgres, PostgresConfig
from tests.support.fault_proxy import FaultProxy
from tests.support.ledger_commands import a_reserve, a_settle, a_top_up
from tests.support.ledger_database import a_tenant, an_impatient_ledger
from tests.support.ledger_faults import until_answered
from tests.support.postgres_faults import a_proxy, timed

CAP_MICRO = 1_000_000_000


class Till:
    """Books with a spool and a ledger beyond a proxy, an open tenant, a capped one, and a look.

    The look is by a way of its own, past the proxy.
    """

    def __init__(self, ledger: Ledger, spool: Spool, proxy: FaultProxy, pg: Postgres) -> None:
        self.ledger = ledger
        self.books = Books(ledger, spool)
        self.spool = spool
        self.proxy = proxy
        self.pg = pg
        self.free = self.capped = ""
        self.asked = 0

    async def request(self, tenant: str | None = None) -> str:
        """One from end to end; its id."""
        name = await self.begin(tenant)
        await self.books.settle(a_settle(name, tenant_id=tenant or self.free))
        return name

    async def begin(self, tenant: str | None = None) -> str:
        self.asked += 1
        tenant = tenant or self.free
        name = f"{tenant}_{self.asked}"
        asked = a_reserve(name, tenant_id=tenant)
        held = await self.books.reserve(asked, hard_capped=tenant == self.capped)
        assert held == Reserved(reserved_micro=100)
        return name

    async def refusal_of_the_capped(self) -> float:
        """Which is that the ledger is away; seconds it took."""
        self.asked += 1
        asked = a_reserve(f"{self.capped}_{self.asked}", tenant_id=self.capped)
        answer, took_s = await timed(self.books.reserve(asked, hard_capped=True))
        assert answer == AWAY
        return took_s

    async def reachable(self) -> None:
        """The ledger is, whatever the books think."""
        nobody = a_top_up("nobody's", tenant_id="nobody")
        await until_answered(lambda: self.ledger.top_up(nobody))

    async def well_again(self) -> None:
        """As the gateway's loop does: try to recover, until it works."""
        async with asyncio.timeout(10):
            while self.books.away or not self.spool.empty:
                await self.books.recover()
                await asyncio.sleep(0.01)

    async def billed(self, tenant: str) -> dict[str, int]:
        """By request, of those that ended; nothing is open, and the books are in order."""
        async with self.pg.connection() as conn:
            report = await audit(conn)
            assert report.violations == ()
            balances = await account(conn, tenant)
            cursor = await conn.execute(
                "SELECT request_id, count(*), sum(posted_delta_micro) FROM entries"
                " WHERE tenant_id = %s GROUP BY request_id",
                (tenant,),
            )
            entries = await cursor.fetchall()
        assert balances is not None
        assert balances.reserved_micro == 0
        assert {count for _, count, _ in entries} <= {2}, "one reserve, one end"
        assert balances.posted_micro == sum(posted for _, _, posted in entries)
        return {name: int(posted) for name, _, posted in entries}


@asynccontextmanager
async def a_till(url: str, directory: Path, *, answer_s: float) -> AsyncIterator[Till]:
    """Connected: the capped tenant has one request behind it."""
    pg = await Postgres.open(PostgresConfig(database_url=url, application_name="look"))
    spool = Spool(directory, "gw_1", bytes_max=1_000_000, segment_bytes=4_000)
    spool.open()
    async with a_proxy(url) as proxy:
        ledger = an_impatient_ledger(
            proxy.via(url),
            answer_timeout_s=answer_s,
            try_timeout_s=answer_s / 2,
            retry_pause_max_s=0.05,
        )
        till = Till(ledger, spool, proxy, pg)
        till.free = await a_tenant(pg)
        till.capped = await a_tenant(pg, hard_cap_micro=CAP_MICRO)
        await till.request(till.capped)
        yield till
        proxy.heal()
        await ledger.close()
        await spool.close()
    await pg.close()
