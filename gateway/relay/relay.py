"""The registry of requests under way, and what is done to all of them.

Bounds, checkpoints, slow readers, and the drain at shutdown.
"""

import asyncio
import logging

from core.errors import Code, RefusedError, refuse
from core.money import EndCause
from gateway.relay.call import Call
from gateway.relay.exchange import Exchange
from gateway.relay.shared import Shared

_log = logging.getLogger(__name__)

STOPPING = refuse(Code.UNAVAILABLE, "This gateway is shutting down. Please retry.").refusal
FULL = refuse(Code.OVERLOADED, "Too many requests are under way. Please retry.").refusal


class Relay:
    """One for each gateway."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.draining = False
        self._exchanges: set[Exchange] = set()

    def __len__(self) -> int:
        return len(self._exchanges)

    def open(self, call: Call) -> Exchange:
        """Start a request. Raises RefusedError when this gateway takes no more."""
        if self.draining:
            raise RefusedError(STOPPING)
        if len(self._exchanges) >= self.shared.limits.exchanges_max:
            raise RefusedError(FULL)
        exchange = Exchange(self.shared, call)
        self._exchanges.add(exchange)
        exchange.task = asyncio.create_task(exchange.run())
        exchange.task.add_done_callback(lambda _: self._exchanges.discard(exchange))
        return exchange

    def cut_slow_readers(self) -> None:
        """End what nobody takes. Called about once a second."""
        now_s = asyncio.get_running_loop().time()
        for exchange in list(self._exchanges):
            since_s = exchange.writing_since_s
            if since_s and now_s - since_s > self.shared.limits.slow_reader_s:
                exchange.cut()

    async def checkpoint(self) -> int:
        """Tell the ledger what long answers have used so far; returns how many."""
        old = [e for e in self._exchanges if e.age_s > self.shared.limits.checkpoint_age_s]
        witnesses = [witness for exchange in old for witness in exchange.witnesses()]
        await self.shared.books.checkpoint(witnesses)
        return len(witnesses)

    async def drain(self) -> None:
        """Take no more; let answers end, cut those that do not, then settle them all. Bounded."""
        self.draining = True
        limits = self.shared.limits
        await self._wait(limits.drain_s)
        for exchange in list(self._exchanges):
            exchange.cancel(EndCause.FAILED, STOPPING)
        await self._wait(limits.settle_s)
        left = await self.shared.endings.drain(limits.settle_s)
        if left or self._exchanges:
            facts = {"exchanges": len(self._exchanges), "endings": left}
            _log.error("not everything was settled at shutdown", extra={"facts": facts})

    async def _wait(self, within_s: float) -> None:
        tasks = [exchange.task for exchange in self._exchanges if exchange.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
