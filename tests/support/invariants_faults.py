"""Faults that strike a ledger while it has commands under way, on real Postgres.

Each is a context in which commands are given: entering it lays the trap, leaving it clears up.
What struck is counted, so that a test can say that it did.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from store.ledger import Ledger
from store.postgres import cut
from tests.support.fault_proxy import FaultProxy, Link, Moment, Way, lose_answer

LOCK_TIMEOUT_S = 0.1  # after which a lane gives up on a lock
BLOCKED_WAIT_S = 0.08  # for a batch to reach one
SOON_S = 0.002
KILLS = {"cancel": "pg_cancel_backend", "terminate": "pg_terminate_backend"}


class Saboteur:
    """Two sessions with every right: one gets in the way of others, the other looks on."""

    def __init__(self, mine: Any, looking: Any) -> None:
        self._mine = mine
        self._looking = looking
        self.struck: Counter[str] = Counter()

    @classmethod
    async def open(cls, url: str) -> "Saboteur":
        """Sessions of their own, without any of our bounds."""
        connect = psycopg.AsyncConnection.connect
        return cls(await connect(url, autocommit=True), await connect(url, autocommit=True))

    async def close(self) -> None:
        await self._mine.close()
        await self._looking.close()

    @asynccontextmanager
    async def killing(self, how: str, process: str, account: str) -> AsyncIterator[None]:
        """`cancel` or `terminate` what the process has under way, once it waits for a lock."""
        await self._mine.execute("BEGIN")
        await self._lock(account)

        async def kill() -> None:
            for pid in await self._blocked(process):
                await self._looking.execute(f"SELECT {KILLS[how]}(%s)", (pid,))
                self.struck[how] += 1
            await self._mine.execute("ROLLBACK")

        async with _meanwhile(kill()):
            yield

    @asynccontextmanager
    async def deadlocking(
        self, process: str, first: str, last: str, *, give_way: bool
    ) -> AsyncIterator[None]:
        """Take two accounts in the order opposite to the ledger's; `give_way`: we fail, not it."""
        await self._mine.execute("BEGIN")
        timeout = "1ms" if give_way else "10s"
        await self._mine.execute(f"SET LOCAL deadlock_timeout = '{timeout}'")
        await self._lock(max(first, last))

        async def cross() -> None:
            clock = asyncio.get_running_loop().time
            blocked, began = await self._blocked(process), clock()
            try:
                await self._lock(min(first, last))
            except psycopg.errors.DeadlockDetected:
                self.struck["deadlock of ours"] += 1
            else:
                # So soon, it has not let go by itself.
                soon = clock() - began < LOCK_TIMEOUT_S / 2
                self.struck["deadlock of theirs"] += bool(blocked) and soon
            await self._mine.execute("ROLLBACK")

        async with _meanwhile(cross()):
            yield

    @asynccontextmanager
    async def changing(self, process: str, account: str) -> AsyncIterator[None]:
        """Change an account that the process waits for: whoever read it before must start anew."""
        await self._mine.execute("BEGIN")
        await self._mine.execute(
            "UPDATE accounts SET opened_at = opened_at WHERE tenant_id = %s", (account,)
        )

        async def commit() -> None:
            self.struck["serialization failure"] += bool(await self._blocked(process))
            await self._mine.execute("COMMIT")

        async with _meanwhile(commit()):
            yield

    @asynccontextmanager
    async def cutting(
        self, proxy: FaultProxy, *, after_bytes: int, answer: bool
    ) -> AsyncIterator[None]:
        """Cut what passes the proxy: a question part of the way, or the answer to one."""
        do = lose_answer if answer else Link.reset
        trap = proxy.trap(Way.TO_SERVER, Moment(after_bytes=after_bytes), do)
        yield
        self.struck["cut answer" if answer else "cut question"] += trap.sprung.is_set()
        proxy.heal()

    async def crash(self, ledger: Ledger, process: str) -> None:
        """The process is gone between two instructions; returns when the server noticed."""
        # It says no goodbye and cancels nothing: the server ends what it has begun.
        talking = [task for task in asyncio.all_tasks() if _coroutine(task) == "_Commands.run"]
        lanes = [part for lane in ledger._lanes for part in (lane._main, lane._siding)]
        for lane in lanes:
            lane._task.cancel()
            if lane._reaper is not None:
                lane._reaper.cancel()
            if lane._conn is not None:
                cut(lane._conn)
        await asyncio.gather(*talking, *(lane._task for lane in lanes), return_exceptions=True)
        for lane in lanes:
            await lane._disconnect()
        self.struck["crash"] += 1
        while await self._backends(process):  # noqa: ASYNC110 - the server is asked
            await asyncio.sleep(SOON_S)

    async def changes_allowed(self, *, everything: bool) -> list[str]:
        """What should be refused, and is not. Nothing is changed by it."""
        statements = [
            "UPDATE entries SET reason = reason WHERE false",
            "DELETE FROM entries WHERE false",
        ]
        if everything:
            statements += [
                "TRUNCATE entries",
                "UPDATE prices SET currency = currency WHERE false",
                "DELETE FROM prices WHERE false",
            ]
        allowed = []
        for statement in statements:
            try:
                async with self._mine.transaction(force_rollback=True):
                    await self._mine.execute(statement)
            except psycopg.errors.DatabaseError:
                continue
            allowed.append(statement)
        return allowed

    async def _lock(self, account: str) -> None:
        await self._mine.execute(
            "SELECT FROM accounts WHERE tenant_id = %s FOR NO KEY UPDATE", (account,)
        )

    async def _blocked(self, process: str) -> list[int]:
        """The process's backends that wait for a lock, as soon as there are any."""
        deadline = asyncio.get_running_loop().time() + BLOCKED_WAIT_S
        while asyncio.get_running_loop().time() < deadline:
            cursor = await self._looking.execute(
                "SELECT pid FROM pg_stat_activity"
                " WHERE application_name = %s AND wait_event_type = 'Lock'",
                (process,),
            )
            if rows := await cursor.fetchall():
                return [pid for (pid,) in rows]
            await asyncio.sleep(SOON_S)
        return []

    async def _backends(self, process: str) -> int:
        return int(
            await self._one(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", process
            )
        )

    async def _one(self, statement: str, *parameters: str) -> Any:
        row = await (await self._looking.execute(statement, parameters)).fetchone()
        return row[0]


def _coroutine(task: "asyncio.Task[Any]") -> str:
    return getattr(task.get_coro(), "__qualname__", "")


@asynccontextmanager
async def _meanwhile(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await task
