"""Kills at every step of a request's life, and proof after each that the books are right.

    chapter: fresh database ─► load ─► kill, audit, kill, audit … ─► rest ─► compare everything

All choices come from one seed. The machine's own timing does not, so that a seed repeats the
kind of run and not its instants.
"""

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.gateway_world import Caller, World, _register_model
from tests.support.kill_checks import Ended, check_all, come_to_rest, observe, reading
from tests.support.kill_load import Load, told
from tests.support.kill_report import Tally
from tests.support.kill_stack import GATEWAYS, PROCESSES, Stack
from tests.support.kill_steps import Journals
from tests.support.kill_strike import PROCESS_VICTIMS, VICTIMS, Striker
from tests.support.kill_tenants import Operator, Terms, open_tenants
from tests.support.registry import open_postgres

CHAPTER_KILLS = 50
REST_EVERY = 25  # kills
OUTAGE_KILLS = 10  # at the end of every second chapter, while Postgres stays away
# Gateways wait five seconds for the ledger's answer; then words go to their spools.
OUTAGE_S = 5.5
REPLAY_S = 2.5  # for living gateways to replay their own spools


async def run(stack: Stack, *, seed: int, kills: int, tell: Callable[[str], None]) -> Tally:
    """Chapters until there were so many kills. What fails tells its seed in a note."""
    tally = Tally()
    began = time.monotonic()
    number = 0
    while tally.count < kills:
        number += 1
        stack.open_chapter(number)
        chapter = Chapter(stack, random.Random(f"{seed} {number}"), tally)
        try:
            await chapter.run(min(CHAPTER_KILLS, kills - tally.count), with_outage=number % 2 == 1)
        except BaseException as error:
            error.add_note(f"SOAK_SEED={seed}, chapter {number}, after {tally.count} kills")
            error.add_note(f"logs, journals and spools are kept in {_kept(stack.directory)}")
            raise
        stack.close_chapter(number)
        tally.seconds, tally.fenced = time.monotonic() - began, stack.fenced
        tell(f"{tally.count} kills in {tally.seconds:.0f} s")
    return tally


def _kept(directory: Path) -> Path:
    copy = Path(tempfile.mkdtemp(prefix="headworks-kills-"))
    return Path(shutil.copytree(directory, copy, dirs_exist_ok=True))


class Chapter:
    """One database's life."""

    def __init__(self, stack: Stack, rng: random.Random, tally: Tally) -> None:
        self._stack = stack
        self._rng = rng
        self._tally = tally
        self._journals = Journals(stack)
        self._tenants: dict[Caller, Terms] = {}
        self._counted: set[str] = set()
        self._read = 0

    async def run(self, kills: int, *, with_outage: bool) -> None:
        """Ends at rest, with everything still running."""
        await self._found()
        ports = {name: self._stack.ports[name] for name in GATEWAYS}
        load = Load(self._rng, ports, list(self._tenants))
        (prepaid,) = (caller for caller, terms in self._tenants.items() if terms.prepaid)
        operator = Operator(self._stack.database_url, self._rng, load, prepaid)
        striker = Striker(self._stack, load, self._journals, self._rng, self._tally)
        for name in PROCESSES:
            self._stack.start(name)
        await striker.all_ready()
        last = self._tally.count + kills
        outage_kills = min(OUTAGE_KILLS, kills) if with_outage else 0
        while (left := last - outage_kills - self._tally.count) > 0:
            async with self._under_load(load, operator, striker):
                for _ in range(min(REST_EVERY, left)):
                    await striker.strike(VICTIMS)
                    await self._observe(striker)
        if with_outage:
            async with self._under_load(load, operator, striker):
                await self._outage(striker, outage_kills)
        striker.close()

    async def _found(self) -> None:
        async with open_postgres(self._stack.database_url) as postgres:
            async with postgres.transaction() as conn:
                await _register_model(conn, self._stack.manifest)
            world = World(postgres, None, self._stack.manifest)
            self._tenants = await open_tenants(world, self._rng)

    @asynccontextmanager
    async def _under_load(
        self, load: Load, operator: Operator, striker: Striker
    ) -> AsyncIterator[None]:
        """Then at rest, with everything compared."""
        load.start()
        operator.start()
        yield
        await load.pause()
        await striker.all_ready()
        await operator.pause()
        await self._adopt(striker)
        url = self._stack.database_url
        await come_to_rest(self._stack, url, self._journals)
        rows = await check_all(url, self._journals, load.asked, self._tenants)
        async with reading(url) as conn:
            await operator.check(conn)
        self._tally.rests += 1
        self._count(rows, load)

    async def _observe(self, striker: Striker) -> None:
        await striker.postgres_up()
        await observe(self._stack.database_url, self._tenants)
        self._tally.observed += 1
        self._stack.revive()

    async def _outage(self, striker: Striker, kills: int) -> None:
        """Postgres stays away until words are spooled, and their gateways die too."""
        await asyncio.sleep(self._rng.uniform(0.5, 1.0))
        striker.kill_postgres()
        await asyncio.sleep(OUTAGE_S)
        for _ in range(kills - 1):
            await striker.strike(PROCESS_VICTIMS)
        await striker.start_postgres()
        await self._observe(striker)

    async def _adopt(self, striker: Striker) -> None:
        """A gateway adopts what dead ones left when it starts, and then once in a minute."""
        until = time.monotonic() + REPLAY_S
        while any(self._stack.spool.glob("*/*.spool")):
            if time.monotonic() > until:
                self._stack.kill(GATEWAYS[0])
                self._stack.start(GATEWAYS[0])
                await striker.all_ready()
                return
            await asyncio.sleep(0.05)

    def _count(self, rows: list[Ended], load: Load) -> None:
        """What is new in this chapter since the last rest."""
        tally, before = self._tally, self._counted
        self._counted = {row.request_id for row in rows}
        new = [row for row in rows if row.request_id not in before]
        tally.rows += len(new)
        tally.causes.update(row.cause for row in new)
        tally.retried += sum(1 for row in new if row.attempts > 1)
        tally.answers += sum(1 for asked in load.asked[self._read :] if told(asked) is not None)
        self._read = len(load.asked)
