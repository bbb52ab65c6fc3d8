"""Answers given again to exact repeats, as the relay asks about them: policies, names, slots.

Policies are polled; with Postgres away the last ones hold. What goes wrong here is a miss.
"""

import msgspec

from core.protocol import Generate
from core.secrets import CannotOpenError
from gateway.answer_cache import Asked, name_of
from gateway.conversation import Conversation
from gateway.metrics import Metrics
from gateway.replay import KeptAnswer, read_answer
from gateway.sealing import AnswerSeal
from store.answer_cache import AnswerPolicy, AnswerSlots, policies
from store.postgres import Postgres


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One request's place in the cache."""

    tenant_id: str
    name: bytes
    ttl_s: int
    policy: AnswerPolicy
    reads: bool  # or it is there to be made anew


class CachedAnswers:
    """One for each gateway. `secret` keys the names."""

    def __init__(
        self,
        postgres: Postgres,
        slots: AnswerSlots,
        metrics: Metrics,
        *,
        secret: bytes,
        bytes_max: int,
        seal: AnswerSeal,
    ) -> None:
        self._postgres = postgres
        self._slots = slots
        self._metrics = metrics
        self._secret = secret
        self._seal = seal
        self._policies: dict[str, AnswerPolicy] = {}
        self.bytes_max = bytes_max

    async def poll(self) -> None:
        """Raises StoreAwayError."""
        async with self._postgres.connection() as conn:
            self._policies = await policies(conn)

    def entry(
        self, tenant_id: str, asked: Asked, conversation: Conversation, message: Generate
    ) -> Entry | None:
        """None where the tenant, or the request, has not opted in."""
        policy = self._policies.get(tenant_id)
        if policy is None or asked.wish == "off":
            return None
        return Entry(
            tenant_id=tenant_id,
            name=name_of(self._secret, tenant_id, conversation, message),
            ttl_s=min(policy.ttl_s, asked.ttl_s or policy.ttl_s),
            policy=policy,
            reads=asked.wish == "on",
        )

    async def find(self, entry: Entry) -> KeptAnswer | None:
        """What was told before, if it is still there and may be read."""
        found = await self._slots.find(entry.tenant_id, entry.name) if entry.reads else None
        kept = None if found is None else self._read(entry, found)
        self._metrics.answer_cache.labels("miss" if kept is None else "hit").inc()
        return kept

    async def keep(self, entry: Entry, answer: bytes) -> None:
        """For the next that asks the same."""
        stored = self._seal.seal(answer, *_place(entry))
        await self._slots.keep(entry.tenant_id, entry.name, stored, ttl_s=entry.ttl_s)

    def _read(self, entry: Entry, stored: bytes) -> KeptAnswer | None:
        try:
            return read_answer(self._seal.open(stored, *_place(entry)))
        except CannotOpenError:
            return None  # of a key that is gone: it is made anew


def _place(entry: Entry) -> tuple[str, ...]:
    return ("answer", entry.tenant_id, entry.name.hex())
