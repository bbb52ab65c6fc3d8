"""What launchers were asked for: written before anything is started, forgotten when it is gone.

So a control plane that dies between the two leaves a row, which the next one finishes; and a
place without a row is nobody's. Times are the database's clock, as Unix milliseconds.
"""

from core.launch import Launch
from core.worker_spec import LauncherKind
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("launches")


async def all_launches(conn: Connection) -> list[Launch]:
    """In order of replica id; there are as many as replicas that are launched."""
    async with conn.cursor(row_factory=struct_row(Launch)) as cursor:
        await cursor.execute(_sql["all_launches"])
        return await cursor.fetchall()


async def any_of(conn: Connection, deployment: str) -> bool:
    """Whether a launcher was asked for one of its replicas, and not yet rid of it."""
    row = await (await conn.execute(_sql["any_of"], {"deployment": deployment})).fetchone()
    return row is not None


async def ask(
    conn: Connection, *, replica_id: str, deployment: str, launcher: LauncherKind, home: str
) -> bool:
    """False when the id is taken."""
    values = {
        "replica_id": replica_id,
        "deployment": deployment,
        "launcher": launcher,
        "home": home,
    }
    return await (await conn.execute(_sql["ask"], values)).fetchone() is not None


async def started(conn: Connection, replica_id: str) -> None:
    """It runs now."""
    await conn.execute(_sql["started"], {"replica_id": replica_id})


async def adopted(conn: Connection, replica_id: str) -> None:
    """It runs, since when is not known: not before it might be started, which is what counts.

    Nothing that was heard of it before then is of this life.
    """
    await conn.execute(_sql["adopted"], {"replica_id": replica_id})


async def failed(conn: Connection, replica_id: str, *, reason: str, retry_in_ms: int) -> None:
    """It could not be started, or ended by itself."""
    values = {"replica_id": replica_id, "reason": reason, "retry_in_ms": retry_in_ms}
    await conn.execute(_sql["failed"], values)


async def settled(conn: Connection, replica_id: str) -> None:
    """It has been well for long: its failures are forgotten."""
    await conn.execute(_sql["settled"], {"replica_id": replica_id})


async def ask_stop(conn: Connection, replica_id: str, *, reason: str, grace_ms: int) -> None:
    """For good: it is not started again. The first reason stays."""
    values = {"replica_id": replica_id, "reason": reason, "grace_ms": grace_ms}
    await conn.execute(_sql["ask_stop"], values)


async def forget(conn: Connection, replica_id: str) -> None:
    """Its place is empty."""
    await conn.execute(_sql["forget"], {"replica_id": replica_id})
