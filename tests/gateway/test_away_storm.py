"""Faults at random, one after another and on top of each other: books stay exact throughout."""

import asyncio
import random
from pathlib import Path

import pytest

from gateway.books import AWAY
from tests.support.fault_proxy import FaultProxy, Link, Moment, Passage, Way
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.postgres_faults import READY, timed
from tests.support.till import Till, a_till

pytestmark = [pytest.mark.anyio, pytest.mark.services]

STORM_S = 3.0
ANSWER_S = 0.4
SLACK_S = 1.0  # a busy machine's
BYTES = 8_000  # of a few batches


class Storm:
    """What befalls a proxy. The seed chooses it, the machine's timing where it strikes."""

    def __init__(self, proxy: FaultProxy, dice: random.Random) -> None:
        self._proxy = proxy
        self._dice = dice
        self._faults = (self._strike, self._strike, self._vanish, self._swallow, self._slow)

    async def rage(self, over: asyncio.Event) -> None:
        while not over.is_set():
            self._dice.choice((*self._faults, self._die, FaultProxy.reset))(self._proxy)
            await asyncio.sleep(self._dice.uniform(0, 0.3))
            if self._dice.random() < 0.6:
                self._proxy.heal()
                await asyncio.sleep(self._dice.uniform(0, 0.3))
        self._proxy.heal()

    def _strike(self, proxy: FaultProxy) -> None:
        ends = (Link.reset, Link.close, self._lose_link, self._die_there)
        moment = Moment(after_bytes=self._dice.randrange(BYTES))
        proxy.trap(self._way(), moment, self._dice.choice(ends))

    def _die(self, proxy: FaultProxy) -> None:
        proxy.trap(Way.TO_CLIENT, Moment(before=READY), self._die_there)

    def _vanish(self, proxy: FaultProxy) -> None:
        proxy.set(**{self._way().value: Passage(stalled=True)})

    def _swallow(self, proxy: FaultProxy) -> None:
        proxy.set(**{self._way().value: Passage(swallowed=True)})

    def _slow(self, proxy: FaultProxy) -> None:
        proxy.set(to_client=Passage(latency_s=self._dice.uniform(0, 1.5 * ANSWER_S)))

    def _lose_link(self, link: Link) -> None:
        link.set(to_server=Passage(stalled=True), to_client=Passage(stalled=True))

    def _die_there(self, link: Link) -> None:
        self._proxy.refuse()
        link.reset()

    def _way(self) -> Way:
        return self._dice.choice(list(Way))


class Customers:
    """Requests without end, of one tenant who is capped or not."""

    def __init__(self, till: Till, tenant: str) -> None:
        self._till = till
        self._tenant = tenant
        self.served: list[str] = []
        self.refused = 0
        self.longest_s = 0.0

    async def come(self, over: asyncio.Event, name: str) -> None:
        count = 0
        while not over.is_set():
            count += 1
            await self._one(f"{self._tenant}_{name}_{count}")
            await asyncio.sleep(0.005)

    async def _one(self, name: str) -> None:
        books, capped = self._till.books, self._tenant == self._till.capped
        asked = a_reserve(name, tenant_id=self._tenant)
        answer, took_s = await timed(books.reserve(asked, hard_capped=capped))
        self.longest_s = max(self.longest_s, took_s)
        if answer == AWAY:
            self.refused += 1
            return
        self.served.append(name)
        _, took_s = await timed(books.settle(a_settle(name, tenant_id=self._tenant)))
        self.longest_s = max(self.longest_s, took_s)


async def keep_recovering(till: Till, over: asyncio.Event) -> None:
    while not over.is_set():
        await till.books.recover()
        await asyncio.sleep(0.03)


async def test_a_storm_of_faults_loses_and_doubles_nothing(postgres_url: str, tmp_path: Path):
    seed = random.SystemRandom().randrange(2**32)
    async with a_till(postgres_url, tmp_path, answer_s=ANSWER_S) as till:
        first = await till.billed(till.capped)
        open_ones, capped_ones = Customers(till, till.free), Customers(till, till.capped)
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for name in ("a", "b", "c"):
                group.create_task(open_ones.come(over, name))
                group.create_task(capped_ones.come(over, name))
            group.create_task(keep_recovering(till, over))
            group.create_task(Storm(till.proxy, random.Random(seed)).rage(over))
            await asyncio.sleep(STORM_S)
            over.set()
        await till.well_again()
        free, capped = await till.billed(till.free), await till.billed(till.capped)
    assert free == dict.fromkeys(open_ones.served, 50), seed
    billed = {name: micro for name, micro in capped.items() if micro}
    assert billed == {**first, **dict.fromkeys(capped_ones.served, 50)}, seed
    assert open_ones.refused == till.books.refused_words == 0, seed
    assert max(open_ones.longest_s, capped_ones.longest_s) < ANSWER_S * 1.1 + SLACK_S, seed
