"""One life of a worker process, from the first probe to the last journal entry.

serve, register, beat, deliver ─► load ─► warm ─► ready ─► asked to end ─► drain ─► goodbye

It answers probes and aborts until it has drained. A change of version ends a boot, not the
process: its journal is closed, and another boot id, journal and link go on.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from core.fleet import Capacity, ReplicaState
from worker.attempts import wall_ms
from worker.control_link import ControlLink, FencedError
from worker.ending import Ending
from worker.journal import Journal, LeftBehind, left_behind
from worker.lifecycle import Lifecycle
from worker.machine import process_age_s
from worker.metrics import Metrics
from worker.server import Server
from worker.serving import POLL_S, Load, Resolve, Serving
from worker.settings import WorkerSettings
from worker.watchdog import EXIT_STUCK, Guard, NoGuard

EXIT_FAILED = 1
EXIT_FENCED = 3
# For streams to be told that their engine is stuck.
FLUSH_S = 2.0
BY_FLEET = "the fleet drains it"
BY_SIGNAL = "its process was asked to end"

_log = logging.getLogger(__name__)


class HTTPServer(Protocol):
    """What is used of uvicorn's server."""

    should_exit: bool

    async def serve(self) -> None:
        """Until `should_exit`; then until connections are done."""


def _as_given(settings: WorkerSettings) -> WorkerSettings:
    return settings


