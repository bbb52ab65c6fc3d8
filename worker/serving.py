"""What the process serves with, and the three ways to change that while it runs.

    sleep 1   the KV pool is given back, the weights stay
    sleep 2   the weights too: waking loads them from the version's files
    version   another version's weights and text rules, under a new boot

Each first drains, as a stop does. An engine is never changed: it is stopped, and another is
built over what is left, so that no prefix, host block or count of the old one can survive.
One change at a time; whatever fails leaves the worker as it was, or asleep, or ended.
"""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from artifacts.errors import ArtifactError
from core import ids
from worker.changes import ChangeError
from worker.engine import Engine, EngineConfig
from worker.lifecycle import ASLEEP
from worker.machine import trim
from worker.memory import DoesNotFitError
from worker.server import Server
from worker.settings import WorkerSettings
from worker.warming import warm
from worker.watchdog import Guard, Watchdog

POLL_S = 0.05
ENGINE_STOP_TIMEOUT_S = 5.0

WAKING, CHANGING = "waking", "changing"

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Hears what an engine does. Called from several threads."""

    def step(self, rows: int, tokens: int, seconds: float) -> None:
        """A step was made."""

    def grammar(self, seconds: float, ok: bool) -> None:  # noqa: FBT001 - the hook's second word
        """A grammar was compiled, or could not be."""


class Model(Protocol):
    """One version in memory, with or without its pool."""

    def open(self, boot_id: str, observer: Observer) -> Engine:
        """Take the pool; an engine that has seen nothing. Raises DoesNotFitError."""

    def close(self) -> None:
        """Give the pool back; its engine has been stopped."""


Load = Callable[[WorkerSettings], Model]
Resolve = Callable[[WorkerSettings], WorkerSettings]
NewBoot = Callable[[str, WorkerSettings], Awaitable[None]]
Tell = Callable[[], Awaitable[None]]


class Serving:
    """`tell` says the present state to the fleet; `new_boot` ends this boot and begins another.

    `on_stuck` is called on another thread. `load` and `resolve` run in threads.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        server: Server,
        *,
        load: Load,
        resolve: Resolve,
        tell: Tell,
        new_boot: NewBoot,
        on_stuck: Callable[[], None],
        guard: Guard,
    ) -> None:
        self.settings = settings
        self.engine: Engine | None = None
        self.bounds: EngineConfig | None = None  # of the newest engine
        self.broken: Exception | None = None
        self._server = server
        self._load = load
        self._resolve = resolve
        self._tell = tell
        self._new_boot = new_boot
        self._on_stuck = on_stuck
        self._guard = guard
        self._model: Model | None = None
        self._level = 0
        self._watchdog: Watchdog | None = None
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        """Load and open. Raises what `load` does."""
        self._server.version = self.settings.model_version
        await self._reload(self.settings, self._server.boot_id)

    async def warm(self) -> None:
        """Answer synthetic requests. Raises WarmUpError."""
        if self.engine is not None:
            config = self.engine.config
            tokens = await warm(
                self.engine, version=config.version, context_tokens=config.context_tokens
            )
            _log.info("warm", extra={"facts": {"tokens": tokens}})

    async def drain(self, left_s: Callable[[], float]) -> None:
        """For good: no change comes after it. `left_s` is asked again and again: it may shrink."""
        async with self._changing:
            with contextlib.suppress(ChangeError):
                await self._quiesce(left_s)

    def stop(self) -> None:
        """Within a bound, whatever the engine does. Blocks."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.engine is not None:
            self.engine.stop(ENGINE_STOP_TIMEOUT_S)

    async def sleep(self, level: int) -> None:
        """Raises ChangeError."""
        async with self._turn():
            if self._level > level:
                raise ChangeError(409, f"it sleeps at level {self._level}: wake it first")
            self._leave(ASLEEP)
            await self._quiesce()
            self._level = level
            if level > 1:
                self._drop_model()
            elif self._model is not None:
                await asyncio.to_thread(self._model.close)
            _log.info("asleep", extra={"facts": {"level": level}})

    async def wake(self) -> None:
        """Raises ChangeError; it then sleeps on."""
        async with self._turn():
            if not self._level:
                return
            self._leave(WAKING)
            try:
                await self._reload(self.settings, self._server.boot_id)
            except Exception as error:
                self._leave(ASLEEP)
                raise _failed("it sleeps on", error) from error
            await self.warm()
            await self._come_back()

    async def change_version(self, version: str, deployment: str) -> None:
        """Raises ChangeError; it then serves what it did, or, if not even that loads, ends."""
        async with self._turn():
            asked = msgspec.structs.replace(
                self.settings, model_version=version, deployment=deployment
            )
            try:
                new = await asyncio.to_thread(self._resolve, asked)
            except ArtifactError as error:
                raise ChangeError(404, str(error)) from error
            if new.model_version == self.settings.model_version and not self._level:
                return
            self._leave(CHANGING)
            await self._quiesce()
            await self._take_on(new)
            await self.warm()
            await self._come_back()

    async def _take_on(self, new: WorkerSettings) -> None:
        old, boot_id = self.settings, ids.boot_id(os.urandom(ids.ENTROPY_BYTES))
        self._server.version = new.model_version
        self._drop_model()
        try:
            engine = await self._loaded(new, boot_id)
        except Exception as error:
            _log.exception("another version could not be loaded")
            self._server.version = old.model_version
            self._drop_model()
            await self._go_back(old)
            raise _failed(f"it serves {old.model_version} again", error) from error
        self.settings = new
        await self._new_boot(boot_id, new)
        self._begin(engine)

    async def _go_back(self, old: WorkerSettings) -> None:
        try:
            await self._reload(old, self._server.boot_id)
        except Exception as error:
            self.broken = error
            raise _failed("and neither can the one before; the worker ends", error) from error
        await self._come_back()

    async def _reload(self, settings: WorkerSettings, boot_id: str) -> None:
        self._begin(await self._loaded(settings, boot_id))

    async def _loaded(self, settings: WorkerSettings, boot_id: str) -> Engine:
        if self._model is None:
            self._model = await _in_own_thread(self._load, settings)
        engine = await _in_own_thread(self._model.open, boot_id, self._server.metrics)
        self.bounds = engine.config
        return engine

    def _begin(self, engine: Engine) -> None:
        self._level = 0
        self.engine = engine
        self._watchdog = Watchdog(engine, on_stuck=self._on_stuck, guard=self._guard)
        self._watchdog.start()
        engine.start()
        self._server.engine = engine

    async def _quiesce(self, left_s: Callable[[], float] | None = None) -> None:
        """Take nothing new, let what runs finish, end the rest within the bound.

        What is ended this way is told `Failed(shutting_down)`: a gateway resumes it elsewhere.
        """
        if self.engine is None:
            await self._tell()
            return
        self.engine.drain()
        await self._tell()
        left_s = left_s or _until(self.settings.drain_timeout_s)
        while len(self._server.attempts) and left_s() > 0:  # noqa: ASYNC110 - bounded
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(self.stop)
        if self.engine.is_stepping:
            # Its step may still write to what would be given back.
            self._on_stuck()
            raise ChangeError(500, "a step did not end; the worker does")
        self._server.leave_engine()
        self.engine = None

    def _drop_model(self) -> None:
        self._model = self._watchdog = None
        gc.collect()  # an engine and its callbacks hold each other, and the runner
        trim()

    def _leave(self, why: str) -> None:
        self._server.lifecycle.leave(why)

    async def _come_back(self) -> None:
        self._server.lifecycle.come_back()
        await self._tell()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Of one change. One that ends in a way that nobody thought of ends the worker."""
        if self._changing.locked():
            raise ChangeError(409, "another change is under way")
        if not self._server.lifecycle.is_up:
            raise ChangeError(409, f"the worker is {self._server.lifecycle.word}")
        async with self._changing:
            try:
                yield
            except ChangeError:
                raise
            except Exception as error:
                self.broken = error
                raise ChangeError(500, f"{type(error).__name__}: the worker ends") from error


async def _in_own_thread(call: Callable[..., T], *args: Any) -> T:
    """Run what computes in a thread that ends with it.

    OpenMP keeps a team for each thread that has computed, and where the teams of a process have
    more threads than there are cores, nobody spins while waiting for the others: a decode step
    took twice as long beside the idle team of the thread that had loaded the weights.
    """
    threads = ThreadPoolExecutor(1, thread_name_prefix="load")
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, call, *args)
    finally:
        threads.shutdown(wait=False)


def _until(seconds: float) -> Callable[[], float]:
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    return lambda: deadline - clock()


def _failed(what: str, error: Exception) -> ChangeError:
    expected = isinstance(error, ArtifactError | DoesNotFitError)
    return ChangeError(503, f"{error if expected else type(error).__name__}: {what}")
