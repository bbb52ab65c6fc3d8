"""Argon2id, off the event loop and bounded: so many hashes at once, so many waiting.

A hash takes tens of milliseconds and 64 MiB on purpose. Strangers may ask for them, so the
number of both is a setting and what is beyond it is refused.
"""

import asyncio
import base64
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import msgspec
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from control_plane.access.passwords import normal
from core.errors import Code, refuse

Answer = TypeVar("Answer")

_SALT_BYTES = 16
_HASH_BYTES = 32


class Argon2(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9106's parameters, and how many may be computed and wait."""

    time_cost: int
    memory_kib: int
    lanes: int
    at_once: int
    waiting_max: int


class Hasher:
    """One for each process; `close` once."""

    def __init__(self, config: Argon2) -> None:
        self._argon2 = PasswordHasher(
            time_cost=config.time_cost,
            memory_cost=config.memory_kib,
            parallelism=config.lanes,
            hash_len=_HASH_BYTES,
            salt_len=_SALT_BYTES,
        )
        self._threads = ThreadPoolExecutor(config.at_once, thread_name_prefix="argon2")
        self._places = threading.BoundedSemaphore(config.at_once + config.waiting_max)
        self._nobodys = _random_hash(config)

    async def hash(self, password: str) -> str:
        """To be stored. Raises RefusedError where too many are waiting."""
        return await self._run(lambda: self._argon2.hash(normal(password)))

    async def matches(self, hashed: str | None, password: str) -> bool:
        """Whether it is the password. For None the same work, and no.

        Raises RefusedError where too many are waiting.
        """
        return await self._run(lambda: self._verify(hashed or self._nobodys, normal(password)))

    def is_outdated(self, hashed: str) -> bool:
        """Whether new hashes are made with other parameters."""
        return self._argon2.check_needs_rehash(hashed)

    def close(self) -> None:
        """What has begun is finished."""
        self._threads.shutdown(cancel_futures=True)

    def _verify(self, hashed: str, password: str) -> bool:
        try:
            return self._argon2.verify(hashed, password)
        except (InvalidHashError, VerificationError):
            return False

    async def _run(self, work: Callable[[], Answer]) -> Answer:
        if not self._places.acquire(blocking=False):
            raise refuse(Code.OVERLOADED, "too many people sign in at this moment; try again")
        future = self._threads.submit(work)
        # When the work is over, not when its caller has left: that is what the bound is about.
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def _leave(self, _: Future[Answer]) -> None:
        self._places.release()


def _random_hash(config: Argon2) -> str:
    """A hash of nobody's password, as dear to try as anybody's."""
    salt, hashed = (
        base64.b64encode(secrets.token_bytes(size)).rstrip(b"=").decode()
        for size in (_SALT_BYTES, _HASH_BYTES)
    )
    cost = f"m={config.memory_kib},t={config.time_cost},p={config.lanes}"
    return f"$argon2id$v=19${cost}${salt}${hashed}"