class Worker:
    """Owns the journal, what serves and the link; the HTTP server is lent to it.

    `load` takes seconds and all cores: it runs in a thread while the server answers probes.
    `resolve` finds a version in the store, and its deployment. `guard` ends a process that
    cannot end itself.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        boot_id: str,
        load: Load,
        resolve: Resolve = _as_given,
        guard: Guard | None = None,
    ) -> None:
        self._directory = Path(settings.journal_dir)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._bytes_max = settings.journal_bytes_max
        self._left_behind: list[LeftBehind] = []
        self._journal = self._open_journal(boot_id)
        self._lifecycle = Lifecycle()
        self._ending = Ending()
        self._drain_ms = settings.drain_timeout_s * 1000
        self._began_s = time.monotonic() - process_age_s()
        self._status: int | None = None  # once it is clear how this ends
        self._link: ControlLink | None = None
        self._linking: asyncio.Task[None] | None = None
        self.server = Server(
            secret=settings.internal_secret.encode(),
            boot_id=boot_id,
            journal=self._journal,
            lifecycle=self._lifecycle,
            metrics=Metrics(),
            request_bytes_max=settings.request_bytes_max,
        )
        self._serving = Serving(
            settings,
            self.server,
            load=load,
            resolve=resolve,
            tell=self._tell,
            new_boot=self._change_boot,
            on_stuck=self._on_stuck,
            guard=guard or NoGuard(),
        )
        self.server.changes = self._serving
        self.server.drain = self.end

    def end(self, reason: str = BY_SIGNAL, within_ms: int | None = None) -> int:
        """Drain, and end: null is `drain_timeout_s`. Returns the milliseconds that are left.

        Of SIGTERM too, and called in the event loop. The fleet hears of it with the next beat.
        """
        self._ask(reason, within_ms)
        return self._ending.left_ms(_monotonic_ms())

    async def run(self, http: HTTPServer) -> int:
        """The exit status. Raises what loading raises."""
        serving = asyncio.create_task(http.serve())
        try:
            return await self._live(http, serving)
        finally:
            http.should_exit = True
            self._lifecycle.advance(ReplicaState.STOPPED)
            await self._end_link(serving)
            self._serving.stop()
            self._journal.close()

    async def _live(self, http: HTTPServer, serving: asyncio.Task[None]) -> int:
        self._lifecycle.advance(ReplicaState.LOADING)
        self._begin_link()
        await self._serving.start()
        if serving.done():
            return self._status or 0
        self._lifecycle.advance(ReplicaState.WARMING)
        if not self._asked_to_end(http):
            await self._serving.warm()
            self._lifecycle.advance(ReplicaState.READY)
        await self._tell()
        # Flags that signal handlers and other threads set: there is nothing to wait on.
        while not self._asked_to_end(http):  # noqa: ASYNC110 - see above
            await asyncio.sleep(POLL_S)
        self._lifecycle.advance(ReplicaState.DRAINING)
        if self._status == EXIT_STUCK:
            await self._flush()
        else:
            await self._serving.drain(lambda: self._ending.left_ms(_monotonic_ms()) / 1000)
        return self._status or 0

    def _asked_to_end(self, http: HTTPServer) -> bool:
        if self._ended or http.should_exit:
            self._ask(BY_SIGNAL, None)
        return self._ending.asked

    def _ask(self, reason: str, within_ms: int | None, *, by_fleet: bool = False) -> None:
        within_ms = self._drain_ms if within_ms is None else within_ms
        now_ms = _monotonic_ms()
        self._ending.ask(reason, within_ms=within_ms, now_ms=now_ms, by_fleet=by_fleet)

    @property
    def _ended(self) -> bool:
        if self._serving.broken is not None:
            _log.error("no version can be loaded", exc_info=self._serving.broken)
            self._status = EXIT_FAILED
        return self._status is not None

    async def _flush(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + FLUSH_S
        while len(self.server.attempts) and clock() < deadline:  # noqa: ASYNC110 - bounded
            await asyncio.sleep(POLL_S)

    def _on_stuck(self) -> None:
        self.server.metrics.stuck.inc()
        self._status = EXIT_STUCK

    async def _tell(self) -> None:
        if self._link is not None:
            await self._link.beat_once()

    def _begin_link(self) -> None:
        self._link = ControlLink(
            self._serving.settings,
            self.server,
            capacity=self._capacity,
            can_resume=True,
            left_behind=self._left_behind,
            on_drain=lambda within_ms: self._ask(BY_FLEET, within_ms, by_fleet=True),
            age_ms=lambda: int((time.monotonic() - self._began_s) * 1000),
            ending=lambda: self._ending.told(_monotonic_ms()),
        )
        self._linking = asyncio.create_task(self._link.run())
        self._linking.add_done_callback(self._on_link_ended)

    async def _end_link(self, *others: asyncio.Task[None]) -> None:
        if self._link is None or self._linking is None:
            await asyncio.gather(*others, return_exceptions=True)
            return
        self._linking.cancel()
        await asyncio.gather(self._linking, *others, return_exceptions=True)
        await self._link.close()

    def _on_link_ended(self, linking: asyncio.Task[None]) -> None:
        """Only being fenced ends it by itself."""
        if linking.cancelled() or linking is not self._linking or self._status is not None:
            return
        error = linking.exception()
        if isinstance(error, FencedError):
            _log.error("fenced", extra={"facts": {"reason": str(error)}})
        self._status = EXIT_FENCED if isinstance(error, FencedError) else EXIT_FAILED

    async def _change_boot(self, boot_id: str, settings: WorkerSettings) -> None:
        """What the old boot has still to tell goes the way of an earlier life's journal."""
        _log.info("another boot", extra={"facts": {"boot": boot_id, "of": settings.model_version}})
        await self._end_link()
        self._journal.close()
        self._began_s = time.monotonic()
        self._journal = self._open_journal(boot_id)
        self.server.begin(boot_id, self._journal)
        self._begin_link()

    def _open_journal(self, boot_id: str) -> Journal:
        self._left_behind = left_behind(self._directory, now_ms=wall_ms())
        return Journal(self._directory, boot_id, bytes_max=self._bytes_max)

    def _capacity(self) -> Capacity:
        bounds = self._serving.bounds
        if bounds is None:
            settings = self._serving.settings
            return Capacity(
                kv_blocks=0,
                block_tokens=settings.block_tokens,
                context_tokens=1,
                sequences=settings.max_sequences,
            )
        return Capacity(
            kv_blocks=bounds.kv_blocks,
            block_tokens=bounds.block_tokens,
            context_tokens=bounds.context_tokens,
            sequences=bounds.max_sequences,
        )


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
