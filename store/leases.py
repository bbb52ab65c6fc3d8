"""Gateways' leases, and the sweeper that settles for those that fell silent.

One row for each incarnation of a gateway, asserted several times within a lease. The sweeper
acts only on a gateway silent for a full lease during which the sweeper itself was in
continuous contact with Postgres: while Postgres was away, nobody could be heard.

    silent for a lease ─┬─ the worker's journal has its last word ─► LOST, billed by it
                        └─ not yet ─ a grace later ─┬─ heard of ───► LOST, billed by that
                                                    └─ never ──────► NOT_STARTED, free
Either verdict yields to what a journal or the gateway itself says later (`core.ledger`).
"""

from collections.abc import Collection
from datetime import datetime

import msgspec
import psycopg

from core.money import EndCause
from store.ledger import BILLING_CAUSES
from store.postgres import Connection, Postgres, StoreAwayError
from store.queries import load

_sql = load("leases")


class SweeperConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the sweeper is, and how much it does at a time."""

    contact_gap_s: float = 2.0  # between sweeps; after a longer one, contact starts anew
    grace_ms: int = 5_000  # for a journal, after the lease
    lease_ms: int = 5_000  # of a gateway that never asserted one
    sweep_max: int = 1_000  # requests
    refusals_kept_s: int = 86_400
    gateways_kept_s: int = 86_400


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one sweep found and did."""

    lost: int = 0  # settled from witnesses
    not_started: int = 0  # released: nobody heard of any work
    waiting: int = 0  # gateways are silent; journals may still come, or an account is locked
    gateways: tuple[str, ...] = ()  # the silent ones among those seen


async def assert_lease(
    conn: Connection,
    gateway_id: str,
    region: str,
    lease_ms: int,
    *,
    spool_bytes: int = 0,
    refused_words: int = 0,
) -> None:
    """This incarnation is alive. Also how it begins, and how it begins again after a loss.

    It tells, besides, what waits in its spool and how many of its words the ledger refused.
    """
    values = {
        "gateway_id": gateway_id,
        "region": region,
        "lease_ms": lease_ms,
        "spool_bytes": spool_bytes,
        "refused_words": refused_words,
    }
    await conn.execute(_sql["assert_lease"], values)


async def retire_lease(conn: Connection, gateway_id: str, *, spool_bytes: int = 0) -> None:
    """This incarnation has stopped, with nothing left open: what is, is swept at once.

    What it left in its spool waits for another on the same disk.
    """
    values = {"gateway_id": gateway_id, "spool_bytes": spool_bytes}
    await conn.execute(_sql["retire_lease"], values)


async def spools_adopted(conn: Connection, gateway_ids: Collection[str]) -> None:
    """All that these dead incarnations had spooled has been said for them."""
    await conn.execute(_sql["spools_adopted"], {"gateway_ids": list(gateway_ids)})


class Sweeper:
    """One for each control plane. Any number may run: every step is idempotent."""

    def __init__(self, pg: Postgres, config: SweeperConfig) -> None:
        self._pg = pg
        self._config = config
        self._contact_since: datetime | None = None  # by the database's clock
        self._contact_last: datetime | None = None

    async def sweep(self) -> SweepReport:
        """Settle what dead gateways left open. Call it about once a second.

        Raises:
            StoreAwayError: Contact is lost, and counts anew from the next sweep.
        """
        try:
            async with self._pg.transaction() as conn:
                contact_since = await self._contact(conn)
                return await self._sweep(conn, contact_since)
        except StoreAwayError:
            self._contact_since = None
            raise

    async def _contact(self, conn: Connection) -> datetime:
        """Since when we have heard all that gateways could say."""
        row = await (await conn.execute(_sql["clock"])).fetchone()
        assert row is not None
        now, started = row
        last = self._contact_last
        if last is not None and (now - last).total_seconds() > self._config.contact_gap_s:
            self._contact_since = None
        if self._contact_since is None or self._contact_since < started:
            self._contact_since = now
        self._contact_last = now
        return self._contact_since

    async def _sweep(self, conn: Connection, contact_since: datetime) -> SweepReport:
        config = self._config
        cursor = await conn.execute(
            _sql["abandoned"],
            {
                "contact_since": contact_since,
                "lease_ms": config.lease_ms,
                "grace_ms": config.grace_ms,
                "limit": config.sweep_max,
            },
        )
        abandoned = await cursor.fetchall()
        ripe = [request_id for request_id, _, is_ripe in abandoned if is_ripe]
        causes = await _expire(conn, ripe) if ripe else []
        await self._forget(conn)
        return SweepReport(
            lost=causes.count(EndCause.LOST),
            not_started=causes.count(EndCause.NOT_STARTED),
            waiting=len(abandoned) - len(causes),
            gateways=tuple(sorted({gateway_id for _, gateway_id, _ in abandoned})),
        )

    async def _forget(self, conn: Connection) -> None:
        config = self._config
        await conn.execute(
            _sql["forget_refusals"], {"kept_s": config.refusals_kept_s, "limit": config.sweep_max}
        )
        await conn.execute(_sql["forget_gateways"], {"kept_s": config.gateways_kept_s})


async def _expire(conn: Connection, request_ids: list[str]) -> list[str]:
    """The causes. Who has one account locked for long keeps only that one from being swept."""
    try:
        async with conn.transaction():
            await conn.execute(_sql["give_way"])
            return await _expire_all(conn, request_ids)
    except psycopg.errors.LockNotAvailable:
        cursor = await conn.execute(_sql["of_free_accounts"], {"request_ids": request_ids})
        return await _expire_all(conn, [request_id for (request_id,) in await cursor.fetchall()])


async def _expire_all(conn: Connection, request_ids: list[str]) -> list[str]:
    cursor = await conn.execute(
        _sql["expire"], {"request_ids": request_ids, "billing_causes": BILLING_CAUSES}
    )
    return [cause for cause, _ in await cursor.fetchall()]
