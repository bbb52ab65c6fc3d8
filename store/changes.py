"""Numbers for changes that gateways poll for: they become visible in the order they rise.

`next_change` locks the stream's clock until its caller's transaction ends, so writers of one
stream queue; they are operators, and few. A reader that has seen N has seen everything to N.
"""

from typing import Literal

from store.postgres import Connection
from store.queries import load

Stream = Literal["tenancy", "routing"]

_sql = load("changes")


async def next_change(conn: Connection, stream: Stream) -> int:
    """A number for the change that this transaction is about to make."""
    row = await (await conn.execute(_sql["next_change"], {"stream": stream})).fetchone()
    assert row is not None, "the migration made a clock for every stream"
    return int(row[0])


async def current_change(conn: Connection, stream: Stream) -> int:
    """The newest change that is visible; read it before the rows it speaks of."""
    row = await (await conn.execute(_sql["current_change"], {"stream": stream})).fetchone()
    assert row is not None, "the migration made a clock for every stream"
    return int(row[0])
