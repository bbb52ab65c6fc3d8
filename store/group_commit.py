"""Group commit: many callers' commands in one transaction, over one connection kept for it.

    submit ─► queue ─► batch ─► one round trip ─► answers       next batch gathers meanwhile
                         │
                         └─ an account is locked elsewhere ─► siding: its commands wait there

There is no timer: a batch is whatever came while the last one was on its way. Commands are
idempotent, so a batch whose fate is unknown is sent again. Whatever happens, a caller hears
within `answer_timeout_s`: its answer, or LedgerAwayError, which says that the command may or
may not have been done and is safe to repeat.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import psycopg

from store.lane_connection import LaneConnection
from store.postgres import (
    OPERATIONAL,
    PostgresConfig,
    ReadOnlyError,
    StoreAwayError,
    connect_as,
    cut,
)

Command = TypeVar("Command")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
Command_contra = TypeVar("Command_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)

_log = logging.getLogger(__name__)


class LedgerAwayError(StoreAwayError):
    """No answer in time. The command may have been done; repeating it is safe."""


class AccountLockedError(LedgerAwayError):
    """Somebody has had this account locked for as long as anyone waits; others are served."""


class LedgerRejectedError(Exception):
    """This command cannot be carried out: a bug, and repeating it will not help."""


class GroupCommitConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every bound of a lane."""

    postgres: PostgresConfig
    batch_max: int = 512
    queue_max: int = 20_000
    answer_timeout_s: float = 5.0
    try_timeout_s: float = 3.0  # one round trip, its commit included
    lock_timeout_ms: int = 100  # then the locked accounts go to the siding
    siding_lock_timeout_ms: int = 500  # then others there have their turn
    retry_pause_min_s: float = 0.02
    retry_pause_max_s: float = 0.5


class Work(Protocol[Command_contra, Answer_co]):
    """What a lane's commands mean; the lane itself knows only when and how often."""

    def key(self, command: Command_contra) -> str:
        """No two commands of one key share a batch."""

    def account(self, command: Command_contra) -> str:
        """What the command must lock."""

    async def run(
        self, conn: LaneConnection, commands: Sequence[Command_contra]
    ) -> Sequence[Answer_co]:
        """Do them all, or none and raise. Doing them again must give the same answers."""

    async def free(self, conn: LaneConnection, accounts: Sequence[str]) -> set[str]:
        """Which of these nobody holds locked just now."""


