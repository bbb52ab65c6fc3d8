"""`python -m worker`: read the environment, load, serve, drain."""

import asyncio
import logging
import os
import sys

import uvicorn
import uvloop

from artifacts.errors import ArtifactError
from core import ids, log
from core.settings import SettingsError, read_settings
from worker.memory import DoesNotFitError
from worker.process import Worker
from worker.settings import WorkerSettings, checked
from worker.startup import load_engine, resolved


def main() -> int:
    """The exit status: 0 after a clean stop, 2 for a setting that will not do, 3 fenced, else 1."""
    try:
        settings = resolved(checked(read_settings(WorkerSettings, os.environ)))
    except (SettingsError, ArtifactError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2
    log.configure("worker", settings.log_level)
    boot_id = ids.boot_id(os.urandom(ids.ENTROPY_BYTES))
    worker = Worker(settings, boot_id=boot_id, load=load_engine)
    server = uvicorn.Server(
        uvicorn.Config(
            worker.server,
            host=settings.worker_host,
            port=settings.worker_port,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=120,  # gateways keep connections; they close them first
            timeout_graceful_shutdown=settings.drain_timeout_s + 5,
        )
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(worker.run(server))
    except DoesNotFitError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2
    except Exception:
        logging.getLogger("worker").exception("the worker ended")
        return 1


if __name__ == "__main__":
    sys.exit(main())
