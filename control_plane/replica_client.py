"""Asks replicas how they are, wakes them, sends them to sleep: bounded in time and at once.

A replica that cannot be asked is an answer with its reason, never an exception.
"""

import asyncio
import time
from collections.abc import Sequence

import httpx
import msgspec

from core import internal_token

AUDIENCE = "worker"
SUBJECT = "control-plane"
TOKEN_LIFE_MS = 30_000


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` and the reaper want of a load report; there is more in it."""

    boot_id: str
    kv_blocks_total: int
    kv_blocks_free: int  # free or evictable
    running: int
    waiting: int
    integrity: bool
    journal_unacked: int

    @property
    def busy(self) -> int:
        """Requests it holds."""
        return self.running + self.waiting

    @property
    def kv_blocks_used(self) -> int:
        """Blocks that a sequence owns; 0 at rest."""
        return self.kv_blocks_total - self.kv_blocks_free


class Unreachable(msgspec.Struct, frozen=True):
    """Nothing could be learned."""

    reason: str


_decoder = msgspec.json.Decoder(ReplicaLoad)


class ReplicaClient:
    """One for each process."""

    def __init__(self, *, secret: bytes, timeout_ms: int, at_once: int) -> None:
        self._secret = secret
        self._timeout_s = timeout_ms / 1000
        self._turns = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        self._http = httpx.AsyncClient(timeout=self._timeout_s, limits=limits)

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def loads(self, urls: Sequence[str]) -> list[ReplicaLoad | Unreachable]:
        """In the order of `urls`."""
        return await asyncio.gather(*(self.load(url) for url in urls))

    async def load(self, url: str) -> ReplicaLoad | Unreachable:
        """One replica's own word."""
        try:
            async with self._turns, asyncio.timeout(self._timeout_s):
                response = await self._http.get(f"{url}/load", headers=self._headers())
            if response.status_code != httpx.codes.OK:
                return Unreachable(f"answered {response.status_code}")
            return _decoder.decode(response.content)
        except TimeoutError:
            return Unreachable(f"no answer within {self._timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Unreachable(str(error) or type(error).__name__)
        except msgspec.MsgspecError as error:
            return Unreachable(f"not a load report: {error}")

    async def wake(self, url: str) -> str:
        """What a sleeping replica says to it; "" when it wakes, or needs longer than our bound."""
        return await self._told(f"{url}/wake")

    async def sleep(self, url: str) -> str:
        """As `wake`: it drains first, and goes on when we do not wait for it."""
        return await self._told(f"{url}/sleep")

    async def _told(self, address: str) -> str:
        try:
            async with self._turns, asyncio.timeout(self._timeout_s):
                response = await self._http.post(address, headers=self._headers())
        except TimeoutError:
            return ""  # it goes on without whoever asked
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return str(error) or type(error).__name__
        return "" if response.is_success else f"{response.status_code}: {response.text[:200]}"

    def _headers(self) -> dict[str, str]:
        expires_ms = time.time_ns() // 1_000_000 + TOKEN_LIFE_MS
        token = internal_token.sign(
            self._secret, audience=AUDIENCE, subject=SUBJECT, expires_ms=expires_ms
        )
        return {"authorization": f"Bearer {token}"}
