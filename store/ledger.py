"""The ledger as gateways and the control plane use it: commands in, answers out.

Commands go to a lane by their account and share its transactions (`store.group_commit`); the
rules are `core.ledger`'s, kept by the functions of migration 0004. When Postgres is away each
call raises LedgerAwayError within its bound. After that a reserve must be repeated or
released, since it may have been done; repeating any command is safe.
"""

import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

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
from core.money import BILLS_TOKENS, EndCause
from core.protocol import Usage
from core.witnesses import heard_from
from store.accounts import account, open_account, set_hard_cap
from store.group_commit import (
    AccountLockedError,
    GroupCommit,
    GroupCommitConfig,
    LedgerAwayError,
    LedgerRejectedError,
)
from store.postgres import Connection, PostgresConfig
from store.queries import load

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

Command: TypeAlias = Reserve | TopUp | Settle | Witness | Adjust
Answer: TypeAlias = Reserved | LedgerRefused | Settled | Adjusted | None

WITNESSES = ("journal", "checkpoint")
HEARD = "heard of "  # and a request: in the place of its account, whose name we do not know
BILLING_CAUSES = [cause.value for cause, bills in BILLS_TOKENS.items() if bills]

_sql = load("ledger")
_json = msgspec.json.Encoder()


class NotReservedError(Exception):
    """A settlement of a request that was never reserved: reserve it first."""


class Ledger:
    """One for each process; safe for any number of concurrent callers on one event loop."""

    def __init__(self, config: GroupCommitConfig, lanes: int) -> None:
        self._lanes = [GroupCommit[Command, Answer](config, _Commands()) for _ in range(lanes)]

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


class _Commands:
    """How a batch of commands is said in SQL."""

    def key(self, command: Command) -> str:
        return f"adjust {command.id}" if isinstance(command, Adjust) else command.request_id

    def account(self, command: Command) -> str:
        # A witness does not say whose request it is: see `free`.
        if isinstance(command, Witness):
            return HEARD + command.request_id
        return command.tenant_id

    async def run(self, conn: Connection, commands: Sequence[Command]) -> Sequence[Answer]:
        answers: list[Answer] = [None] * len(commands)
        by_kind: dict[str, list[int]] = {kind: [] for kind in _KINDS.values()}
        for position, command in enumerate(commands):
            by_kind[_KINDS[type(command)]].append(position)
        witnesses, adjusts = by_kind.pop("witness"), by_kind.pop("adjust")
        if any(by_kind.values()):
            await self._apply(conn, commands, by_kind, answers)
        if witnesses:
            await self._reconcile(conn, commands, witnesses, answers)
        for at in adjusts:
            answers[at] = await self._adjust(conn, commands[at])
        return answers

    async def free(self, conn: Connection, accounts: Sequence[str]) -> set[str]:
        heard = [name.removeprefix(HEARD) for name in accounts if name.startswith(HEARD)]
        cursor = await conn.execute(_sql["whose"], {"request_ids": heard})
        whose: dict[str, str | None] = dict(await cursor.fetchall())
        tenants = [*accounts, *filter(None, whose.values())]
        cursor = await conn.execute(_sql["free_accounts"], {"tenants": tenants})
        free = {tenant_id for (tenant_id,) in await cursor.fetchall()}
        return free | {HEARD + name for name in heard if whose.get(name) in free | {None}}

    async def _apply(
        self,
        conn: Connection,
        commands: Sequence[Command],
        by_kind: dict[str, list[int]],
        answers: list[Answer],
    ) -> None:
        parameters: dict[str, Any] = {
            f"{kind}s": _json.encode([commands[at] for at in positions]).decode()
            if positions
            else None
            for kind, positions in by_kind.items()
        }
        parameters["tenants"] = list(
            {self.account(commands[at]) for positions in by_kind.values() for at in positions}
        )
        parameters["billing_causes"] = BILLING_CAUSES
        cursor = conn.cursor(binary=True)
        statement = "apply_keyed" if any(map(_has_key, commands)) else "apply"
        await cursor.execute(_sql[statement], parameters, prepare=True)
        for kind, n, *columns in await cursor.fetchall():
            answers[by_kind[kind][n - 1]] = _answer(kind, columns)

    async def _reconcile(
        self,
        conn: Connection,
        commands: Sequence[Command],
        positions: list[int],
        answers: list[Answer],
    ) -> None:
        words = []
        for at in positions:
            witness = commands[at]
            assert isinstance(witness, Witness)
            words.append(
                {
                    "request_id": witness.request_id,
                    "attempt": witness.attempt,
                    "source": witness.source,
                    **msgspec.structs.asdict(heard_from(witness)),
                }
            )
        # Two transactions, in this order: see ledger_recount.
        hear = "hear" if any(word["source"] != "checkpoint" for word in words) else "hear_softly"
        await conn.execute(_sql[hear], {"witnesses": _json.encode(words).decode()})
        cursor = await conn.execute(
            _sql["recount"],
            {
                "request_ids": [commands[at].request_id for at in positions],
                "billing_causes": BILLING_CAUSES,
            },
        )
        for kind, n, *columns in await cursor.fetchall():
            answers[positions[n - 1]] = _answer(kind, columns)

    async def _adjust(self, conn: Connection, word: Command) -> Answer:
        parameters = {"word": _json.encode(word).decode(), "billing_causes": BILLING_CAUSES}
        cursor = await conn.execute(_sql["adjust"], parameters)
        row = await cursor.fetchone()
        assert row is not None
        *refusal, entry, delta_micro, posted_micro, credit_micro = row
        if refusal[0] is not None:
            return _refused(refusal)
        return Adjusted(
            entry=entry,
            delta_micro=delta_micro,
            posted_micro=posted_micro,
            credit_micro=credit_micro,
        )


_KINDS: dict[type[Command], str] = {
    Adjust: "adjust",
    Settle: "settle",
    TopUp: "top_up",
    Reserve: "reserve",
    Witness: "witness",
}


def _answer(kind: str, columns: Sequence[Any]) -> Answer:
    if columns[0] is not None:
        return _refused(columns[:6])
    if kind != "settle":
        return Reserved(reserved_micro=columns[2])
    billed_micro, cause, prompt, cached, output, write_5m, write_1h, reasoning = columns[6:]
    return Settled(
        billed_micro=billed_micro,
        metered=Usage(
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            cache_write_5m_tokens=write_5m,
            cache_write_1h_tokens=write_1h,
            reasoning_tokens=reasoning,
        ),
        cause=EndCause(cause),
    )


def _refused(columns: Sequence[Any]) -> LedgerRefused:
    reason, limit, reserved_micro, posted_micro, hard_cap_micro, fits_micro = columns
    return LedgerRefused(
        reason=reason,
        limit=limit or "",
        reserved_micro=reserved_micro or 0,
        posted_micro=posted_micro or 0,
        hard_cap_micro=hard_cap_micro or 0,
        fits_micro=fits_micro or 0,
    )


def _has_key(command: Command) -> bool:
    return (isinstance(command, Reserve) and command.claim is not None) or (
        isinstance(command, Settle) and command.kept is not None
    )


def _check(usage: Usage) -> None:
    if not usage.is_possible:
        raise ValueError(f"no tokens can be counted so: {usage}")
