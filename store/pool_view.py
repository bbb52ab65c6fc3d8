"""What waits in a deployment's pool, read from Valkey without taking part in it.

A pool that nobody has asked for anything is empty; one whose state is not what this release
writes is unknown, which is another thing.
"""

import asyncio
from typing import cast

import msgspec

from core.ids import pool_id
from store.keys import POOL_PARTS, pool_keys
from store.redis_client import RedisAwayError, RedisClient, RedisReplyError

_STATE = POOL_PARTS.index("state")


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's counts. `counts` are of those that wait: interactive, standard, batch."""

    counts: tuple[int, int, int]
    stay_us: int
    open: int
    samples: int

    @property
    def waiting(self) -> int:
        """Batch aside, which waits by design."""
        return self.counts[0] + self.counts[1]

    @property
    def waiting_any(self) -> int:
        """Batch too."""
        return sum(self.counts)

    @property
    def wait_ms(self) -> float:
        """A newcomer's, batch aside, by Little's law; 0 where nothing is served."""
        return self.waiting * self.stay_us / 1_000 / self.open if self.open else 0.0


EMPTY = PoolView(counts=(0, 0, 0), stay_us=0, open=0, samples=0)


class Unknown(msgspec.Struct, frozen=True):
    """Nothing could be learned."""

    reason: str


class PoolReader:
    """A connection of its own. `start` before use, `close` after."""

    def __init__(self, redis_url: str, *, timeout_ms: int) -> None:
        self._timeout_s = timeout_ms / 1000
        self._client = RedisClient(redis_url, timeout_ms=timeout_ms)
        self._is_away = False  # for one call waits for a connection, and not for each pool

    def start(self) -> None:
        """Begin to connect."""
        self._client.start()

    async def close(self) -> None:
        """Drop the connection."""
        await self._client.close()

    async def pool(self, deployment: str, region: str) -> PoolView | Unknown:
        """As it is now, or why nobody knows."""
        key = pool_keys(pool_id(deployment, region))[_STATE]
        if self._is_away and not self._client.connected.is_set():
            return Unknown("Valkey: not connected")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.connected.wait()
                self._is_away = False
                stored = cast("bytes | None", await self._client.call(b"GET", key))
        except (RedisAwayError, RedisReplyError) as error:
            return Unknown(f"Valkey: {error}")
        except TimeoutError:
            self._is_away = True
            return Unknown(f"Valkey: no answer within {self._timeout_s:g} s")
        return EMPTY if stored is None else read_pool(stored)


def read_pool(stored: bytes) -> PoolView | Unknown:
    """A pool's state as its functions pack it."""
    try:
        return msgspec.msgpack.decode(stored, type=PoolView, strict=False)
    except msgspec.MsgspecError as error:
        return Unknown(f"the pool's state is not what it was: {error}")
