"""What a gateway reads from Postgres: keys, tenants and the routing view.

A key never seen is one round trip, and so is a poll that finds less than a page of changes. With
Postgres away each call says so within the pool's bounds. The one thing written is what safety
policies did.
"""

from collections.abc import Sequence

from core.registry import RoutingView
from core.tenancy import KeyRecord, Tenant
from gateway.auth import SourceAwayError, TenancyChanges
from store.changes import current_change
from store.postgres import Connection, Postgres, StoreAwayError
from store.routing_view import routing_view
from store.safety import NewHit, record_hits
from store.tenants import CHANGES_MAX, changes_since, key_by_digest


class PostgresSource:
    """Implements `gateway.auth.KeySource`."""

    def __init__(self, postgres: Postgres, region: str, *, changes_max: int = CHANGES_MAX) -> None:
        self._postgres = postgres
        self._region = region
        self._changes_max = changes_max  # rows of a kind read at a time
        self._view: RoutingView | None = None  # the last one read

    async def key_by_digest(self, digest: bytes) -> tuple[KeyRecord, Tenant] | None:
        """The key and its tenant, revoked and disabled ones included."""
        try:
            async with self._postgres.connection() as conn:
                return await key_by_digest(conn, digest)
        except StoreAwayError as error:
            raise SourceAwayError(str(error)) from error

    async def changes(self, cursor: int | None) -> TenancyChanges:
        """Everything that changed after `cursor`: a part would leave the rest unconfirmed."""
        try:
            async with self._postgres.connection() as conn:
                if cursor is None:
                    now = await current_change(conn, "tenancy")
                    return TenancyChanges(keys=(), tenants=(), cursor=now)
                return await self._changes(conn, cursor)
        except StoreAwayError as error:
            raise SourceAwayError(str(error)) from error

    async def _changes(self, conn: Connection, cursor: int) -> TenancyChanges:
        keys: tuple[KeyRecord, ...] = ()
        tenants: tuple[Tenant, ...] = ()
        while True:
            page = await changes_since(conn, cursor, limit=self._changes_max)
            keys, tenants, cursor = keys + page.keys, tenants + page.tenants, page.version
            if max(len(page.keys), len(page.tenants)) < self._changes_max:
                return TenancyChanges(keys=keys, tenants=tenants, cursor=cursor)

    async def record_hits(self, hits: Sequence[NewHit]) -> None:
        """Keep them. Raises SourceAwayError."""
        try:
            async with self._postgres.transaction() as conn:
                await record_hits(conn, hits)
        except StoreAwayError as error:
            raise SourceAwayError(str(error)) from error

    async def routing_view(self) -> RoutingView:
        """This region's routes, prices and replicas. Raises SourceAwayError."""
        try:
            async with self._postgres.connection() as conn:
                self._view = await routing_view(conn, self._region, last=self._view)
        except StoreAwayError as error:
            raise SourceAwayError(str(error)) from error
        return self._view
