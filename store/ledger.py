"""The ledger as gateways and the control plane use it: commands in, answers out.

Commands go to a lane by their account and share its transactions (`store.group_commit`); the
rules are `core.ledger`'s, kept by the functions of migration 0004. When Postgres is away each
call raises LedgerAwayError within its bound. After that a reserve must be repeated or
released, since it may have been done; repeating any command is safe.
"""

import zlib

from core.grants import floor_micro
from core.ledger import release
from core.metering import (
    Adjust,
    Adjusted,
    AdjustmentKind,
    LedgerRefused,
    Reserve,
    Reserved,
    Settle,
    Settled,
    TopUp,
    Witness,
)
from core.protocol import Usage
from store.accounts import account, open_account, set_hard_cap
from store.group_commit import (
    AccountLockedError,
    GroupCommit,
    GroupCommitConfig,
    LedgerAwayError,
    LedgerRejectedError,
)
from store.ledger_commands import BILLING_CAUSES, Answer, Command, Commands
from store.postgres import PostgresConfig

__all__ = [
    "BILLING_CAUSES",
    "AccountLockedError",
    "Ledger",
    "LedgerAwayError",
    "LedgerRejectedError",
    "NotReservedError",
    "account",
    "open_account",
    "set_hard_cap",
]

WITNESSES = ("journal", "checkpoint")


class NotReservedError(Exception):
    """A settlement of a request that was never reserved: reserve it first."""


class Ledger:
    """One for each process; safe for any number of concurrent callers on one event loop."""

    def __init__(self, config: GroupCommitConfig, lanes: int) -> None:
        self._lanes = [GroupCommit[Command, Answer](config, Commands()) for _ in range(lanes)]

    @classmethod
    async def open(
        cls, database_url: str, *, lanes: int = 1, application_name: str = "headworks ledger"
    ) -> "Ledger":
        """Opens whether Postgres is there or not; connections are made when first needed."""
        postgres = PostgresConfig(database_url=database_url, application_name=application_name)
        return cls(GroupCommitConfig(postgres=postgres), lanes)

    async def close(self) -> None:
        """Finish what was asked, within `answer_timeout_s`, then refuse everything."""
        for lane in self._lanes:
            await lane.close()

    @property
    def away(self) -> bool:
        """Whether Postgres could not be reached when last tried."""
        return any(lane.away for lane in self._lanes)

    async def reserve(self, asked: Reserve) -> Reserved | LedgerRefused:
        """Hold the amount and open the request's usage row.

        Raises:
            LedgerAwayError: It may be held: repeat this, or `release` it until answered.
        """
        if not 0 <= floor_micro(asked.floor_micro, asked.amount_micro) <= asked.amount_micro:
            raise ValueError(f"cannot reserve {asked.floor_micro} to {asked.amount_micro}")
        answer = await self._lane(asked.tenant_id).submit(asked)
        assert isinstance(answer, Reserved | LedgerRefused)
        return answer

    async def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """Raise the reservation to a total; a total already reached changes nothing."""
        if not floor_micro(more.floor_micro, more.total_micro) <= more.total_micro:
            raise ValueError(f"cannot top up from {more.floor_micro} to {more.total_micro}")
        answer = await self._lane(more.tenant_id).submit(more)
        assert isinstance(answer, Reserved | LedgerRefused)
        return answer

    async def settle(self, word: Settle) -> Settled:
        """Fix the end cause, post the bill, free the rest.

        Raises:
            NotReservedError: There is no such request of this tenant's.
            LedgerAwayError: Repeat it.
        """
        if len({said.attempt for said in word.attempts}) < len(word.attempts):
            raise ValueError("an attempt is reported twice")
        for said in word.attempts:
            _check(said.usage)
        answer = await self._lane(word.tenant_id).submit(word)
        if isinstance(answer, LedgerRefused):
            raise NotReservedError(word.request_id)
        assert isinstance(answer, Settled)
        return answer

    async def release(self, request_id: str, tenant_id: str, *, ended_ms: int) -> Settled:
        """Free a reservation that no worker heard of; refuse its id if it was never reserved."""
        return await self.settle(release(request_id, tenant_id, ended_ms))

    async def reconcile(self, witness: Witness) -> Settled | None:
        """Take a witness's totals and post what they change.

        None: the request is open or not known yet, and its settlement will count them.
        """
        _check(witness.usage)
        if witness.source not in WITNESSES:
            raise ValueError(f"{witness.source!r} is no witness of its own")
        answer = await self._lane(witness.request_id).submit(witness)
        assert answer is None or isinstance(answer, Settled)
        return answer

    async def adjust(self, word: Adjust) -> Adjusted | LedgerRefused:
        """An operator's credit, refund, adjustment or new price; the same id has one effect.

        Raises:
            LedgerAwayError: It may be done: repeat it.
        """
        if word.kind is AdjustmentKind.REFUND and word.amount_micro <= 0:
            raise ValueError("a refund is above 0")
        if not (word.id and word.reason and word.author):
            raise ValueError("an adjustment needs an id, a reason and an author")
        answer = await self._lane(word.tenant_id).submit(word)
        assert isinstance(answer, Adjusted | LedgerRefused)
        return answer

    def _lane(self, account_or_request: str) -> GroupCommit[Command, Answer]:
        return self._lanes[zlib.crc32(account_or_request.encode()) % len(self._lanes)]


def _check(usage: Usage) -> None:
    if not usage.is_possible:
        raise ValueError(f"no tokens can be counted so: {usage}")
