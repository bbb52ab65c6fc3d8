"""Replicas as they report themselves, and how far each boot's journal has been taken.

Times are the database's clock. A row says what was last heard, never what is true now: a
stale report removes no replica from service; `mark_lost` needs long silence and a second look.
"""

import msgspec

from core.fleet import Beat, Register, ReplicaState
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("fleet")


class CurrentBoot(msgspec.Struct, frozen=True, kw_only=True):
    """The life a replica is in, as far as was heard."""

    boot_id: str
    state: ReplicaState
    beat_seq: int


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """A replica for people and for `check`. `silent_ms` is since its last beat."""

    replica_id: str
    boot_id: str
    url: str
    deployment: str
    region: str
    version: str
    backend: str
    can_resume: bool
    state: ReplicaState
    kv_blocks: int
    block_tokens: int
    context_tokens: int
    sequences: int
    beat_seq: int
    kv_blocks_free: int
    running: int
    waiting: int
    steps: int
    journal_acked: int
    silent_ms: int
    started_ms: int | None  # Unix milliseconds, as are the next two
    ready_ms: int | None  # when this boot was first ready
    drain_deadline_ms: int | None
    drain_reason: str
    stalled_ms: int  # since its last step, while it has work


class DrainNow(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica is to hear of draining. `left_ms` is null while nobody has bounded it."""

    desired_state: str
    reason: str
    left_ms: int | None


class SilentReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One that has not been heard for long; it may still be serving."""

    replica_id: str
    boot_id: str
    url: str


async def current_boot(conn: Connection, replica_id: str) -> CurrentBoot | None:
    """Locks the row until the transaction ends, so that two lives cannot pass each other."""
    async with conn.cursor(row_factory=struct_row(CurrentBoot)) as cursor:
        await cursor.execute(_sql["replica_boot"], {"replica_id": replica_id})
        return await cursor.fetchone()


async def drain_now(conn: Connection, replica_id: str) -> DrainNow | None:
    """What its deployment is wanted to do, and its own drain; None for one never heard of."""
    async with conn.cursor(row_factory=struct_row(DrainNow)) as cursor:
        await cursor.execute(_sql["drain_now"], {"replica_id": replica_id})
        return await cursor.fetchone()


async def begin_drain(conn: Connection, replica_id: str, *, reason: str, within_ms: int) -> bool:
    """Place no more on it from the next view on; the earlier of two deadlines holds.

    Its worker hears of it with its next beat. False for one that is unknown or gone.
    """
    values = {"replica_id": replica_id, "reason": reason, "within_ms": within_ms}
    return await (await conn.execute(_sql["begin_drain"], values)).fetchone() is not None


async def undo_drain(conn: Connection, replica_id: str) -> bool:
    """False where its worker has begun already, which is for good, or there is no such drain."""
    values = {"replica_id": replica_id}
    return await (await conn.execute(_sql["undo_drain"], values)).fetchone() is not None


async def undo_drains(conn: Connection, deployment: str, *, reason: str) -> None:
    """Those of one reason, where the worker has not begun."""
    await conn.execute(_sql["undo_drains"], {"deployment": deployment, "reason": reason})


async def boot_position(conn: Connection, boot_id: str) -> int | None:
    """The boot's acknowledged journal sequence; None for a boot never heard of."""
    row = await (await conn.execute(_sql["boot_position"], {"boot_id": boot_id})).fetchone()
    return None if row is None else int(row[0])


async def put_replica(conn: Connection, message: Register) -> None:
    """The replica's life is now this boot. The same boot again keeps its sequence."""
    values = msgspec.structs.asdict(message)
    capacity = values.pop("capacity")
    await conn.execute(_sql["put_replica"], values | msgspec.structs.asdict(capacity))
    await conn.execute(
        _sql["know_boot"], {"boot_id": message.boot_id, "replica_id": message.replica_id}
    )


async def take_beat(conn: Connection, beat: Beat) -> None:
    """Overwrite what the replica said before; the caller has judged boot and sequence."""
    await conn.execute(_sql["take_beat"], msgspec.structs.asdict(beat))


async def advance_journal(conn: Connection, *, boot_id: str, replica_id: str, acked: int) -> int:
    """Raise the boot's position to `acked`, if it is lower. Returns where it stands."""
    values = {"boot_id": boot_id, "replica_id": replica_id, "acked": acked}
    row = await (await conn.execute(_sql["advance_journal"], values)).fetchone()
    assert row is not None, "an upsert returns its row"
    return int(row[0])


async def silent_replicas(conn: Connection, *, silent_ms: int, limit: int) -> list[SilentReplica]:
    """Those not heard for that long and not yet given up, longest silence first."""
    async with conn.cursor(row_factory=struct_row(SilentReplica)) as cursor:
        await cursor.execute(_sql["silent_replicas"], {"silent_ms": silent_ms, "limit": limit})
        return await cursor.fetchall()


async def mark_lost(conn: Connection, replica: SilentReplica, *, silent_ms: int) -> bool:
    """Give it up, unless it was heard or reborn since. A beat brings it back."""
    values = {
        "replica_id": replica.replica_id,
        "boot_id": replica.boot_id,
        "silent_ms": silent_ms,
    }
    row = await (await conn.execute(_sql["mark_lost"], values)).fetchone()
    return row is not None


async def now_ms(conn: Connection) -> int:
    """The database's clock, by which everything here is told."""
    row = await (await conn.execute(_sql["now_ms"])).fetchone()
    assert row is not None, "a SELECT without FROM has a row"
    return int(row[0])


async def forget_old(conn: Connection, *, kept_ms: int) -> None:
    """Drop replicas that stopped or were lost long ago, and boots of over a month."""
    await conn.execute(_sql["forget_replicas"], {"kept_ms": kept_ms})
    await conn.execute(_sql["forget_boots"])


async def replica(conn: Connection, replica_id: str) -> ReplicaRow | None:
    """As it last reported itself."""
    async with conn.cursor(row_factory=struct_row(ReplicaRow)) as cursor:
        await cursor.execute(_sql["replica"], {"replica_id": replica_id})
        return await cursor.fetchone()


async def replicas_page(
    conn: Connection, *, deployment: str = "", after: str = "", limit: int
) -> list[ReplicaRow]:
    """In order of id, after `after`; of one deployment where it is given."""
    values = {"deployment": deployment, "after": after, "limit": limit}
    async with conn.cursor(row_factory=struct_row(ReplicaRow)) as cursor:
        await cursor.execute(_sql["replicas_page"], values)
        return await cursor.fetchall()
