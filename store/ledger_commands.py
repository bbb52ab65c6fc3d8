"""How a batch of the ledger's commands is said in SQL, and its answers read."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from core.metering import (
    Adjust,
    Adjusted,
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
from store.lane_connection import (
    LaneConnection,
    Statement,
    read_int,
    read_text,
    rows,
    text_array,
)
from store.queries import load, numbered

Command: TypeAlias = Reserve | TopUp | Settle | Witness | Adjust
Answer: TypeAlias = Reserved | LedgerRefused | Settled | Adjusted | None

HEARD = "heard of "  # and a request: in the place of its account, whose name we do not know
BILLING_CAUSES = [cause.value for cause, bills in BILLS_TOKENS.items() if bills]

_sql = load("ledger")
_json = msgspec.json.Encoder()

_APPLY = ("tenants", "settles", "top_ups", "reserves", "billing_causes")
_BILLING_CAUSES = text_array(BILLING_CAUSES)
# kind, n, refused, limit_name | the sums of a refusal | billed_micro | cause | tokens
_ANSWER = (read_text, read_int, read_text, read_text, *4 * (read_int,), read_int, read_text) + (
    6 * (read_int,)
)


class Commands:
    """A lane's `Work`."""

    def key(self, command: Command) -> str:
        """A request's, or an adjustment's."""
        return f"adjust {command.id}" if isinstance(command, Adjust) else command.request_id

    def account(self, command: Command) -> str:
        """The tenant's."""
        # A witness does not say whose request it is: see `free`.
        if isinstance(command, Witness):
            return HEARD + command.request_id
        return command.tenant_id

    async def run(self, conn: LaneConnection, commands: Sequence[Command]) -> Sequence[Answer]:
        """See `Work`: reservations and what follows from them first, in one transaction."""
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

    async def free(self, conn: LaneConnection, accounts: Sequence[str]) -> set[str]:
        """See `Work`; of requests only heard of, those whose tenant's is."""
        heard = [name.removeprefix(HEARD) for name in accounts if name.startswith(HEARD)]
        cursor = await conn.execute(_sql["whose"], {"request_ids": heard})
        whose: dict[str, str | None] = dict(await cursor.fetchall())
        tenants = [*accounts, *filter(None, whose.values())]
        cursor = await conn.execute(_sql["free_accounts"], {"tenants": tenants})
        free = {tenant_id for (tenant_id,) in await cursor.fetchall()}
        return free | {HEARD + name for name in heard if whose.get(name) in free | {None}}

    async def _apply(
        self,
        conn: LaneConnection,
        commands: Sequence[Command],
        by_kind: dict[str, list[int]],
        answers: list[Answer],
    ) -> None:
        tenants = {self.account(commands[at]) for positions in by_kind.values() for at in positions}
        values = (
            text_array(list(tenants)),
            *(_commands_json(commands, by_kind[kind]) for kind in ("settle", "top_up", "reserve")),
            _BILLING_CAUSES,
        )
        statement = "apply_keyed" if any(map(_has_key, commands)) else "apply"
        for kind, n, *columns in rows(await conn.run(_statements[statement], values), _ANSWER):
            answers[by_kind[kind][n - 1]] = _answer(kind, columns)

    async def _reconcile(
        self,
        conn: LaneConnection,
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

    async def _adjust(self, conn: LaneConnection, word: Command) -> Answer:
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


_statements = {
    name: Statement(f"ledger {name}".encode(), numbered(_sql[name], _APPLY))
    for name in ("apply", "apply_keyed")
}


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


def _commands_json(commands: Sequence[Command], positions: list[int]) -> bytes | None:
    """As the ledger's functions take them; None for none."""
    return _json.encode([commands[at] for at in positions]) if positions else None


def _has_key(command: Command) -> bool:
    return (isinstance(command, Reserve) and command.claim is not None) or (
        isinstance(command, Settle) and command.kept is not None
    )
