"""Idempotency keys as the edge asks about them, in Postgres.

A key is looked up before anything else is done for its request, so that a repeat costs no limit,
no prompt and no money. The look-up decides nothing alone: of two requests that both see a free
key one has it, where its money is held. With Postgres away a request with a key is refused.
"""

import logging
from collections.abc import Callable

from core.errors import Refusal, RefusedError
from core.idempotency import Claim
from core.secrets import CannotOpenError
from gateway.idempotency import AWAY, UNREADABLE, claim_of, key_of, told_of
from gateway.replay import Keeping, KeptAnswer, read_answer
from gateway.sealing import AnswerSeal
from store.idempotency import find
from store.postgres import Postgres, StoreAwayError

_log = logging.getLogger(__name__)

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
        seal: AnswerSeal,
    ) -> None:
        self._postgres = postgres
        self._kept_ms = kept_ms
        self._bytes_max = bytes_max
        self._new_holder = new_holder
        self._seal = seal

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
        answer = self._read(tenant_id, claim, told)
        if answer is None:
            raise RefusedError(UNREADABLE)
        return answer

    def keeping(self, tenant_id: str, claim: Claim, created_ms: int) -> Keeping:
        """For a request that goes on to claim it."""

        def seal(answer: bytes) -> bytes:
            return self._seal.seal(answer, *_place(tenant_id, claim))

        return Keeping(claim, bytes_max=self._bytes_max, created_ms=created_ms, seal=seal)

    def _read(self, tenant_id: str, claim: Claim, stored: bytes) -> KeptAnswer | None:
        try:
            return read_answer(self._seal.open(stored, *_place(tenant_id, claim)))
        except CannotOpenError as error:
            facts = {"tenant": tenant_id, "error": str(error)}
            _log.error("a kept answer cannot be opened", extra={"facts": facts})
            return None


def _place(tenant_id: str, claim: Claim) -> tuple[str, ...]:
    return ("idempotency", tenant_id, claim.scope, claim.key)
