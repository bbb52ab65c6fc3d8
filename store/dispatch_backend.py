"""What the dispatcher's two homes have in common: Valkey's functions, and this process's twins.

Every call is made when the method is called, before anything is awaited, so that calls
arrive in the order they were made. Each answer is awaited at most once.
"""

from collections.abc import Awaitable
from typing import Protocol

import msgspec

from core.tickets import (
    Admit,
    Admitted,
    Arm,
    Dropped,
    Grant,
    LimitRefused,
    Output,
    Placed,
    Queued,
    Renew,
    Renewed,
    Scope,
    Seen,
    Stale,
)


class PoolReply(msgspec.Struct, frozen=True):
    """What every call to a pool brings along. An epoch of "" is a pool that knows nothing."""

    epoch: str
    grants: tuple[Grant, ...]


class ArmReply(msgspec.Struct, frozen=True):
    """`arm`'s outcome, and what every call brings along."""

    outcome: Placed | Queued | Dropped
    pool: PoolReply


class Backend(Protocol):
    """Raises RedisAwayError from any call, or from its await, when it cannot be reached."""

    def admit(self, asked: Admit) -> Awaitable[Admitted | LimitRefused | Stale]:
        """Charge every scope of the tenant's that it counts in, and hold the ticket."""

    def look(self, tenant: str, scopes: tuple[Scope, ...]) -> Awaitable[tuple[Seen, ...]]:
        """What a request in these scopes would find. Charges nothing."""

    def charge(self, tenant: str, outputs: tuple[Output, ...]) -> Awaitable[None]:
        """Charge output by absolute totals, and keep these tickets held."""

    def finish_tenant(
        self, tenant: str, ticket: str, *, input_tokens: int, output_total: int
    ) -> Awaitable[None]:
        """Let the tenant's ticket go and true up its charge."""

    def cancel_tenant(self, tenant: str, ticket: str) -> Awaitable[None]:
        """Let the tenant's ticket go and refund its charge."""

    def arm(self, arm: Arm) -> Awaitable[ArmReply]:
        """Place, queue or drop."""

    def renew(self, renew: Renew) -> Awaitable[Renewed]:
        """The gateway's heartbeat to one pool."""

    def finish_pool(
        self,
        pool: str,
        gateway: str,
        ticket: str,
        *,
        input_tokens: int,
        output_tokens: int,
        prefix_hashes: tuple[str, ...],
    ) -> Awaitable[PoolReply]:
        """Free the ticket's account and true up its tenant's counter."""

    def cancel_pool(self, pool: str, gateway: str, ticket: str) -> Awaitable[PoolReply]:
        """Forget the ticket."""
