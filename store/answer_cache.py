"""Answers that may be given again: whose, as Postgres says, and the answers themselves, in Valkey.

The cache is direct-mapped: a tenant has so many slots and an answer one of them, which it takes
from whatever was there. So it is bounded without anybody counting. With Valkey away, or slow,
nothing is found and nothing is kept.
"""

from contextlib import suppress
from typing import Literal

import msgspec

from store.keys import answer_key
from store.postgres import Connection
from store.queries import load
from store.redis_client import RedisAwayError, RedisClient, RedisReplyError

NAME_BYTES = 32
CALL_TIMEOUT_MS = 100  # a request waits for it, and a miss is no harm

_sql = load("answer_cache")


class AnswerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Of a tenant that has opted in.

    `charge` is what a repeat costs: nothing, or its prompt as if an engine's cache had held it.
    """

    ttl_s: int
    charge: Literal["free", "cached_input"]


class AnswerSlots:
    """Raises nothing."""

    def __init__(self, redis_url: str, *, slots: int) -> None:
        self._slots = slots
        self._client = RedisClient(redis_url, timeout_ms=CALL_TIMEOUT_MS)

    def start(self) -> None:
        """Begin to connect."""
        self._client.start()

    async def close(self) -> None:
        """Drop the connection."""
        await self._client.close()

    async def find(self, tenant_id: str, name: bytes) -> bytes | None:
        """The answer of this name."""
        try:
            found = await self._client.call(b"GET", self._key(tenant_id, name))
        except (RedisAwayError, RedisReplyError, TimeoutError):
            return None
        if not isinstance(found, bytes) or found[:NAME_BYTES] != name:
            return None
        return found[NAME_BYTES:]

    async def keep(self, tenant_id: str, name: bytes, answer: bytes, *, ttl_s: int) -> None:
        """In its slot, for so long."""
        with suppress(RedisAwayError, RedisReplyError, TimeoutError):
            await self._client.call(b"SET", self._key(tenant_id, name), name + answer, b"EX", ttl_s)

    def _key(self, tenant_id: str, name: bytes) -> bytes:
        return answer_key(tenant_id, int.from_bytes(name[:8], "big") % self._slots)


async def policies(conn: Connection) -> dict[str, AnswerPolicy]:
    """Of every tenant that has opted in."""
    cursor = await conn.execute(_sql["policies"])
    return {
        tenant_id: AnswerPolicy(ttl_s=ttl_s, charge=charge)
        for tenant_id, ttl_s, charge in await cursor.fetchall()
    }


async def policy_of(conn: Connection, tenant_id: str) -> AnswerPolicy | None:
    """None for one that has not."""
    cursor = await conn.execute(_sql["policy_of"], {"tenant_id": tenant_id})
    row = await cursor.fetchone()
    return None if row is None else AnswerPolicy(ttl_s=row[0], charge=row[1])


async def put_policy(conn: Connection, tenant_id: str, policy: AnswerPolicy) -> None:
    """From the gateways' next poll on."""
    await conn.execute(
        _sql["put_policy"],
        {"tenant_id": tenant_id, "ttl_s": policy.ttl_s, "charge": policy.charge},
    )


async def drop_policy(conn: Connection, tenant_id: str) -> bool:
    """Whether there was one. What is kept is not found any more, and goes by its time."""
    cursor = await conn.execute(_sql["drop_policy"], {"tenant_id": tenant_id})
    return cursor.rowcount > 0
