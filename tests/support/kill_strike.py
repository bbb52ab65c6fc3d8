"""One kill: at a moment of some request, of a victim drawn by lot, noting what it interrupts.

The victim's clock is stopped first, then every open request is looked up, then it dies: so what
is noted is what the kill found. What is killed starts again a moment later; kills overlap with
starts, and hit them too.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Coroutine

from tests.support.kill_load import MOMENTS, Load
from tests.support.kill_report import Tally
from tests.support.kill_stack import CONTROL_PLANE, GATEWAYS, PROCESSES, WORKERS, Stack
from tests.support.kill_steps import STARTING, Journals, Steps

READY_S = 60.0
MOMENT_S = 0.4  # at most, to wait for a moment before killing all the same
BUSY_S = 0.05  # of looking for a session in the middle of a statement

# Postgres dies less often: everything else waits for it.
VICTIMS = {"gateway": 42, "worker": 36, "postgres": 12, "session": 10}
PROCESS_VICTIMS = {"gateway": 42, "worker": 36}
CONTROL_PLANE_TOO = 0.08  # of the kills
NAMES = {"gateway": GATEWAYS, "worker": WORKERS, "control-plane": (CONTROL_PLANE,)}


class Striker:
    """Kills what a stack runs, and starts it again."""

    def __init__(
        self, stack: Stack, load: Load, journals: Journals, rng: random.Random, tally: Tally
    ) -> None:
        self._stack = stack
        self._load = load
        self._journals = journals
        self._steps = Steps(stack, journals)
        self._rng = rng
        self._tally = tally
        self._starting: set[asyncio.Task[None]] = set()
        self._postgres_up = asyncio.Event()
        self._postgres_up.set()

    def close(self) -> None:
        self._steps.close()

    async def strike(self, victims: dict[str, int]) -> None:
        """Wait for a moment, then kill; `victims` are weights."""
        rng = self._rng
        await asyncio.sleep(rng.uniform(0, 0.2))
        moment, gateway = rng.choice(("any", *MOMENTS)), None
        if moment != "any":
            gateway = await self._load.moment(moment, MOMENT_S)
        await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.003), rng.uniform(0, 0.02))))
        (victim,) = rng.choices(list(victims), list(victims.values()))
        self._tally.moments[moment] += 1
        self._kill(victim, gateway)
        if rng.random() < CONTROL_PLANE_TOO:
            self._kill(CONTROL_PLANE, None)

    def kill_postgres(self) -> None:
        """For as long as `start_postgres` is not called."""
        self._tally.note("postgres", self._steps.now(self._load.waiting))
        self._postgres_up.clear()
        self._stack.kill_postgres()

    async def start_postgres(self) -> None:
        await asyncio.to_thread(self._stack.postgres.running.start)
        self._postgres_up.set()

    async def postgres_up(self) -> None:
        await self._postgres_up.wait()

    async def all_ready(self) -> None:
        """Until everything that was killed serves again."""
        await asyncio.gather(*self._starting)
        deadline = time.monotonic() + READY_S
        for name in PROCESSES:
            while not self._stack.listens(name):
                self._stack.revive()
                assert time.monotonic() < deadline, f"{name} does not come up"
                await asyncio.sleep(0.01)

    def _kill(self, victim: str, gateway: str | None) -> None:
        if victim == "session" and self._kill_session():
            return
        if victim in ("session", "postgres"):
            self.kill_postgres()
            self._later(self._start_postgres())
            return
        alive = [name for name in NAMES[victim] if name in self._stack.started()]
        if not alive:  # about to start again
            alive = [self._rng.choice(NAMES[victim])]
            self._stack.start(alive[0])
        name = gateway if gateway in alive else self._rng.choice(alive)
        found = Counter() if self._stack.listens(name) else Counter({STARTING: 1})
        self._stack.stop_clock(name)
        found += self._steps.now(self._load.waiting)
        self._stack.kill(name)
        self._journals.read_on()
        self._tally.note(victim, found)
        self._later(self._start_again(name))

    def _kill_session(self) -> bool:
        """In the middle of a statement, if there is one: its server ends the others, recovers."""
        found = self._steps.now(self._load.waiting)
        deadline = time.monotonic() + BUSY_S
        while (pid := self._stack.busy_session()) is None:
            if time.monotonic() > deadline:
                return False
        os.kill(pid, signal.SIGKILL)
        self._tally.note("session", found)
        return True

    async def _start_again(self, name: str) -> None:
        await asyncio.sleep(self._rng.choice((0.0, self._rng.uniform(0, 0.25))))
        if name not in self._stack.started():
            self._stack.start(name)

    async def _start_postgres(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, self._rng.uniform(0, 0.4))))
        await self.start_postgres()

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
