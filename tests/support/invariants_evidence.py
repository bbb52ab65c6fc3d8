"""What callers of the ledger know from its answers, beside what the database holds.

A command is known (it was answered), or in doubt (its process died first). What is known must
be there; what is in doubt may be, once.
"""

from collections import Counter

import msgspec

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
from core.money import Price, worst_case_micro
from tests.support.invariants_view import Row, View

PROMPT_TOKENS_MAX = 40  # that any witness in these tests speaks of
EXPORTS_MAX = 5  # kept of each tenant

Command = Reserve | TopUp | Settle | Witness | Adjust
Answer = Reserved | LedgerRefused | Settled | Adjusted | None


class Repeat(msgspec.Struct, frozen=True):
    """The same words, several times with nothing between, and every answer to them."""

    command: Command
    answers: list[Answer]


class Reuse(msgspec.Struct, frozen=True):
    """Another command under an id that was taken, and the entries of its account around it."""

    command: Reserve | Adjust
    answer: Answer
    entries_before: int
    entries_after: int


class Evidence:
    """Grows with every answer; the checks in `invariants` hold it against a view."""

    def __init__(self) -> None:
        self.in_doubt: list[Command] = []  # not answered yet
        self.reserved: dict[str, Reserve] = {}
        self.perhaps_reserved: dict[str, Reserve] = {}
        self.asked_micro: Counter[str] = Counter()  # the largest total asked for a request
        self.refused: dict[str, LedgerRefused] = {}
        self.asked_again: list[tuple[str, LedgerRefused, Answer]] = []  # after a refusal
        self.repeats: list[Repeat] = []
        self.reuses: list[Reuse] = []
        self.ended: set[str] = set()
        self.perhaps_ended: set[str] = set()
        self.bills: dict[str, tuple[int, int]] = {}  # at least, at most
        self.adjusted: dict[str, Adjust] = {}
        self.perhaps_adjusted: dict[str, Adjust] = {}
        self.over: dict[tuple[str, ...], int] = {}  # limits set under what was used, and that
        self.entries: dict[str, list[Row]] = {}
        self.exports: dict[str, dict[int, bytes]] = {}  # by tenant and its last entry
        self.leases: dict[str, list[tuple[int, int]]] = {}  # when heard, and good until, in µs
        self.lease_us_default = 0
        self.immutable_changed: list[str] = []
        self.faults: Counter[str] = Counter()
        self.quiesced = False

    def hear(self, command: Command, answer: Answer) -> None:
        """An answer came."""
        if command in self.in_doubt:
            self.in_doubt.remove(command)
        match command:
            case Reserve():
                self._hear_reserve(command, answer)
            case TopUp() if isinstance(answer, Reserved):
                self._asked(command.request_id, command.total_micro)
            case Settle() if isinstance(answer, Settled):
                self._hear_settled(command.request_id, answer)
            case Witness() if isinstance(answer, Settled):
                self._bill(command.request_id, answer)
            case Adjust() if isinstance(answer, Adjusted):
                self.perhaps_adjusted.pop(command.id, None)
                self.adjusted[command.id] = command
            case _:
                pass

    def doubt(self, command: Command, worst_micro: int) -> None:
        """No answer came: it may have been done."""
        self.in_doubt.append(command)
        match command:
            case Reserve():
                if command.request_id not in self.reserved:
                    self.perhaps_reserved[command.request_id] = command
                self._asked(command.request_id, command.amount_micro)
            case TopUp():
                self._asked(command.request_id, command.total_micro)
            case Settle() | Witness():
                self.bills[command.request_id] = (0, worst_micro)
                if isinstance(command, Settle) and command.request_id not in self.ended:
                    self.perhaps_ended.add(command.request_id)
            case Adjust():
                if command.id not in self.adjusted:
                    self.perhaps_adjusted[command.id] = command

    def swept(self, request_id: str, worst_micro: int) -> None:
        """The sweeper has ended it, and does not tell us its bill."""
        self.ended.add(request_id)
        self.perhaps_ended.discard(request_id)
        self.bills[request_id] = (0, worst_micro)

    def worst_micro(self, request_id: str, prices: dict[str, Price]) -> int:
        """The most that a request may be billed, by what it asked."""
        asked = self.reserved.get(request_id) or self.perhaps_reserved.get(request_id)
        if asked is None or asked.price_id not in prices:
            return 0
        return worst_case_micro(
            prices[asked.price_id],
            prompt_tokens=PROMPT_TOKENS_MAX,
            output_tokens=asked.max_tokens * asked.choices,
        )

    def remember(self, view: View, exports: dict[str, bytes]) -> None:
        """What may not change any more, as it was found: entries, and now and then an export."""
        self.entries = view.entries
        for tenant, export in exports.items():
            taken = self.exports.setdefault(tenant, {})
            if len(taken) < EXPORTS_MAX:
                taken.setdefault(len(view.entries[tenant]), export)

    def credit(self, tenant: str) -> tuple[int, int]:
        """The least and the most that the tenant's credit can be."""
        known = sum(self._credits(self.adjusted, tenant))
        doubtful = self._credits(self.perhaps_adjusted, tenant)
        return (
            known + sum(amount for amount in doubtful if amount < 0),
            known + sum(amount for amount in doubtful if amount > 0),
        )

    def _credits(self, words: dict[str, Adjust], tenant: str) -> list[int]:
        return [
            word.amount_micro
            for word in words.values()
            if word.tenant_id == tenant and word.kind is AdjustmentKind.CREDIT
        ]

    def _hear_reserve(self, command: Reserve, answer: Answer) -> None:
        request_id = command.request_id
        if request_id in self.refused:
            self.asked_again.append((request_id, self.refused[request_id], answer))
        if isinstance(answer, Reserved):
            self.perhaps_reserved.pop(request_id, None)
            self.reserved.setdefault(request_id, command)
            self._asked(request_id, command.amount_micro)
        elif isinstance(answer, LedgerRefused) and answer.reason != "id_reused":
            self.perhaps_reserved.pop(request_id, None)
            self.refused.setdefault(request_id, answer)

    def _hear_settled(self, request_id: str, answer: Settled) -> None:
        if request_id in self.reserved:
            self.perhaps_ended.discard(request_id)
            self.ended.add(request_id)
        elif request_id in self.perhaps_reserved:
            self.perhaps_ended.add(request_id)  # or its id was closed before it was reserved
        self._bill(request_id, answer)

    def _asked(self, request_id: str, total_micro: int) -> None:
        self.asked_micro[request_id] = max(self.asked_micro[request_id], total_micro)

    def _bill(self, request_id: str, answer: Settled) -> None:
        self.bills[request_id] = (answer.billed_micro, answer.billed_micro)
