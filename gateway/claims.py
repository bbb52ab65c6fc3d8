"""Idempotency keys as the edge asks about them, in Postgres.

A key is looked up before anything else is done for its request, so that a repeat costs no limit,
no prompt and no money. The look-up decides nothing alone: of two requests that both see a free
key one has it, where its money is held. With Postgres away a request with a key is refused.
"""

from collections.abc import Callable

from core.errors import Refusal, RefusedError
from core.idempotency import Claim
from gateway.idempotency import AWAY, UNREADABLE, claim_of, key_of, told_of
from gateway.replay import Keeping, KeptAnswer, read_answer
from store.idempotency import find
from store.postgres import Postgres, StoreAwayError

Headers = list[tuple[bytes, bytes]]


class Claims:
    """One for each gateway. `new_holder` names a request apart from its ids."""

    def __init__(
        self,
        postgres: Postgres,
        *,
        kept_ms: int,
        bytes_max: int,
        new_holder: Callable[[], str],
    ) -> None:
        self._postgres = postgres
        self._kept_ms = kept_ms
        self._bytes_max = bytes_max
        self._new_holder = new_holder

    def claim(self, headers: Headers, *, method: str, path: str, body: bytes) -> Claim | None:
        """What a request with the header claims. Raises RefusedError for a bad key."""
        key = key_of(headers)
        if key is None:
            return None
        return claim_of(
            key,
            headers,
            scope=f"{method} {path}",
            body=body,
            kept_s=self._kept_ms // 1000,
            holder=self._new_holder(),
        )

    async def told(self, tenant_id: str, claim: Claim) -> KeptAnswer | None:
        """The answer that is kept; None where the key is free. Raises RefusedError."""
        try:
            async with self._postgres.connection() as conn:
                state = await find(conn, tenant_id=tenant_id, scope=claim.scope, key=claim.key)
        except StoreAwayError as error:
            raise RefusedError(AWAY) from error
        if state is None:
            return None
        told = told_of(
            claim, fingerprint=state.fingerprint, answer=state.answer, is_open=state.is_open
        )
        if isinstance(told, Refusal):
            raise RefusedError(told)
        if told is None:
            return None
        answer = read_answer(told)
        if answer is None:
            raise RefusedError(UNREADABLE)
        return answer

    def keeping(self, claim: Claim, created_ms: int) -> Keeping:
        """For a request that goes on to claim it."""
        return Keeping(claim, bytes_max=self._bytes_max, created_ms=created_ms)
