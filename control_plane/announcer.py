"""Tells Valkey of new versions after they are committed, and asks it what it holds.

Best effort: gateways also poll Postgres each second, so Valkey being away delays a change by
that and loses nothing. A push never fails the request that made the change.
"""

import asyncio
import logging
from collections.abc import Awaitable

from control_plane.metrics import Metrics
from store.dispatch_audit import DispatchAudit, audit
from store.redis_client import RedisAwayError, RedisReplyError
from store.versions import VersionPublisher

_log = logging.getLogger(__name__)


class Announcer:
    """One for each process. `start` before use, `close` after."""

    def __init__(
        self, redis_url: str, *, metrics: Metrics, push_timeout_ms: int, audit_timeout_ms: int
    ) -> None:
        self._url = redis_url
        self._metrics = metrics
        self._push_timeout_s = push_timeout_ms / 1000
        self._audit_timeout_s = audit_timeout_ms / 1000
        self._publisher = VersionPublisher(redis_url, timeout_ms=push_timeout_ms)

    def start(self) -> None:
        """Begin to connect, for as long as it takes."""
        self._publisher.start()

    async def close(self) -> None:
        """Drop the connection."""
        await self._publisher.close()

    async def tenant(self, tenant: str, version: int) -> None:
        """A tenant changed."""
        await self._push("tenant", self._publisher.tenant(tenant, version))

    async def key(self, tenant: str, key: str, version: int) -> None:
        """A key was made or revoked."""
        await self._push("key", self._publisher.key(tenant, key, version))

    async def route(self, model: str, version: int) -> None:
        """A route was moved or removed."""
        await self._push("route", self._publisher.route(model, version))

    async def ping(self) -> None:
        """Raises RedisAwayError when Valkey does not answer."""
        await self._publisher.ping()

    async def audit(self) -> DispatchAudit | str:
        """What the dispatcher holds, or the reason why nobody knows."""
        try:
            async with asyncio.timeout(self._audit_timeout_s):
                return await audit(self._url)
        except (RedisAwayError, RedisReplyError) as error:
            return f"Valkey: {error}"
        except TimeoutError:
            return f"Valkey: no answer within {self._audit_timeout_s:g} s"

    async def _push(self, kind: str, push: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._push_timeout_s):
                await push
        except (RedisAwayError, RedisReplyError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            _log.warning("version not pushed", extra={"facts": {"kind": kind, "reason": reason}})
            self._metrics.pushes.labels("failed").inc()
        else:
            self._metrics.pushes.labels("done").inc()
