"""One life of a worker process, from the first probe to the last journal entry.

serve probes ─► load, warm ─► register, beat, deliver ─► SIGTERM ─► drain ─► say goodbye
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from core.fleet import Capacity, ReplicaState
from worker.attempts import wall_ms
from worker.control_link import ControlLink, FencedError
from worker.engine import Engine
from worker.journal import Journal, left_behind
from worker.lifecycle import Lifecycle
from worker.metrics import Metrics
from worker.server import Server
from worker.settings import WorkerSettings

POLL_S = 0.05
ENGINE_STOP_TIMEOUT_S = 5.0
EXIT_FENCED = 3

Load = Callable[[WorkerSettings, str], Engine]  # what the settings say, for a boot of this id

_log = logging.getLogger(__name__)


class HTTPServer(Protocol):
    """What is used of uvicorn's server."""

    should_exit: bool

    async def serve(self) -> None:
        """Until `should_exit`, which SIGTERM sets too; then until connections are done."""


class Worker:
    """Owns the journal, the engine and the link; the HTTP server is lent to it.

    `load` takes seconds and all cores: it runs in a thread while the server answers probes.
    """

    def __init__(self, settings: WorkerSettings, *, boot_id: str, load: Load) -> None:
        self._settings = settings
        self._load = load
        directory = Path(settings.journal_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._left_behind = left_behind(directory, now_ms=wall_ms())
        self._journal = Journal(directory, boot_id, bytes_max=settings.journal_bytes_max)
        self._lifecycle = Lifecycle()
        self._engine: Engine | None = None
        self.server = Server(
            secret=settings.internal_secret.encode(),
            boot_id=boot_id,
            journal=self._journal,
            lifecycle=self._lifecycle,
            metrics=Metrics(),
            request_bytes_max=settings.request_bytes_max,
        )

    async def run(self, http: HTTPServer) -> int:
        """The exit status. Raises what loading raises."""
        serving = asyncio.create_task(http.serve())
        try:
            return await self._live(http, serving)
        finally:
            http.should_exit = True
            await serving
            self._stop_engine()
            self._journal.close()

    async def _live(self, http: HTTPServer, serving: asyncio.Task[None]) -> int:
        self._lifecycle.advance(ReplicaState.LOADING)
        engine = await asyncio.to_thread(self._load, self._settings, self.server.boot_id)
        if serving.done():
            return 0
        engine.start()
        self._engine = engine
        self.server.engine = engine
        self._lifecycle.advance(ReplicaState.READY)
        link = self._link(http)
        linking = asyncio.create_task(link.run())
        stopping = asyncio.create_task(self._drain_when_asked(http, link))
        await asyncio.wait({linking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        link_ended = linking.done()
        http.should_exit = True
        await stopping
        linking.cancel()
        ended, _ = await asyncio.gather(linking, serving, return_exceptions=True)
        await link.close()
        if link_ended and isinstance(ended, FencedError):
            _log.error("fenced", extra={"facts": {"reason": str(ended)}})
            return EXIT_FENCED
        return 0

    def _link(self, http: HTTPServer) -> ControlLink:
        def drain() -> None:
            http.should_exit = True

        return ControlLink(
            self._settings,
            self.server,
            capacity=self._capacity,
            can_resume=True,
            left_behind=self._left_behind,
            on_drain=drain,
        )

    def _capacity(self) -> Capacity:
        assert self._engine is not None
        bounds = self._engine.config
        return Capacity(
            kv_blocks=bounds.kv_blocks,
            block_tokens=bounds.block_tokens,
            context_tokens=bounds.context_tokens,
            sequences=bounds.max_sequences,
        )

    async def _drain_when_asked(self, http: HTTPServer, link: ControlLink) -> None:
        """Once asked: take nothing new, let what runs finish, end the rest within the bound.

        What is ended this way is told `Failed(shutting_down)`: a gateway resumes it elsewhere.
        """
        # A flag that uvicorn's signal handler sets: there is nothing to wait on.
        while not http.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        assert self._engine is not None
        self._lifecycle.advance(ReplicaState.DRAINING)
        self._engine.drain()
        await link.beat_once()
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._settings.drain_timeout_s
        while len(self.server.attempts) and clock() < deadline:  # noqa: ASYNC110 - bounded
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(self._stop_engine)
        self._lifecycle.advance(ReplicaState.STOPPED)

    def _stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.stop(ENGINE_STOP_TIMEOUT_S)
