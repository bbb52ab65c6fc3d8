"""The ledger, and what stands in for it while Postgres is away: the spool.

Hard-capped tenants are refused then, for nobody can say what they have left; the others'
reservations and all settlements go to the spool, in order, and from there to the ledger when
it is back. From then on new requests go to the ledger at once, whatever still waits in the
spool about others. A word that the ledger refuses or rejects is set aside for a person, and
those after it go on. Invariant: a request's settlement never overtakes its reservation.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from core.ledger import release
from core.metering import LedgerRefused, Reserve, Reserved, Settle, TopUp, Witness
from gateway.spool import Record, Spool, SpoolError
from store.ledger import (
    AccountLockedError,
    Ledger,
    LedgerAwayError,
    LedgerRejectedError,
    NotReservedError,
)

_log = logging.getLogger(__name__)

AWAY = LedgerRefused(reason="away")
SPOOLED_ANSWER_BYTES_MAX = 65_536  # of one that an idempotency key keeps
UNKEPT_MAX = 10_000  # settlements in memory alone: the disk refused them


class RefusedError(Exception):
    """The ledger refuses a reservation of a request that was served meanwhile."""


# Repeating the same words is no help.
REJECTED = (LedgerRejectedError, NotReservedError, RefusedError, ValueError)
# Is refused, and changes nothing; that it is answered says that Postgres is there.
_PROBE = TopUp(request_id="", tenant_id="", total_micro=0)


class Books:
    """What the relay says about money goes through here."""

    def __init__(self, ledger: Ledger, spool: Spool) -> None:
        self._ledger = ledger
        self._spool = spool
        self._recovering = asyncio.Lock()
        self._unkept: list[Settle] = []
        self.away = False
        self.refused_words = 0

    @property
    def spool_bytes(self) -> int:
        """What waits on disk."""
        return self._spool.size_bytes

    async def reserve(self, asked: Reserve, *, hard_capped: bool) -> Reserved | LedgerRefused:
        """Hold money; `away` when it cannot be held and may not be spooled.

        Nor may what claims an idempotency key: nobody could say whether it is another's.
        """
        must_hold = hard_capped or asked.claim is not None
        if not self.away:
            try:
                return await self._ledger.reserve(asked)
            except LedgerAwayError as error:
                self._not_answered(error)
                if must_hold:  # it may have been held
                    await self._keep(release(asked.request_id, asked.tenant_id, asked.created_ms))
            except REJECTED as error:
                self._refused(asked.request_id, repr(error))
                return AWAY
        if must_hold or not self._spool.takes_new_work:
            return AWAY
        try:
            await self._spool.append(Record(reserve=asked))
        except SpoolError:
            return AWAY
        return Reserved(reserved_micro=asked.amount_micro)

    async def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """Hold more; `away` may be asked again."""
        if not self._may_tell(more.request_id):
            return AWAY
        try:
            return await self._ledger.top_up(more)
        except LedgerAwayError as error:
            self._not_answered(error)
        except REJECTED as error:
            self._refused(more.request_id, repr(error))
            return LedgerRefused(reason="rejected")
        return AWAY

    async def settle(self, word: Settle) -> None:
        """Say how a request ended: to the ledger, or else to the spool."""
        if self._may_tell(word.request_id):
            try:
                await self._ledger.settle(word)
            except LedgerAwayError as error:
                self._not_answered(error)
            except REJECTED as error:
                await self._keep(word, rejected=repr(error))
                return
            else:
                return
        await self._keep(word)

    async def checkpoint(self, witnesses: Sequence[Witness]) -> None:
        """Tell of answers under way; a checkpoint missed is made up for by the next."""
        if self.away:
            return
        try:
            rejected = await self._say([Record(witness=witness) for witness in witnesses])
        except LedgerAwayError as error:
            self._not_answered(error)
            return
        for record, reason in rejected:
            self._refused(record.request_id, reason)

    async def recover(self) -> int:
        """Replay the spool, if there is anything to; returns how many records were taken.

        With Postgres still away this changes nothing.
        """
        if not self.away and self._spool.empty and not self._unkept:
            return 0
        count = await self._recovered(self._spool.replay)
        unkept, self._unkept = self._unkept, []
        for word in unkept:
            await self.settle(word)
        return count

    async def adopt(self) -> int:
        """Replay what dead incarnations left on this disk."""
        return await self._recovered(self._spool.adopt)

    async def _recovered(
        self, replay: Callable[[Callable[[Sequence[Record]], Awaitable[None]]], Awaitable[int]]
    ) -> int:
        async with self._recovering:
            try:
                if self.away:
                    await self._make_contact()
                count = await replay(self._apply)
            except LedgerAwayError as error:
                self._not_answered(error)
                return 0
        if count:
            _log.info("spooled records were replayed", extra={"facts": {"records": count}})
        return count

    async def _make_contact(self) -> None:
        """Raises LedgerAwayError. Nobody need wait for a replay, which may be long."""
        with suppress(LedgerRejectedError):
            await self._ledger.top_up(_PROBE)
        self.away = False

    async def _apply(self, records: Sequence[Record]) -> None:
        """Reservations first: a later word in the same batch may be about them."""
        rejected = [
            *await self._say([record for record in records if record.reserve is not None]),
            *await self._say([record for record in records if record.settle is not None]),
            *await self._say([record for record in records if record.witness is not None]),
        ]
        for record, reason in rejected:
            await self._set_aside(record, reason)

    async def _say(self, records: Sequence[Record]) -> list[tuple[Record, str]]:
        """Those that the ledger rejects, and why. Raises LedgerAwayError when all have ended."""
        answers = await asyncio.gather(*map(self._say_one, records), return_exceptions=True)
        rejected = []
        for record, answer in zip(records, answers, strict=True):
            if isinstance(answer, REJECTED):
                rejected.append((record, repr(answer)))
            elif answer is not None:
                raise answer
        return rejected

    async def _say_one(self, record: Record) -> None:
        if record.reserve is not None:
            answer = await self._ledger.reserve(record.reserve)
            if isinstance(answer, LedgerRefused):
                raise RefusedError(answer.reason)
        elif record.settle is not None:
            await self._ledger.settle(record.settle)
        elif record.witness is not None:
            await self._ledger.reconcile(record.witness)

    async def _set_aside(self, record: Record, reason: str) -> None:
        """Raises SpoolError."""
        self._refused(record.request_id, reason)
        await self._spool.set_aside(record, reason)

    async def _keep(self, word: Settle, *, rejected: str = "") -> None:
        """On disk: for the ledger, or where it rejected it for a person.

        In memory, until the next recovery, when the disk refuses too. Should we die before, the
        worker's journal has the totals.
        """
        record = Record(settle=_spoolable(word))
        try:
            if rejected:
                await self._set_aside(record, rejected)
            else:
                await self._spool.append(record)
        except SpoolError as error:
            is_kept = len(self._unkept) < UNKEPT_MAX
            if is_kept:
                self._unkept.append(word)
            facts = {"request_id": word.request_id, "reason": str(error), "in_memory": is_kept}
            _log.exception("a settlement is not on disk", extra={"facts": facts})

    def _may_tell(self, request_id: str) -> bool:
        """Whether the ledger may hear of it now: it is there, and nothing earlier waits."""
        return not self.away and not self._spool.holds(request_id)

    def _not_answered(self, error: LedgerAwayError) -> None:
        """One account that somebody keeps locked says nothing about the others."""
        if isinstance(error, AccountLockedError):
            return
        if not self.away:
            _log.warning("the ledger is away; settlements go to the spool")
        self.away = True

    def _refused(self, request_id: str, reason: str) -> None:
        """A word that came too late to be answered: a person must look at it."""
        self.refused_words += 1
        facts = {"request_id": request_id, "reason": reason}
        _log.error("the ledger refused a word about a request", extra={"facts": facts})


def _spoolable(word: Settle) -> Settle:
    """The same, without an answer that would crowd out others' settlements.

    Its key then says that it was answered, and not what.
    """
    if word.kept is None or len(word.kept.answer) <= SPOOLED_ANSWER_BYTES_MAX:
        return word
    return msgspec.structs.replace(word, kept=msgspec.structs.replace(word.kept, answer=b""))
