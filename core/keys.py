"""Every idempotency key of a book: `core.idempotency`'s rules over rows of requests."""

from collections.abc import Mapping

import msgspec

from core.idempotency import KeyRefused, KeyRow, claimed, refused
from core.metering import Reserve, Settle
from core.money import BILLS_TOKENS
from core.requests import Row

KeyName = tuple[str, str, str]  # tenant, scope, key


class Keys:
    """By tenant, scope and key."""

    def __init__(self) -> None:
        self.rows: dict[KeyName, KeyRow] = {}

    def refused(
        self, asked: Reserve, requests: Mapping[str, Row], *, now_ms: int
    ) -> KeyRefused | None:
        """Why its claim stands back; None for one that may have its key, or has no claim."""
        if asked.claim is None:
            return None
        row = self.rows.get((asked.tenant_id, asked.claim.scope, asked.claim.key))
        is_open = row is not None and requests[row.request_id].cause is None
        return refused(row, asked.claim, is_open=is_open, now_ms=now_ms)

    def claim(self, asked: Reserve, requests: Mapping[str, Row], *, now_ms: int) -> None:
        """Give the key to a request that was not refused."""
        if asked.claim is None:
            return
        name = (asked.tenant_id, asked.claim.scope, asked.claim.key)
        row = self.rows.get(name)
        may_cost = row is not None and _may_cost(requests[row.request_id])
        self.rows[name] = claimed(
            row, asked.claim, asked.request_id, may_cost=may_cost, now_ms=now_ms
        )

    def answer(self, word: Settle) -> tuple[str, ...]:
        """Keep its answer, if the key is still its own; whose bills that takes back."""
        if word.kept is None:
            return ()
        name = (word.tenant_id, word.kept.scope, word.kept.key)
        row = self.rows.get(name)
        if row is None or row.request_id != word.request_id or row.answer is not None:
            return ()
        self.rows[name] = msgspec.structs.replace(row, answer=word.kept.answer, superseded=())
        return row.superseded


def _may_cost(row: Row) -> bool:
    """Whether it is billed, or may be once a witness speaks.

    A gateway's word that it failed, or never began, is the last one about its bill.
    """
    return row.cause is None or row.provisional or BILLS_TOKENS[row.cause]
