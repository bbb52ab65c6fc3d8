"""`python -m gateway`: read the environment, build, serve until SIGTERM."""

import asyncio
import gc
import os
import sys

import uvloop

from core import log
from core.settings import SettingsError, read_settings
from gateway.server import listen, make_server
from gateway.settings import GatewaySettings, checked

# Collections of young objects are frequent and, in a loop of short requests, find nothing.
GC_THRESHOLDS = (50_000, 50, 100)


def main() -> int:
    """The exit status: 0 after a clean stop, 2 for a bad setting, else 1."""
    try:
        settings = checked(read_settings(GatewaySettings, os.environ))
    except SettingsError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    log.configure("gateway", settings.log_level)
    try:
        socket = listen(settings)
    except OSError as error:
        address = f"{settings.gateway_host}:{settings.gateway_port}"
        print(f"gateway: cannot listen on {address}: {error.strerror}", file=sys.stderr)
        return 1
    server = make_server(settings)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve(sockets=[socket]))
    except SystemExit:
        return 1  # uvicorn's word for a start that failed, which it has told
    return 0


if __name__ == "__main__":
    sys.exit(main())
