"""Rollouts as they are kept, their history, and what is measured of both sides.

What a rollout means is `control_plane.rollouts`'s; here its state is a value to keep. A row's
`version` rises with each transition, so that nobody moves what he has not seen; its `revision`
with every look, so that no two looks are kept at once.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from psycopg.types.json import Jsonb

from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

SLACK_MS = 60_000  # between a request's id and its own time, whichever gateway's clock says it
DEMAND_MS = 60_000
FROM_NEWEST = 2**63 - 1

_sql = load("rollouts")

Json = dict[str, Any]


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """`body` is the machine's state, `asked` what an operator asked for, `wanted` its floors."""

    name: str
    tenant: str
    model: str
    region: str
    stable: str
    canary: str
    stable_version: str
    canary_version: str
    asked: Json
    body: Json
    wanted: list[Json]
    state: str
    ended: bool
    closed: bool
    version: int = 1
    revision: int = 1
    created_by: str
    created_ms: int = 0
    updated_ms: int = 0


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a rollout's history, never altered (by trigger)."""

    id: int = 0
    at_ms: int = 0
    actor: str
    event: str
    before: str
    after: str
    percent: int
    reasons: list[str]
    verdicts: list[Json]
    sample: Json | None


class SeenReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One of a side's."""

    deployment: str
    name: str
    version: str
    state: str


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of a version and a stratum are in one bucket of a kind."""

    version: str
    stratum: str
    kind: str
    bucket: int
    count: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Whose requests are counted: under a public name, in a region, of some versions."""

    model: str
    tenant: str
    region: str
    versions: tuple[str, ...]
    from_ms: int
    to_ms: int


async def create(conn: Connection, row: RolloutRow) -> bool:
    """False when the name is taken, or another one moves the same public name."""
    values = msgspec.structs.asdict(row) | _kept(row)
    return await (await conn.execute(_sql["create_rollout"], values)).fetchone() is not None


async def rollout(conn: Connection, name: str) -> RolloutRow | None:
    """By its name."""
    found = await _rows(conn, "rollout", {"name": name})
    return found[0] if found else None


async def hold(conn: Connection, name: str) -> int | None:
    """Its revision, which stands until this transaction ends; None for an unknown one."""
    row = await (await conn.execute(_sql["hold_rollout"], {"name": name})).fetchone()
    return None if row is None else int(row[0])


async def open_rollouts(conn: Connection, *, limit: int) -> list[RolloutRow]:
    """Those with something left to do, oldest first."""
    return await _rows(conn, "open_rollouts", {"limit": limit})


async def rollouts_page(
    conn: Connection,
    *,
    model: str = "",
    state: str = "",
    only_open: bool = False,
    after: str = "",
    limit: int,
) -> list[RolloutRow]:
    """In order of name, after `after`."""
    values = {"model": model, "state": state, "open": only_open, "after": after, "limit": limit}
    return await _rows(conn, "rollouts_page", values)


async def keep(conn: Connection, row: RolloutRow, *, moved: bool) -> int | None:
    """Write where it stands now; its version, or None when it is not at `row.revision` any more."""
    values = {**msgspec.structs.asdict(row), **_kept(row), "moved": moved}
    found = await (await conn.execute(_sql["keep_rollout"], values)).fetchone()
    return None if found is None else int(found[0])


async def add_event(conn: Connection, name: str, event: EventRow) -> None:
    """Append one line."""
    values = {
        **msgspec.structs.asdict(event),
        "rollout": name,
        "reasons": Jsonb(event.reasons),
        "verdicts": Jsonb(event.verdicts),
        "sample": None if event.sample is None else Jsonb(event.sample),
    }
    await conn.execute(_sql["add_event"], values)


async def events_page(
    conn: Connection, name: str, *, before: int = FROM_NEWEST, limit: int
) -> list[EventRow]:
    """Newest first."""
    values = {"rollout": name, "before": before, "limit": limit}
    async with conn.cursor(row_factory=struct_row(EventRow)) as cursor:
        await cursor.execute(_sql["events_page"], values)
        return await cursor.fetchall()


