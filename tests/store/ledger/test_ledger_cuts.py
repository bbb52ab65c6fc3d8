"""A batch cut at every byte of its exchange with Postgres: each of its words has one effect."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from core.metering import Reserved
from store.ledger import Ledger
from store.postgres import Postgres
from tests.support.fault_proxy import FaultProxy, Link, Moment, Passage, Way
from tests.support.ledger_commands import a_reserve, a_settle, a_top_up, a_witness
from tests.support.ledger_database import a_tenant, an_impatient_ledger
from tests.support.ledger_faults import assert_exact
from tests.support.postgres_faults import READY, a_proxy

pytestmark = [pytest.mark.anyio, pytest.mark.services]

CUTS = 20  # places in each direction, evenly spread
STALLS = 5
TRY_S = 0.15


@pytest.fixture
async def proxy(postgres_url: str) -> AsyncIterator[FaultProxy]:
    async with a_proxy(postgres_url) as proxy:
        yield proxy


@pytest.fixture
async def ledger(postgres_url: str, proxy: FaultProxy) -> AsyncIterator[Ledger]:
    ledger = an_impatient_ledger(proxy.via(postgres_url), try_timeout_s=TRY_S)
    yield ledger
    await ledger.close()


class Batches:
    """One after another, each of words of every kind about requests of its own.

    Each request is reserved in one batch, raised or not, and settled in the next.
    """

    def __init__(self, ledger: Ledger, tenants: list[str]) -> None:
        self._ledger = ledger
        self._tenants = tenants
        self.count = 0

    async def next(self) -> None:
        """One batch of four words; every one is answered, and as if nothing had happened."""
        one, two = self._tenants
        new, old = f"{one}_{self.count + 1}", f"{one}_{self.count}"
        held, raised, settled, told = await asyncio.gather(
            self._ledger.reserve(a_reserve(new, tenant_id=one)),
            self._ledger.reserve(a_reserve(f"{new}_two", tenant_id=two)),
            self._ledger.settle(a_settle(old, tenant_id=one)),
            self._ledger.settle(a_settle(f"{old}_two", tenant_id=two)),
        )
        assert held == raised == Reserved(reserved_micro=100)
        assert settled.billed_micro == told.billed_micro == 50
        self.count += 1

    async def first(self) -> None:
        """There is something to settle from now on, and a connection."""
        one, two = self._tenants
        await self._ledger.reserve(a_reserve(f"{one}_0", tenant_id=one))
        await self._ledger.reserve(a_reserve(f"{one}_0_two", tenant_id=two))

    async def last(self) -> int:
        """Returns how many requests there were."""
        one, two = self._tenants
        await self._ledger.settle(a_settle(f"{one}_{self.count}", tenant_id=one))
        await self._ledger.settle(a_settle(f"{one}_{self.count}_two", tenant_id=two))
        return 2 * (self.count + 1)


async def exchange_bytes(proxy: FaultProxy, batches: Batches) -> dict[Way, int]:
    """Of one batch on a connection that is warm."""
    await batches.next()
    before = {way: proxy.bytes_passed(way) for way in Way}
    await batches.next()
    return {way: proxy.bytes_passed(way) - before[way] for way in Way}


def spread(total: int, places: int) -> list[int]:
    return [1 + total * n // places for n in range(places)]


async def test_a_batch_cut_at_any_byte_is_sent_again_and_done_once(ledger, proxy, pg):
    tenants = [await a_tenant(pg), await a_tenant(pg)]
    batches = Batches(ledger, tenants)
    await batches.first()
    totals = await exchange_bytes(proxy, batches)
    sprung = 0
    for way in Way:
        for at in spread(totals[way], CUTS):
            trap = proxy.trap(way, Moment(after_bytes=at), Link.reset)
            await batches.next()
            sprung += trap.sprung.is_set()
            proxy.heal()
    assert sprung > 1.5 * CUTS, "names and numbers grow, so a few places may be missed"
    await assert_exact(pg, tenants, await batches.last())


async def test_a_batch_that_vanishes_at_any_byte_is_given_up_sent_again_and_done_once(
    ledger, proxy, pg
):
    tenants = [await a_tenant(pg), await a_tenant(pg)]
    batches = Batches(ledger, tenants)
    await batches.first()
    totals = await exchange_bytes(proxy, batches)

    def vanish(link: Link) -> None:
        link.set(to_server=Passage(stalled=True), to_client=Passage(stalled=True))

    for way in Way:
        for at in spread(totals[way], STALLS):
            trap = proxy.trap(way, Moment(after_bytes=at), vanish)
            await batches.next()
            assert trap.sprung.is_set()
            proxy.heal()  # what was held back arrives late
    await assert_exact(pg, tenants, await batches.last())


@pytest.mark.parametrize("kind", ["reserve", "top_up", "settle", "release", "reconcile"])
async def test_a_commit_whose_answer_is_lost_is_repeated_with_no_second_effect(
    ledger, proxy, pg, kind
):
    tenant = await a_tenant(pg)
    name = f"{tenant}_{kind}"
    if kind != "reserve":
        await ledger.reserve(a_reserve(name, tenant_id=tenant))
    if kind == "reconcile":
        await ledger.settle(a_settle(name, tenant_id=tenant))
    words = {
        "reserve": lambda: ledger.reserve(a_reserve(name, tenant_id=tenant)),
        "top_up": lambda: ledger.top_up(a_top_up(name, tenant_id=tenant)),
        "settle": lambda: ledger.settle(a_settle(name, tenant_id=tenant)),
        "release": lambda: ledger.release(name, tenant, ended_ms=2_000),
        "reconcile": lambda: ledger.reconcile(a_witness(name)),
    }
    before = await entries(pg, tenant)
    trap = proxy.trap(Way.TO_CLIENT, Moment(before=READY), Link.reset)
    answer = await words[kind]()
    assert trap.sprung.is_set()
    after = await entries(pg, tenant)
    assert len(after) - len(before) == (kind != "reconcile"), "the journal says what was billed"
    assert await words[kind]() == answer
    assert await entries(pg, tenant) == after


async def entries(pg: Postgres, tenant: str) -> list[tuple[str, int, int]]:
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT kind, reserved_micro, posted_micro FROM entries WHERE tenant_id = %s"
            " ORDER BY seq",
            (tenant,),
        )
        return await cursor.fetchall()
