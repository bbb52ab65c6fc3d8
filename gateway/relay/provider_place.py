"""A request's place at an outside provider: asked for before any money is held, left once.

    this gateway's guard: key, cooldown ─► the fleet's limits: at once, in a minute ─► inside

A provider's limits are a tenant's limits of another name: charged in Valkey by the same rules,
exact over any number of gateways, and each gateway's own while Valkey is away. Invariant: what a
place holds is given back, unless its request was sent: that one counts in its minute.
"""

import asyncio
from collections.abc import Awaitable
from typing import Literal, Protocol

from core.providers import ProviderView
from core.tickets import Admit, Admitted, CacheVersions, LimitRefused, Limits, Stale
from gateway.metrics import Metrics
from gateway.providers.faults import Fault, busy
from gateway.providers.guard import Guard
from gateway.relay.endings import Endings

UNVERSIONED = CacheVersions(key=0, tenant=0, route=0)
_FULL = {
    "concurrency": "as many requests as it may have are under way",
    "requests": "it has had as many requests as it may in a minute",
}

End = Fault | Literal["answered", "unknown"]


class FleetLimits(Protocol):
    """Of `store.dispatch.Dispatch`, what limits alone need."""

    async def admit(self, a: Admit) -> Admitted | LimitRefused | Stale:
        """Charge the limits and hold the ticket, or charge nothing."""

    def finish(
        self,
        *,
        ticket: str,
        pool: str | None,
        tenant: str,
        replica: str,
        actual_input_tokens: int,
        prefix_hashes: tuple[str, ...],
    ) -> Awaitable[None]:
        """Let the ticket go; what it was charged stays."""

    def cancel(self, *, ticket: str, pool: str | None, tenant: str) -> Awaitable[None]:
        """Let the ticket go, and give back what it was charged."""


class ProviderPlace:
    """One request's. `enter` may be asked again: who is inside stays so."""

    def __init__(
        self,
        provider: ProviderView,
        request_id: str,
        *,
        guard: Guard,
        fleet: FleetLimits,
        endings: Endings,
        metrics: Metrics,
    ) -> None:
        self._provider = provider
        self._guard = guard
        self._fleet = fleet
        self._endings = endings
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time
        # Beside the request's own ticket, under a name that no tenant has.
        self._ticket = f"{request_id}@{provider.name}"
        self._tenant = f"provider:{provider.name}"
        self._inside = False
        self._counted = False
        self.sent = False

    async def enter(self) -> Fault | None:
        """None: it may be sent. A fault says why not, and nothing is held."""
        if self._inside:
            return None
        fault = self._guard.enter(self._clock())
        if fault is not None:
            return fault
        try:
            fault = await self._count()
        except BaseException:
            self._guard.leave(self._clock(), "unknown")
            raise
        if fault is not None:
            self._guard.leave(self._clock(), "unknown")
            return fault
        self._inside = True
        return None

    def leave(self, end: End) -> None:
        """How it ended; the first word counts. What is held is let go on its own."""
        if not self._inside:
            return
        self._inside = False
        self._guard.leave(self._clock(), end)
        self._metrics.provider_key_dead.labels(self._provider.name).set(self._guard.key_dead)
        if self._counted:
            self._endings.start(self._let_go())

    async def _count(self) -> Fault | None:
        settings = self._provider.settings
        limits = Limits(
            requests_per_min=settings.requests_per_min, concurrency=settings.concurrency
        )
        if limits == Limits():
            return None
        asked = Admit(
            ticket=self._ticket,
            gateway="",
            tenant=self._tenant,
            key="",
            model="",
            versions=UNVERSIONED,
            limits=limits,
            input_tokens=0,
        )
        answer = await self._fleet.admit(asked)
        if isinstance(answer, LimitRefused):
            return busy(_FULL[answer.reason], answer.retry_after_ms).fault
        assert isinstance(answer, Admitted), "nobody pushes versions of a provider"
        self._counted = True
        return None

    async def _let_go(self) -> None:
        if not self.sent:
            await self._fleet.cancel(ticket=self._ticket, pool=None, tenant=self._tenant)
            return
        await self._fleet.finish(
            ticket=self._ticket,
            pool=None,
            tenant=self._tenant,
            replica="",
            actual_input_tokens=0,
            prefix_hashes=(),
        )
