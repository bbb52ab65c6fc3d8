"""One request's money: `gateway.relay.hold` in virtual time, by the same decisions.

Under a hard limit the reservation covers a stretch of the answer and is raised in time, by what
there is room for.
"""

import msgspec

from core.metering import LedgerRefused, Reserve, Reserved, Settle, TopUp
from core.money import worst_case_micro
from gateway.relay.budget import affordable_tokens, first_ask, next_ask, slack_tokens
from gateway.routing import Size
from simulator.bank import PRICE
from simulator.books import Books
from simulator.tasks import Process, Task, sleep

FIRST_OUTPUT_TOKENS = 8
TOP_UP_AT = (3, 4)  # of the output tokens reserved
SHORT_PAUSE_MS = 250
AWAY_PAUSE_MS = 1_000


class Hold:
    """`asked` is complete but for its amounts."""

    def __init__(
        self, gateway: Process, books: Books, asked: Reserve, size: Size, *, hard_capped: bool
    ) -> None:
        self._gateway = gateway
        self._books = books
        self._size = size
        self._tokens = size.output_tokens  # that may be produced for what is held
        if hard_capped:
            amounts = msgspec.structs.asdict(first_ask(PRICE, size, FIRST_OUTPUT_TOKENS))
        else:
            whole = worst_case_micro(
                PRICE, prompt_tokens=size.prompt_tokens, output_tokens=size.output_tokens
            )
            amounts = {"amount_micro": whole}
        self._asked = msgspec.structs.replace(asked, **amounts)
        self._reserving = gateway.spawn(self._reserve(hard_capped=hard_capped)).result
        self._topping_up: Task[None] | None = None

    async def held(self) -> LedgerRefused | None:
        """Wait for the reservation."""
        answer = await self._reserving
        return answer if isinstance(answer, LedgerRefused) else None

    def spent(self, output_tokens: int) -> bool:
        """Hear how much was produced in all; whether the answer must end here."""
        if self._tokens >= self._size.output_tokens:
            return False
        part, of = TOP_UP_AT
        if self._topping_up is None and output_tokens * of >= self._tokens * part:
            self._topping_up = self._gateway.spawn(self._top_up())
        return output_tokens + slack_tokens(self._size, self._tokens) >= self._tokens

    async def close(self, word: Settle) -> None:
        """Settle what was reserved; nothing, if that was refused."""
        if self._topping_up is not None:
            self._topping_up.stop()
        if await self.held() is None:
            await self._books.settle(word)

    async def _reserve(self, *, hard_capped: bool) -> Reserved | LedgerRefused:
        answer = await self._books.reserve(self._asked, hard_capped=hard_capped)
        if hard_capped and isinstance(answer, Reserved):
            self._tokens = affordable_tokens(PRICE, self._size, answer.reserved_micro)
        return answer

    async def _top_up(self) -> None:
        ask = next_ask(PRICE, self._size, self._tokens)
        more = TopUp(
            request_id=self._asked.request_id,
            tenant_id=self._asked.tenant_id,
            total_micro=ask.amount_micro,
            floor_micro=ask.floor_micro,
        )
        answer = await self._books.top_up(more)
        if isinstance(answer, Reserved):
            self._tokens = affordable_tokens(PRICE, self._size, answer.reserved_micro)
        pause_ms = _pause_ms(answer, ask.amount_micro)
        if pause_ms is not None:
            await sleep(self._gateway.clock, pause_ms, f"{self._gateway.name} top up again")
            self._topping_up = None


def _pause_ms(answer: Reserved | LedgerRefused, asked_micro: int) -> int | None:
    if isinstance(answer, Reserved):
        return 0 if answer.reserved_micro >= asked_micro else SHORT_PAUSE_MS
    return {"hard_cap": SHORT_PAUSE_MS, "away": AWAY_PAUSE_MS}.get(answer.reason)
