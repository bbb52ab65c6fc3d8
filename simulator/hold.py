"""One request's money: `gateway.relay.hold` in virtual time, with smaller numbers.

A hard-capped tenant's reservation covers a stretch of the answer and is raised in time.
"""

import msgspec

from core.metering import LedgerRefused, Reserve, Reserved, Settle, TopUp
from core.money import worst_case_micro
from gateway.routing import Size
from simulator.bank import PRICE
from simulator.books import Books
from simulator.tasks import Process, Task, sleep

FIRST_OUTPUT_TOKENS = 8
TOP_UP_AT = (3, 4)  # of the output tokens reserved
SLACK_TOKENS = 2  # for each choice: produced before an abort is heard
AWAY_RETRY_MS = 1_000


class Hold:
    """`asked` is complete but for its amount."""

    def __init__(
        self, gateway: Process, books: Books, asked: Reserve, size: Size, *, hard_capped: bool
    ) -> None:
        self._gateway = gateway
        self._books = books
        self._size = size
        self._reserved_tokens = size.output_tokens
        if hard_capped:
            self._reserved_tokens = min(size.output_tokens, FIRST_OUTPUT_TOKENS)
        self._asked = msgspec.structs.replace(asked, amount_micro=self._amount())
        reserving = books.reserve(self._asked, hard_capped=hard_capped)
        self._reserving = gateway.spawn(reserving).result
        self._topping_up: Task[None] | None = None

    async def held(self) -> LedgerRefused | None:
        """Wait for the reservation."""
        answer = await self._reserving
        return answer if isinstance(answer, LedgerRefused) else None

    def spent(self, output_tokens: int) -> bool:
        """Hear how much was produced in all; whether the answer must end here."""
        if self._reserved_tokens >= self._size.output_tokens:
            return False
        part, of = TOP_UP_AT
        if self._topping_up is None and output_tokens * of >= self._reserved_tokens * part:
            self._topping_up = self._gateway.spawn(self._top_up())
        slack = min(SLACK_TOKENS, self._reserved_tokens // 4) * self._size.choices
        return output_tokens + slack >= self._reserved_tokens

    async def close(self, word: Settle) -> None:
        """Settle what was reserved; nothing, if that was refused."""
        if self._topping_up is not None:
            self._topping_up.stop()
        if await self.held() is None:
            await self._books.settle(word)

    async def _top_up(self) -> None:
        tokens = min(self._size.output_tokens, 2 * self._reserved_tokens)
        more = TopUp(
            request_id=self._asked.request_id,
            tenant_id=self._asked.tenant_id,
            total_micro=self._amount(tokens),
        )
        answer = await self._books.top_up(more)
        while answer == LedgerRefused(reason="away"):
            await sleep(self._gateway.clock, AWAY_RETRY_MS, f"{self._gateway.name} top up again")
            answer = await self._books.top_up(more)
        if isinstance(answer, Reserved):
            self._reserved_tokens = tokens
            self._topping_up = None

    def _amount(self, tokens: int | None = None) -> int:
        output_tokens = self._reserved_tokens if tokens is None else tokens
        return worst_case_micro(
            PRICE, prompt_tokens=self._size.prompt_tokens, output_tokens=output_tokens
        )
