"""What a gateway says about money: to the bank, or to the spool while the bank is away.

`gateway.books` in virtual time. Invariant: a request's settlement never overtakes its
reservation, and what is spooled outlives the gateway.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from core.ledger import release
from core.metering import LedgerRefused, Reserve, Reserved, Settle, TopUp, Witness
from simulator.bank import Bank
from simulator.network import Network
from simulator.tasks import Process, Promise, sleep

R = TypeVar("R")

CALL_MS = 1_000
RECOVER_INTERVAL_MS = 500
AWAY = LedgerRefused(reason="away")

Record = Reserve | Settle


class Volume(msgspec.Struct, eq=False):
    """A gateway's disk, for all its lives: what could not be said yet, in order."""

    records: list[Record] = msgspec.field(default_factory=list)


class Books:
    """One gateway incarnation's."""

    def __init__(self, gateway: Process, network: Network, bank: Bank, volume: Volume) -> None:
        self.away = False
        self._gateway = gateway
        self._network = network
        self._bank = bank
        self._volume = volume
        gateway.spawn(self._recover_for_ever())

    async def reserve(self, asked: Reserve, *, hard_capped: bool) -> Reserved | LedgerRefused:
        """Hold money; `away` when it cannot be held and may not be spooled."""
        if self._direct:
            name = f"reserve {asked.request_id}"
            answer = await self._call(name, lambda: self._bank.reserve(asked))
            if answer is not None:
                return answer
            self.away = True
            if hard_capped:  # it may have been held
                await self.settle(release(asked.request_id, asked.tenant_id, asked.created_ms))
        if hard_capped:
            return AWAY
        self._volume.records.append(asked)
        return Reserved(reserved_micro=asked.amount_micro)

    async def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """Hold more; `away` may be asked again."""
        if not self._direct:
            return AWAY
        name = f"top up {more.request_id}"
        answer = await self._call(name, lambda: self._bank.top_up(more))
        if answer is None:
            self.away = True
            return AWAY
        return answer

    async def settle(self, word: Settle) -> None:
        """Say how a request ended."""
        if self._direct:
            name = f"settle {word.request_id} {word.cause}"
            if await self._call(name, lambda: self._bank.settle(word)) is not None:
                return
            self.away = True
        self._volume.records.append(word)

    async def checkpoint(self, witness: Witness) -> None:
        """One missed is made up for by the next."""
        if self._direct:
            name = f"checkpoint {witness.request_id}"
            await self._call(name, lambda: self._bank.reconcile(witness))

    @property
    def _direct(self) -> bool:
        return not self.away and not self._volume.records

    async def _recover_for_ever(self) -> None:
        while True:
            await sleep(self._gateway.clock, RECOVER_INTERVAL_MS, f"{self._gateway.name} recover")
            while self._volume.records:
                record = self._volume.records[0]
                if await self._replay(record) is None:
                    break
                self._volume.records.pop(0)
            else:
                self.away = False

    def _replay(self, record: Record) -> Promise[object | None]:
        match record:
            case Reserve():
                return self._call("replay reserve", lambda: self._bank.reserve(record))
            case Settle():
                return self._call("replay settle", lambda: self._bank.settle(record))

    def _call(self, name: str, handle: Callable[[], R]) -> Promise[R | None]:
        return self._network.call(self._gateway, self._bank, name, handle, timeout_ms=CALL_MS)
