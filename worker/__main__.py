"""`python -m worker`: read the environment, load, serve, drain."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from artifacts.errors import ArtifactError
from core import ids, log
from core.settings import SettingsError, read_settings
from worker.memory import DoesNotFitError
from worker.process import Worker
from worker.serving import Load
from worker.settings import WorkerSettings, checked
from worker.startup import load_model, resolved
from worker.watchdog import EXIT_STUCK, ProcessGuard


class HTTPServer(uvicorn.Server):
    """Uvicorn's, but that a signal asks the worker to end, which serves until it has drained.

    Uvicorn would stop listening at once, so that nobody could ask how it is or abort, and raise
    the signal again when its connections are done, before the last beat and the last journal
    entries have left.
    """

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        yield  # and on: what comes after still takes its time


def main(load: Load = load_model) -> int:
    """The exit status: 0 stopped, 2 a setting will not do, 3 fenced, 4 stuck, else 1."""
    try:
        settings = resolved(checked(read_settings(WorkerSettings, os.environ)))
    except (SettingsError, ArtifactError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2
    log.configure("worker", settings.log_level)
    boot_id = ids.boot_id(os.urandom(ids.ENTROPY_BYTES))
    guard = ProcessGuard()
    worker = Worker(settings, boot_id=boot_id, load=load, resolve=resolved, guard=guard)
    server = HTTPServer(
        uvicorn.Config(
            worker.server,
            host=settings.worker_host,
            port=settings.worker_port,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=120,  # gateways keep connections; they close them first
            timeout_graceful_shutdown=settings.drain_timeout_s + 5,
        ),
        worker.end,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(worker.run(server))
            if status == EXIT_STUCK:
                guard.end(status)  # what hangs would be waited for at the interpreter's end
            return status
    except DoesNotFitError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2
    except Exception:
        logging.getLogger("worker").exception("the worker ended")
        return 1


if __name__ == "__main__":
    sys.exit(main())
