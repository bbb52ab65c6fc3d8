"""Who decides for a gateway: Valkey for everyone, or this process while Valkey is away.

The gateway's name changes with each time alone: the old name's lease runs out at Valkey, and
with it all that ended in between. Invariant: whoever begins to decide is told of everything in
flight (`on_change`) before anything else is asked of it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

from core.tickets import Headroom, Scope
from store.dispatch_backend import Backend
from store.dispatch_rules import DispatchRules, now_ms
from store.keys import wake_channel
from store.local_dispatch import LocalDispatch
from store.redis_client import RedisAwayError, RedisClient
from store.remote_dispatch import RemoteDispatch
from store.scripts import dispatch_functions
from store.versions import push_versions

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Decider:
    """`life` counts the names. `on_wake` gets the pools that other gateways' calls touched."""

    def __init__(
        self,
        redis_url: str,
        gateway: str,
        rules: DispatchRules,
        *,
        on_wake: Callable[[bytes], None],
        on_change: Callable[[], None],
    ) -> None:
        self._rules = rules
        self._gateway = gateway
        self._on_change = on_change
        functions = dispatch_functions(rules.pool, rules.limits)
        self._client = RedisClient(
            redis_url,
            libraries=functions.libraries,
            timeout_ms=rules.call_timeout_ms,
            in_flight_max=rules.in_flight_max,
            channels=lambda: (wake_channel(self.name),),
            on_message=on_wake,
            on_lost=self.lost,
        )
        self.remote = RemoteDispatch(self._client, functions)
        self._local: LocalDispatch | None = None
        self._return: asyncio.Task[None] | None = None
        self._closing = False
        self._rooms: OrderedDict[tuple[str, str], _Remembered] = OrderedDict()
        self.life = 1

    @property
    def degraded(self) -> bool:
        """Whether Valkey is away, so that this process decides alone."""
        return self._local is not None

    @property
    def name(self) -> str:
        """This gateway's name in its present life."""
        return self._gateway if self.life == 1 else f"{self._gateway}~{self.life}"

    @property
    def backend(self) -> Backend:
        """Whoever decides now."""
        return self._local if self._local is not None else self.remote

    async def start(self) -> None:
        """Connect; when that takes longer than a call may, begin without Valkey."""
        self._client.start()
        try:
            async with asyncio.timeout(self._rules.call_timeout_ms / 1000):
                await self._client.connected.wait()
        except TimeoutError:
            self.lost()

    async def settle(self) -> None:
        """Change no more: the first half of `close`."""
        self._closing = True
        if self._return is not None:
            self._return.cancel()
            await asyncio.gather(self._return, return_exceptions=True)

    async def close(self) -> None:
        """Once nothing more is asked."""
        await self._client.close()

    async def ask(self, call: Callable[[Backend], Awaitable[T]]) -> T:
        """The answer of whoever decides; when Valkey fails, of this process."""
        if self._local is None:
            try:
                return await call(self.remote)
            except RedisAwayError:
                self.lost()
        return await call(self.backend)

    async def push_versions(
        self,
        *,
        tenants: Mapping[str, int] | None,
        keys: Mapping[tuple[str, str], int] | None,
        routes: Mapping[str, int] | None,
    ) -> None:
        """Make older versions STALE everywhere. Raises RedisAwayError: polls tell it too."""
        await push_versions(self._client, tenants=tenants, keys=keys, routes=routes)

    def remember(self, tenant: str, scopes: tuple[Scope, ...], rooms: tuple[Headroom, ...]) -> None:
        """What a time alone begins from."""
        at_ms = now_ms()
        for scope, room in zip(scopes, rooms, strict=True):
            name = (tenant, scope.name)
            self._rooms[name] = _Remembered(scope, room, at_ms)
            self._rooms.move_to_end(name)
        while len(self._rooms) > self._rules.scopes_remembered_max:
            self._rooms.popitem(last=False)

    def lost(self) -> None:
        """Valkey failed a call: decide here from now on."""
        if self._local is not None or self._closing:
            return
        _log.warning("valkey is away: admitting and placing alone")
        self.life += 1
        self._local = LocalDispatch(self._rules.pool, self._rules.limits, now_ms)
        for (tenant, _), known in self._rooms.items():
            self._local.remember(tenant, known.scope, known.room, known.at_ms)
        self._client.drop("it failed a call")
        self._on_change()
        self._return = asyncio.create_task(self._come_back())

    async def _come_back(self) -> None:
        await asyncio.sleep(self._rules.alone_ms / 1000)
        await self._client.connected.wait()
        _log.warning("valkey is back")
        self._local = None
        try:
            self._on_change()
        except RedisAwayError:
            self.lost()


class _Remembered(NamedTuple):
    """A scope of a tenant's, as last answered."""

    scope: Scope
    room: Headroom
    at_ms: int
