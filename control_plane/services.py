"""What the endpoints and the background jobs work with, opened once for each process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from control_plane.announcer import Announcer
from control_plane.doors import Doors, open_doors
from control_plane.leader import Leadership, open_leadership
from control_plane.metrics import Metrics
from control_plane.pulse import Pulse
from control_plane.replica_client import ReplicaClient
from control_plane.settings import ControlPlaneSettings
from control_plane.turns import Turns
from core.secrets import KeyRing, read_key_ring
from store.ledger import Ledger
from store.pool_view import PoolReader
from store.postgres import Postgres, PostgresConfig

APPLICATION = "headworks control plane"


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """Open connections, and the settings they were opened with.

    `books` is for `check`, sums made anew and months dropped: full scans, with bounds to match
    and no place in the pool that heartbeats need.
    """

    settings: ControlPlaneSettings
    metrics: Metrics
    postgres: Postgres
    books: Postgres
    pulse: Pulse
    ledger: Ledger
    announcer: Announcer
    replicas: ReplicaClient
    leadership: Leadership
    pools: PoolReader
    registering: Turns  # by replica id
    provider_ring: KeyRing
    doors: Doors


@asynccontextmanager
async def open_services(
    settings: ControlPlaneSettings, metrics: Metrics
) -> AsyncIterator[Services]:
    """Opens without waiting for Postgres or Valkey: what needs them waits, bounded."""
    url = settings.database_url
    postgres = await Postgres.open(PostgresConfig(database_url=url, application_name=APPLICATION))
    books = await Postgres.open(
        PostgresConfig(
            database_url=url,
            application_name=f"{APPLICATION} check",
            connections_min=0,
            connections_max=2,
            statement_timeout_ms=settings.check_timeout_ms,
            transaction_timeout_s=settings.check_timeout_ms / 1000,
        )
    )
    ledger = await Ledger.open(url, application_name=f"{APPLICATION} ledger")
    announcer = Announcer(
        settings.redis_url,
        metrics=metrics,
        push_timeout_ms=settings.push_timeout_ms,
        audit_timeout_ms=settings.check_timeout_ms,
    )
    announcer.start()
    replicas = ReplicaClient(
        secret=settings.internal_secret.encode(),
        timeout_ms=settings.probe_timeout_ms,
        at_once=settings.probes_at_once,
    )
    pools = PoolReader(settings.redis_url, timeout_ms=settings.probe_timeout_ms)
    pools.start()
    doors = open_doors(settings, postgres)
    try:
        async with open_leadership(url, f"{APPLICATION} leader", metrics) as leadership:
            yield Services(
                settings=settings,
                metrics=metrics,
                postgres=postgres,
                books=books,
                pulse=Pulse(books),
                ledger=ledger,
                announcer=announcer,
                replicas=replicas,
                leadership=leadership,
                pools=pools,
                registering=Turns(),
                provider_ring=read_key_ring(settings.provider_keys),
                doors=doors,
            )
    finally:
        await doors.close()
        await pools.close()
        await ledger.close()
        await replicas.close()
        await announcer.close()
        await books.close()
        await postgres.close()
