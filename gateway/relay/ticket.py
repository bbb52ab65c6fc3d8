"""One request's standing with the dispatcher: admitted, placed, and let go exactly once.

The dispatcher's `finish` is for work that an engine did; whatever else happens, `cancel`
gives everything back.
"""

from collections.abc import Awaitable

from core.errors import Code, Refusal
from core.scopes import scope_words
from core.tickets import Admit, Admitted, Arm, Dropped, Headroom, LimitRefused, Placed, Stale
from store.dispatch import Dispatch

LIMIT_NAMES = {
    "requests": "requests per minute",
    "input_tokens": "input tokens per minute",
    "output_tokens": "output tokens per minute",
    "concurrency": "requests at the same time",
}


class Ticket:
    """`asked` names the request; nothing is charged before `admit`."""

    def __init__(self, dispatch: Dispatch, asked: Admit) -> None:
        self._dispatch = dispatch
        self._asked = asked
        self._pool: str | None = None
        self._placed: Placed | None = None
        self._closed = False
        self.headroom: Headroom | None = None
        self.refused: LimitRefused | None = None  # what `admit` was told, if it was that

    async def admit(self) -> Refusal | Stale | None:
        """Charge the tenant's limits; None when that was done."""
        answer = await self._dispatch.admit(self._asked)
        match answer:
            case Admitted(headroom=headroom):
                self.headroom = headroom
                return None
            case LimitRefused(headroom=headroom):
                self.headroom, self.refused = headroom, answer
                return limit_refusal(answer)
            case Stale():
                return answer

    async def place(self, arm: Arm) -> Placed | Dropped:
        """Wait for a replica; a caller that leaves leaves the queue."""
        self._pool = arm.pool
        self._placed = None
        if arm.at_head:
            answer = await self._dispatch.requeue(arm)
        else:
            answer = await self._dispatch.place(arm)
        if isinstance(answer, Placed):
            self._placed = answer
        return answer

    def produced(self, output_tokens: int) -> None:
        """Tell of output as it comes: all of it so far."""
        self._dispatch.charge_output(
            tenant=self._asked.tenant, ticket=self._asked.ticket, tokens=output_tokens
        )

    def finish(self, *, input_tokens: int, prefix_hashes: tuple[str, ...]) -> Awaitable[None]:
        """The engine's last word: what was read, cache aside; or an outside provider's.

        Follows on its own; whoever wants to may wait for it.
        """
        assert not self._closed
        self._closed = True
        return self._dispatch.finish(
            ticket=self._asked.ticket,
            pool=self._pool,
            tenant=self._asked.tenant,
            replica=self._placed.replica if self._placed is not None else "",
            actual_input_tokens=input_tokens,
            prefix_hashes=prefix_hashes,
        )

    def cancel(self) -> Awaitable[None]:
        """Give back whatever is held or charged. Follows on its own."""
        assert not self._closed
        self._closed = True
        return self._dispatch.cancel(
            ticket=self._asked.ticket, pool=self._pool, tenant=self._asked.tenant
        )


def limit_refusal(refused: LimitRefused) -> Refusal:
    """429, with the wait that the dispatcher computed: until no scope stands in the way."""
    name = LIMIT_NAMES.get(refused.reason, refused.reason)
    whose, of_what = scope_words(refused.scope)
    return Refusal(
        code=Code.RATE_LIMITED,
        message=f"{whose} is over its limit of {name}{of_what}.",
        retry_after_ms=refused.retry_after_ms,
    )
