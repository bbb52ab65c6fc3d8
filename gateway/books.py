"""The ledger, and what stands in for it while Postgres is away: the spool.

Hard-capped tenants are refused then, for nobody can say what they have left; the others'
reservations and all settlements go to the spool, in order, and from there to the ledger when
it is back. Invariant: a request's settlement never overtakes its reservation.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from core.ledger import release
from core.metering import LedgerRefused, Reserve, Reserved, Settle, TopUp, Witness
from gateway.spool import Record, Spool, SpoolError
from store.ledger import Ledger, LedgerAwayError, NotReservedError

_log = logging.getLogger(__name__)

AWAY = LedgerRefused(reason="away")


class Books:
    """What the relay says about money goes through here."""

    def __init__(self, ledger: Ledger, spool: Spool) -> None:
        self._ledger = ledger
        self._spool = spool
        self._recovering = asyncio.Lock()
        self.away = False
        self.refused_words = 0

    @property
    def spool_bytes(self) -> int:
        """What waits on disk."""
        return self._spool.size_bytes

    async def reserve(self, asked: Reserve, *, hard_capped: bool) -> Reserved | LedgerRefused:
        """Hold money; `away` when it cannot be held and may not be spooled."""
        if self._direct:
            try:
                return await self._ledger.reserve(asked)
            except LedgerAwayError:
                self._lost_contact()
                if hard_capped:  # it may have been held
                    await self.settle(release(asked.request_id, asked.tenant_id, asked.created_ms))
        if hard_capped or not self._spool.takes_new_work:
            return AWAY
        try:
            await self._spool.append(Record(reserve=asked))
        except SpoolError:
            return AWAY
        return Reserved(reserved_micro=asked.amount_micro)

    async def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """Hold more; `away` may be asked again."""
        if not self._direct:
            return AWAY
        try:
            return await self._ledger.top_up(more)
        except LedgerAwayError:
            self._lost_contact()
            return AWAY

    async def settle(self, word: Settle) -> None:
        """Say how a request ended: to the ledger, or else to the spool."""
        if self._direct:
            try:
                await self._settle(word)
            except LedgerAwayError:
                self._lost_contact()
            else:
                return
        try:
            await self._spool.append(Record(settle=word))
        except SpoolError:
            # The worker's journal still has the totals, and the sweeper the reservation.
            facts = {"request_id": word.request_id, "cause": word.cause}
            _log.exception("a settlement was not kept", extra={"facts": facts})

    async def checkpoint(self, witnesses: Sequence[Witness]) -> None:
        """Tell of answers under way; a checkpoint missed is made up for by the next."""
        if self._direct:
            try:
                await asyncio.gather(*(self._ledger.reconcile(w) for w in witnesses))
            except LedgerAwayError:
                self._lost_contact()

    async def recover(self) -> int:
        """Replay the spool, if there is anything to; returns how many records were taken.

        With Postgres still away this changes nothing.
        """
        if self._direct:
            return 0
        return await self._recovered(self._spool.replay)

    async def adopt(self) -> int:
        """Replay what dead incarnations left on this disk."""
        return await self._recovered(self._spool.adopt)

    async def _recovered(
        self, replay: Callable[[Callable[[Sequence[Record]], Awaitable[None]]], Awaitable[int]]
    ) -> int:
        async with self._recovering:
            try:
                count = await replay(self._apply)
            except LedgerAwayError:
                self._lost_contact()
                return 0
        self.away = False
        if count:
            _log.info("spooled records were replayed", extra={"facts": {"records": count}})
        return count

    async def _apply(self, records: Sequence[Record]) -> None:
        """Reservations first: a later word in the same batch may be about them."""
        reserves = [record.reserve for record in records if record.reserve is not None]
        for asked, answer in zip(
            reserves, await asyncio.gather(*map(self._ledger.reserve, reserves)), strict=True
        ):
            if isinstance(answer, LedgerRefused):
                self._refused(asked.request_id, answer.reason)
        settles = [record.settle for record in records if record.settle is not None]
        await asyncio.gather(*map(self._settle, settles))
        witnesses = [record.witness for record in records if record.witness is not None]
        await asyncio.gather(*map(self._ledger.reconcile, witnesses))

    async def _settle(self, word: Settle) -> None:
        try:
            await self._ledger.settle(word)
        except NotReservedError:
            self._refused(word.request_id, "not_open")

    @property
    def _direct(self) -> bool:
        return not self.away and self._spool.empty

    def _lost_contact(self) -> None:
        if not self.away:
            _log.warning("the ledger is away; settlements go to the spool")
        self.away = True

    def _refused(self, request_id: str, reason: str) -> None:
        """A word that came too late to be answered: a person must look at it."""
        self.refused_words += 1
        facts = {"request_id": request_id, "reason": reason}
        _log.error("the ledger refused a word about a request", extra={"facts": facts})
