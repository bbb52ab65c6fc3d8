"""One request's money: reserved in the background, topped up in time, settled once.

A hard-capped tenant's reservation covers a bounded stretch of a long answer, and is raised
before three quarters of it are used. Invariant: output stays within what is reserved, give
or take what the engine produces before it hears of an abort.
"""

import asyncio

import msgspec

from core.errors import Code, Refusal
from core.metering import (
    AttemptTotals,
    LedgerRefused,
    RequestTimings,
    Reserve,
    Settle,
    TopUp,
)
from core.money import EndCause, Price, worst_case_micro
from gateway.books import Books
from gateway.routing import Size

TOP_UP_AT = (3, 4)  # of the output tokens reserved
SLACK_TOKENS = 16  # for each choice: produced before an abort is heard
AWAY_RETRY_S = 1.0


class HoldLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`first_output_tokens` bounds the first reservation of hard-capped tenants."""

    first_output_tokens: int = 1_024


class Hold:
    """`asked` is complete but for its amount."""

    def __init__(
        self,
        books: Books,
        asked: Reserve,
        *,
        price: Price,
        size: Size,
        hard_capped: bool,
        limits: HoldLimits,
    ) -> None:
        self._books = books
        self._price = price
        self._size = size
        self._hard_capped = hard_capped
        self._reserved_tokens = size.output_tokens
        if hard_capped:
            self._reserved_tokens = min(size.output_tokens, limits.first_output_tokens)
        self._asked = msgspec.structs.replace(asked, amount_micro=self._amount())
        self._reserving = asyncio.create_task(books.reserve(self._asked, hard_capped=hard_capped))
        self._topping_up: asyncio.Task[None] | None = None
        self._closed = False

    async def held(self) -> LedgerRefused | None:
        """Wait for the reservation; a caller that leaves does not stop it."""
        answer = await asyncio.shield(self._reserving)
        return answer if isinstance(answer, LedgerRefused) else None

    def spent(self, output_tokens: int) -> bool:
        """Hear how much was produced in all; whether the answer must end here.

        Starts a top-up when it is time for one.
        """
        whole = self._size.output_tokens
        if self._reserved_tokens >= whole:
            return False
        part, of = TOP_UP_AT
        if self._topping_up is None and output_tokens * of >= self._reserved_tokens * part:
            self._topping_up = asyncio.create_task(self._top_up())
        slack = min(SLACK_TOKENS, self._reserved_tokens // 8) * self._size.choices
        return output_tokens + slack >= self._reserved_tokens

    async def release(self, ended_ms: int) -> None:
        """Nothing was done for it."""
        await self.close(
            cause=EndCause.NOT_STARTED,
            attempts=(),
            delivered_tokens=0,
            timings=RequestTimings(),
            ended_ms=ended_ms,
        )

    async def close(
        self,
        *,
        cause: EndCause,
        attempts: tuple[AttemptTotals, ...],
        delivered_tokens: int,
        timings: RequestTimings,
        ended_ms: int,
    ) -> None:
        """Settle what was reserved; nothing, if that was refused."""
        assert not self._closed
        self._closed = True
        if self._topping_up is not None:
            self._topping_up.cancel()
        if await self.held() is None:
            word = Settle(
                request_id=self._asked.request_id,
                tenant_id=self._asked.tenant_id,
                cause=cause,
                attempts=attempts,
                delivered_tokens=delivered_tokens,
                timings=timings,
                ended_ms=ended_ms,
            )
            await self._books.settle(word)

    async def _top_up(self) -> None:
        """Double what is reserved. A refusal stays; with the ledger away, ask again."""
        tokens = min(self._size.output_tokens, 2 * self._reserved_tokens)
        more = TopUp(
            request_id=self._asked.request_id,
            tenant_id=self._asked.tenant_id,
            total_micro=self._amount(tokens),
        )
        answer = await self._books.top_up(more)
        while isinstance(answer, LedgerRefused) and answer.reason == "away":
            await asyncio.sleep(AWAY_RETRY_S)
            answer = await self._books.top_up(more)
        if not isinstance(answer, LedgerRefused):
            self._reserved_tokens = tokens
            self._topping_up = None

    def _amount(self, tokens: int | None = None) -> int:
        return worst_case_micro(
            self._price,
            prompt_tokens=self._size.prompt_tokens,
            output_tokens=self._reserved_tokens if tokens is None else tokens,
        )


def ledger_refusal(refused: LedgerRefused, currency: str) -> Refusal:
    """A refusal to hold money, explained with the sums that led to it."""
    match refused.reason:
        case "hard_cap":
            cap, spent, reserved = (
                _amount_text(micro, currency)
                for micro in (
                    refused.hard_cap_micro,
                    refused.posted_micro,
                    refused.reserved_micro,
                )
            )
            return Refusal(
                code=Code.QUOTA,
                message=f"Your account's budget of {cap} does not cover this request: "
                f"{spent} is spent and {reserved} is reserved by requests under way.",
            )
        case "away":
            return Refusal(
                code=Code.UNAVAILABLE,
                message="Your budget cannot be checked at the moment. Please retry.",
            )
        case _:
            return Refusal(code=Code.INTERNAL, message="The request could not be accounted for.")


def _amount_text(micro: int, currency: str) -> str:
    return f"{micro // 1_000_000}.{micro % 1_000_000:06d} {currency}"
