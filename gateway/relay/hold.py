"""One request's money: reserved in the background, topped up in time, settled once.

Under a hard limit the reservation covers a bounded stretch of a long answer, and is raised
before three quarters of it are used, by what there is room for. Invariant: output stays within
what is reserved, give or take what the engine produces before it hears of an abort; that is
ours to bear, for the ledger bills nothing over what it holds.
"""

import asyncio
from contextlib import suppress

import msgspec

from core.errors import Code, Refusal
from core.metering import (
    AttemptTotals,
    LedgerRefused,
    RequestTimings,
    Reserve,
    Reserved,
    Settle,
    TopUp,
)
from core.money import EndCause, Price
from gateway.books import Books
from gateway.idempotency import REFUSALS
from gateway.relay.budget import (
    affordable_tokens,
    first_ask,
    next_ask,
    slack_tokens,
    whole_ask,
    whole_micro,
)
from gateway.replay import Keeping
from gateway.routing import Size

TOP_UP_AT = (3, 4)  # of the output tokens reserved
SHORT_PAUSE_S = 0.25  # after a top-up that held less than was asked for: others may let go
AWAY_PAUSE_S = 1.0


_LIMITS = {
    "credit": "Your account's prepaid credit of {}",
    "account.total": "Your account's budget of {}",
    "account.day": "Your account's budget of {} for this day (UTC)",
    "account.month": "Your account's budget of {} for this month (UTC)",
    "key.total": "This API key's budget of {}",
    "key.day": "This API key's budget of {} for this day (UTC)",
    "key.month": "This API key's budget of {} for this month (UTC)",
}


class HoldLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`first_output_tokens` bounds the first reservation under a hard limit.

    `answer_wait_s` is for a top-up, by an answer that would end without it.
    """

    first_output_tokens: int = 1_024
    answer_wait_s: float = 1.0


class Hold:
    """`asked` is complete but for its amounts.

    `whole` has all of the answer covered before it begins, or nothing.
    """

    def __init__(
        self,
        books: Books,
        asked: Reserve,
        *,
        price: Price,
        size: Size,
        hard_capped: bool,
        limits: HoldLimits,
        keeping: Keeping | None = None,
        whole: bool = False,
    ) -> None:
        self._books = books
        self._keeping = keeping
        self._price = price
        self._size = size
        self._limits = limits
        self._tokens = size.output_tokens  # that may be produced for what is held
        if hard_capped:
            first = first_ask(price, size, limits.first_output_tokens)
            ask = whole_ask(price, size) if whole else first
            amounts = msgspec.structs.asdict(ask)
        else:
            amounts = {"amount_micro": whole_micro(price, size, size.output_tokens)}
        self._asked = msgspec.structs.replace(asked, **amounts)
        self._reserving = asyncio.create_task(self._reserve(hard_capped=hard_capped))
        self._topping_up: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self._answered.set()  # unless a top-up is on its way
        self._closed = False

    async def held(self) -> LedgerRefused | None:
        """Wait for the reservation; a caller that leaves does not stop it."""
        answer = await asyncio.shield(self._reserving)
        return answer if isinstance(answer, LedgerRefused) else None

    async def spent(self, output_tokens: int) -> bool:
        """Hear how much was produced in all; whether the answer must end here.

        Starts a top-up when it is time for one, and waits for it only where the answer would
        end without it: meanwhile nothing is passed on that may never be paid.
        """
        if self._tokens >= self._size.output_tokens:
            return False
        part, of = TOP_UP_AT
        if self._topping_up is None and output_tokens * of >= self._tokens * part:
            self._answered.clear()
            self._topping_up = asyncio.create_task(self._top_up())
        if self._lasts(output_tokens):
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.answer_wait_s):
                await self._answered.wait()
        return not self._lasts(output_tokens)

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
                kept=self._keeping.kept(cause) if self._keeping is not None else None,
            )
            await self._books.settle(word)

    def _lasts(self, output_tokens: int) -> bool:
        return output_tokens + slack_tokens(self._size, self._tokens) < self._tokens

    async def _reserve(self, *, hard_capped: bool) -> Reserved | LedgerRefused:
        answer = await self._books.reserve(self._asked, hard_capped=hard_capped)
        if hard_capped and isinstance(answer, Reserved):
            self._tokens = affordable_tokens(self._price, self._size, answer.reserved_micro)
        return answer

    async def _top_up(self) -> None:
        """Once; then the ledger is left alone for a while, unless it held all that was asked."""
        ask = next_ask(self._price, self._size, self._tokens)
        more = TopUp(
            request_id=self._asked.request_id,
            tenant_id=self._asked.tenant_id,
            total_micro=ask.amount_micro,
            floor_micro=ask.floor_micro,
        )
        answer = await self._books.top_up(more)
        if isinstance(answer, Reserved):
            self._tokens = affordable_tokens(self._price, self._size, answer.reserved_micro)
        self._answered.set()
        pause_s = _pause_s(answer, ask.amount_micro)
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            self._topping_up = None


def _pause_s(answer: Reserved | LedgerRefused, asked_micro: int) -> float | None:
    """Until the ledger may be asked for more; None for never again."""
    if isinstance(answer, Reserved):
        return 0.0 if answer.reserved_micro >= asked_micro else SHORT_PAUSE_S
    return {"hard_cap": SHORT_PAUSE_S, "away": AWAY_PAUSE_S}.get(answer.reason)


def ledger_refusal(refused: LedgerRefused, currency: str) -> Refusal:
    """A refusal to hold money, explained with the sums that led to it."""
    match refused.reason:
        case "key_open" | "key_done" | "key_reused" as reason:
            return REFUSALS[reason]
        case "hard_cap":
            cap, spent, reserved, fits = (
                _amount_text(micro, currency)
                for micro in (
                    refused.hard_cap_micro,
                    refused.posted_micro,
                    refused.reserved_micro,
                    refused.fits_micro,
                )
            )
            limit = _LIMITS.get(refused.limit, _LIMITS["account.total"]).format(cap)
            return Refusal(
                code=Code.QUOTA,
                message=f"{limit} does not cover this request: {spent} is spent and {reserved} "
                f"is reserved by requests under way. A request of at most {fits} would have "
                "fitted.",
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