async def moving(conn: Connection, model: str, tenant: str) -> str | None:
    """The rollout that moves this public name now."""
    return await _name(conn, "moving", {"model": model, "tenant": tenant})


async def unclosed(conn: Connection, model: str, tenant: str) -> str | None:
    """A rollout of this public name that has something left to do, be it ended."""
    return await _name(conn, "unclosed", {"model": model, "tenant": tenant})


async def ahead_of(conn: Connection, row: RolloutRow) -> str | None:
    """An earlier rollout of the same public name that is not closed."""
    values = {"name": row.name, "model": row.model, "tenant": row.tenant}
    return await _name(conn, "ahead", values)


async def needing_version(conn: Connection, version: str) -> str | None:
    """A rollout that is not closed and has this version on a side."""
    return await _name(conn, "needing_version", {"version": version})


async def floors(conn: Connection) -> dict[str, int]:
    """How many replicas of a deployment rollouts need: the scaler goes no lower."""
    cursor = await conn.execute(_sql["floors"])
    return {deployment: int(replicas) for deployment, replicas in await cursor.fetchall()}


async def now_ms(conn: Connection) -> int:
    """The server's clock, in Unix milliseconds."""
    row = await (await conn.execute(_sql["now_ms"])).fetchone()
    assert row is not None
    return int(row[0])


async def replicas_of(conn: Connection, deployments: Sequence[str]) -> list[SeenReplica]:
    """All that are known of these deployments."""
    async with conn.cursor(row_factory=struct_row(SeenReplica)) as cursor:
        await cursor.execute(_sql["replicas_of"], {"deployments": list(deployments)})
        return await cursor.fetchall()


async def sample(conn: Connection, asked: Measured) -> list[Counted]:
    """Settled requests in buckets. Reads the window's rows, in every model, and no others."""
    async with conn.cursor(row_factory=struct_row(Counted)) as cursor:
        await cursor.execute(_sql["sample"], _window(asked))
        return await cursor.fetchall()


async def still_open(conn: Connection, asked: Measured) -> dict[str, int]:
    """By version, requests that began in the window and have not ended."""
    cursor = await conn.execute(_sql["still_open"], _window(asked))
    return {version: int(count) for version, count in await cursor.fetchall()}


async def demand(conn: Connection, row: RolloutRow, at_ms: int) -> float:
    """Requests per second under a rollout's public name, in the last minute."""
    asked = Measured(
        model=row.model,
        tenant=row.tenant,
        region=row.region,
        versions=(),
        from_ms=at_ms - DEMAND_MS,
        to_ms=at_ms,
    )
    found = await (await conn.execute(_sql["demand"], _window(asked))).fetchone()
    assert found is not None
    return int(found[0]) / (DEMAND_MS / 1000)


def _window(asked: Measured) -> Json:
    first_ms, last_ms = max(0, asked.from_ms - SLACK_MS), asked.to_ms + SLACK_MS
    return {
        **msgspec.structs.asdict(asked),
        "versions": list(asked.versions),
        "months": _months(first_ms, last_ms),
        "first_id": f"req_{asked.region}_{first_ms:012x}",
        "last_id": f"req_{asked.region}_{last_ms:012x}",
    }


def _months(first_ms: int, last_ms: int) -> list[int]:
    """Each month that a window touches, as 202412 is one.

    >>> _months(1_735_689_599_999, 1_735_689_600_000)
    [202412, 202501]
    """
    first, last = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (first_ms, last_ms))
    count = (last.year - first.year) * 12 + last.month - first.month
    months = (first.year * 12 + first.month - 1 + step for step in range(count + 1))
    return [month // 12 * 100 + month % 12 + 1 for month in months]


def _kept(row: RolloutRow) -> Json:
    return {name: Jsonb(getattr(row, name)) for name in ("asked", "body", "wanted")}


async def _name(conn: Connection, statement: str, values: Json) -> str | None:
    row = await (await conn.execute(_sql[statement], values)).fetchone()
    return None if row is None else str(row[0])


async def _rows(conn: Connection, statement: str, values: Json) -> list[RolloutRow]:
    async with conn.cursor(row_factory=struct_row(RolloutRow)) as cursor:
        await cursor.execute(_sql[statement], values)
        return await cursor.fetchall()
