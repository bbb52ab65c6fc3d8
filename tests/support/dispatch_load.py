"""Requests through several gateways' dispatch, on replicas that count what runs there."""

import asyncio
import random
from collections import Counter

from core.tickets import Admitted, Placed
from store.dispatch import Dispatch
from tests.support.dispatch_worlds import an_admit, an_arm
from tests.support.dispatchers import a_replica, end

SLOTS = 4
TWO_REPLICAS = (a_replica("r1", sequences=SLOTS), a_replica("r2", sequences=SLOTS))


class Load:
    """`most` is the largest number of requests that were on one replica at once."""

    def __init__(self, gateways: list[Dispatch], seed: int = 3) -> None:
        self.gateways = gateways
        self.running: Counter[str] = Counter()
        self.most = 0
        self.done = 0
        self.dice = random.Random(seed)

    async def request(self, ticket: str) -> None:
        gateway = self.dice.choice(self.gateways)
        admitted = await gateway.admit(an_admit(ticket))
        assert isinstance(admitted, Admitted)
        placed = await gateway.place(an_arm(ticket))
        assert isinstance(placed, Placed), placed
        self.running[placed.replica] += 1
        self.most = max(self.most, *self.running.values())
        for produced in range(1, 6):
            await asyncio.sleep(self.dice.random() * 0.02)
            gateway.charge_output(tenant="ten", ticket=ticket, tokens=produced)
        self.running[placed.replica] -= 1
        await end(gateway, ticket, placed)
        self.done += 1

    def start(self, count: int) -> "asyncio.Future[list[None]]":
        return asyncio.gather(*(self.request(f"t{i}") for i in range(count)))
