"""Newest versions of what gateways decide from, pushed to where `admit` compares them.

Best effort: gateways also poll each second, so that a push lost with Valkey delays a change
and loses nothing. A version never falls, in whatever order pushes arrive.
"""

import asyncio
from collections.abc import Mapping

from store.keys import ROUTE_VERSIONS, TENANT_PARTS, tenant_keys
from store.redis_client import Part, RedisAwayError, RedisClient
from store.scripts import version_function

_VERSIONS = TENANT_PARTS.index("versions")


async def push_versions(
    client: RedisClient,
    *,
    tenants: Mapping[str, int] | None = None,
    keys: Mapping[tuple[str, str], int] | None = None,
    routes: Mapping[str, int] | None = None,
) -> None:
    """`keys` is by (tenant, key id), `routes` by public model name. Raises RedisAwayError."""
    pushes: dict[bytes, list[Part]] = {}
    for tenant, version in (tenants or {}).items():
        pushes.setdefault(tenant_keys(tenant)[_VERSIONS], []).extend(("tenant", version))
    for (tenant, key), version in (keys or {}).items():
        pushes.setdefault(tenant_keys(tenant)[_VERSIONS], []).extend((f"key:{key}", version))
    for model, version in (routes or {}).items():
        pushes.setdefault(ROUTE_VERSIONS, []).extend((model, version))
    function = version_function()
    await asyncio.gather(*(client.run(function, (key,), *pairs) for key, pairs in pushes.items()))


class VersionPublisher:
    """A connection of its own, for a process that pushes versions and does not dispatch."""

    def __init__(self, redis_url: str, *, timeout_ms: int = 1_000) -> None:
        self._timeout_s = timeout_ms / 1000
        self._client = RedisClient(redis_url, timeout_ms=timeout_ms)

    def start(self) -> None:
        """Begin to connect."""
        self._client.start()

    async def close(self) -> None:
        """Drop the connection."""
        await self._client.close()

    async def ping(self) -> None:
        """Raises RedisAwayError when Valkey does not answer."""
        await self._connected()
        await self._client.call(b"PING")

    async def tenant(self, tenant: str, version: int) -> None:
        """The tenant's row changed. Raises RedisAwayError."""
        await self._connected()
        await push_versions(self._client, tenants={tenant: version})

    async def key(self, tenant: str, key: str, version: int) -> None:
        """An API key's row changed. Raises RedisAwayError."""
        await self._connected()
        await push_versions(self._client, keys={(tenant, key): version})

    async def route(self, model: str, version: int) -> None:
        """A public model name's route changed. Raises RedisAwayError."""
        await self._connected()
        await push_versions(self._client, routes={model: version})

    async def _connected(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.connected.wait()
        except TimeoutError as error:
            raise RedisAwayError("not connected") from error
