"""A process that leads when it may, and then writes a row after another, each fenced.

`python -m tests.support.leading URL HOLDER`, on a database that has the table `decided`.
"""

import asyncio
import sys

from control_plane.background import Background, Job
from control_plane.leader import Leadership
from control_plane.metrics import Metrics
from store.postgres import Postgres, PostgresConfig

EVERY_MS = 5


async def lead(url: str, holder: str) -> None:
    """For ever."""
    pg = await Postgres.open(PostgresConfig(database_url=url, application_name=holder))
    metrics = Metrics()
    leadership = Leadership(pg, metrics, holder=holder)

    async def decide() -> None:
        async with pg.transaction() as conn:
            await leadership.fence(conn)
            # Most of the time of this process: a signal finds it here.
            await asyncio.sleep(EVERY_MS / 1000)
            await conn.execute(
                "INSERT INTO decided (holder, epoch) VALUES (%s, %s)", (holder, leadership.epoch)
            )

    background = Background(metrics, timeout_ms=30_000, backoff_max_ms=50, leadership=leadership)
    leadership.start()
    background.start([Job(name="decide", every_ms=1, run=decide, leader=True)])
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(lead(sys.argv[1], sys.argv[2]))