class Item(Generic[Command, Answer]):
    """A command, and who waits for it until when. Who left, or was told, is told no more."""

    __slots__ = ("command", "deadline", "future", "key")

    def __init__(
        self, command: Command, key: str, future: asyncio.Future[Answer], deadline: float
    ) -> None:
        self.command = command
        self.key = key
        self.future = future
        self.deadline = deadline

    def answer(self, answer: Answer) -> None:
        """What the command came to."""
        if not self.future.done():
            self.future.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Why there is no answer."""
        if not self.future.done():
            self.future.set_exception(error)


class GroupCommit(Generic[Command, Answer]):
    """One lane with its siding. Each has one connection, made when first needed."""

    def __init__(self, config: GroupCommitConfig, work: Work[Command, Answer]) -> None:
        self._work = work
        self._diverted: Counter[str] = Counter()
        self._main = Lane(config, work, config.lock_timeout_ms, self._divert)
        self._siding = Lane(config, work, config.siding_lock_timeout_ms, None)

    @property
    def away(self) -> bool:
        """Whether the last attempts to reach Postgres failed."""
        return self._main.away

    def submit(self, command: Command) -> asyncio.Future[Answer]:
        """The answer to come. Cancelling it stops the waiting, not a command already sent."""
        account = self._work.account(command)
        if account in self._diverted:
            return self._aside(self._siding.submit(command), account)
        return self._main.submit(command)

    async def close(self) -> None:
        """Finish what was submitted, within `answer_timeout_s`, and take nothing more."""
        await self._main.close()
        await self._siding.close()

    def _divert(self, items: Sequence[Item[Command, Answer]]) -> None:
        for item in items:
            self._siding.adopt(item)
            self._aside(item.future, self._work.account(item.command))

    def _aside(self, future: asyncio.Future[Answer], account: str) -> asyncio.Future[Answer]:
        def back(_: asyncio.Future[Answer]) -> None:
            self._diverted[account] -= 1
            if not self._diverted[account]:
                del self._diverted[account]

        self._diverted[account] += 1
        future.add_done_callback(back)
        return future


class Lane(Generic[Command, Answer]):
    """A queue and the task that empties it."""

    def __init__(
        self,
        config: GroupCommitConfig,
        work: Work[Command, Answer],
        lock_timeout_ms: int,
        divert: Callable[[Sequence[Item[Command, Answer]]], None] | None,
    ) -> None:
        self._config = config
        self._work = work
        self._divert = divert
        # Tables grow by a million rows before their statistics say so: a plan made while they
        # were empty must still go by key. Compiling a plan costs more than running it.
        self._options = {
            "lock_timeout": str(lock_timeout_ms),
            "enable_seqscan": "off",
            "jit": "off",
        }
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Item[Command, Answer]] = deque()
        self._sent: Sequence[Item[Command, Answer]] = ()
        self._wake = asyncio.Event()
        self._closing = False
        self._conn: LaneConnection | None = None
        self._away_since: float | None = None
        self._reaper: asyncio.TimerHandle | None = None
        self._task = self._loop.create_task(self._run(), name="ledger lane")

    @property
    def away(self) -> bool:
        """Whether the last attempt to reach Postgres failed."""
        return self._away_since is not None

    def submit(self, command: Command) -> asyncio.Future[Answer]:
        """Raises LedgerAwayError at once when waiting would be in vain."""
        if self._closing:
            raise LedgerAwayError("the ledger is closed")
        if len(self._queue) >= self._config.queue_max:
            raise LedgerAwayError(f"{len(self._queue)} commands are waiting already")
        now = self._loop.time()
        if self._away_since is not None and now - self._away_since > self._config.answer_timeout_s:
            raise LedgerAwayError("Postgres has been away for a while")
        deadline = now + self._config.answer_timeout_s
        key = self._work.key(command)
        item = Item[Command, Answer](command, key, self._loop.create_future(), deadline)
        self.adopt(item)
        return item.future

    def adopt(self, item: Item[Command, Answer]) -> None:
        """Queue an item that already has its deadline."""
        self._queue.append(item)
        self._wake.set()
        if self._reaper is None:
            self._reaper = self._loop.call_later(self._config.answer_timeout_s / 10, self._reap)

    async def close(self) -> None:
        """Finish what is queued; each item ends by its deadline at the latest."""
        self._closing = True
        self._wake.set()
        await self._task
        if self._reaper is not None:
            self._reaper.cancel()
        await self._disconnect()

    async def _run(self) -> None:
        """Whatever goes wrong with one batch, the next one is served."""
        while True:
            self._sent = self._take()
            if not self._sent and self._closing:
                return
            try:
                await self._step()
            except Exception as error:  # noqa: BLE001 - the lane must outlive it; it is logged
                _log.exception("a ledger lane failed")
                for item in self._sent:
                    item.fail(LedgerRejectedError(repr(error)))
                await self._disconnect()
                await asyncio.sleep(self._config.retry_pause_max_s)

    async def _step(self) -> None:
        if self._sent:
            await self._commit(self._sent)
        elif self.away:
            await self._reconnect()
        else:
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> list[Item[Command, Answer]]:
        batch: list[Item[Command, Answer]] = []
        later: list[Item[Command, Answer]] = []
        keys: set[str] = set()
        while self._queue and len(batch) < self._config.batch_max:
            item = self._queue.popleft()
            if item.future.done():
                continue
            if item.key in keys:
                later.append(item)
            else:
                keys.add(item.key)
                batch.append(item)
        self._queue.extendleft(reversed(later))
        return batch

    async def _commit(self, batch: Sequence[Item[Command, Answer]]) -> None:
        pause_s = self._config.retry_pause_min_s
        while batch := [item for item in batch if not item.future.done()]:
            try:
                answers = await self._try(batch)
            except psycopg.errors.LockNotAvailable:
                batch = await self._leave_locked(batch)
                continue
            except (StoreAwayError, OSError):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._config.retry_pause_max_s)
                continue
            except Exception as error:  # noqa: BLE001 - a command at fault must not fail the others
                await self._isolate(batch, error)
                return
            for item, answer in zip(batch, answers, strict=True):
                item.answer(answer)
            return

    async def _try(self, batch: Sequence[Item[Command, Answer]]) -> Sequence[Answer]:
        conn = await self._connected()
        return await self._bounded(conn, self._work.run(conn, [item.command for item in batch]))

    async def _isolate(self, batch: Sequence[Item[Command, Answer]], error: Exception) -> None:
        """One of them breaks a rule, or our code. Halve the batch until it stands alone."""
        if len(batch) == 1:
            facts = {"command": batch[0].key}
            _log.error("a ledger command is rejected", exc_info=error, extra={"facts": facts})
            batch[0].fail(LedgerRejectedError(str(error)))
            return
        middle = len(batch) // 2
        await self._commit(batch[:middle])
        await self._commit(batch[middle:])

    async def _leave_locked(
        self, batch: Sequence[Item[Command, Answer]]
    ) -> Sequence[Item[Command, Answer]]:
        """Part with those whose account somebody else has locked; return the others.

        They go to the siding, or when they are there to the end of its queue: what was let go
        meanwhile, and what came since, does not wait for them.
        """
        accounts = {self._work.account(item.command) for item in batch}
        try:
            conn = await self._connected()
            free = await self._bounded(conn, self._work.free(conn, sorted(accounts)))
        except StoreAwayError:
            return batch
        locked = [item for item in batch if self._work.account(item.command) not in free]
        if self._divert is not None:
            self._divert(locked)
        else:
            self._postpone(locked)
        return [item for item in batch if self._work.account(item.command) in free]

    def _postpone(self, items: Sequence[Item[Command, Answer]]) -> None:
        """To the end of the queue, but not behind later commands of the same key."""
        keys = {item.key for item in items}
        others = [item for item in self._queue if item.key not in keys]
        later = [item for item in self._queue if item.key in keys]
        self._queue = deque([*others, *items, *later])

    async def _bounded(self, conn: LaneConnection, work: Coroutine[Any, Any, Result]) -> Result:
        """Raises StoreAwayError for whatever may be over when tried again, but locks."""
        config = self._config
        overdue = self._loop.call_later(config.try_timeout_s, cut, conn)
        try:
            # Who waits for a connection that is cut hears of it; this is for all else.
            async with asyncio.timeout(config.try_timeout_s + config.retry_pause_max_s):
                return await work
        except TimeoutError as error:
            await self._disconnect()
            raise StoreAwayError("Postgres did not answer in time") from error
        except psycopg.errors.LockNotAvailable:
            raise
        except psycopg.errors.ReadOnlySqlTransaction as error:
            await self._disconnect()  # another server may have taken over by now
            raise ReadOnlyError(str(error)) from error
        except OPERATIONAL as error:
            raise StoreAwayError(str(error)) from error
        finally:
            overdue.cancel()
            if conn.closed:
                await self._disconnect()

    async def _connected(self) -> LaneConnection:
        if self._conn is None:
            try:
                self._conn = await connect_as(
                    LaneConnection, self._config.postgres, options=self._options
                )
            except StoreAwayError:
                if self._away_since is None:
                    self._away_since = self._loop.time()
                raise
            self._away_since = None
        return self._conn

    async def _reconnect(self) -> None:
        try:
            await self._connected()
        except StoreAwayError:
            await asyncio.sleep(self._config.retry_pause_max_s)

    async def _disconnect(self) -> None:
        if self._conn is not None:
            conn, self._conn = self._conn, None
            await conn.close()

    def _reap(self) -> None:
        """Fail whatever has waited long enough."""
        now = self._loop.time()
        waiting = [item for item in (*self._sent, *self._queue) if not item.future.done()]
        for item in waiting:
            if item.deadline <= now:
                item.fail(self._too_late())
        self._reaper = None
        if waiting:
            self._reaper = self._loop.call_later(self._config.answer_timeout_s / 10, self._reap)

    def _too_late(self) -> LedgerAwayError:
        if self._divert is None and not self.away:  # the siding, and nothing else to wait for
            return AccountLockedError("its account is locked by somebody else")
        return LedgerAwayError("Postgres did not answer in time")
