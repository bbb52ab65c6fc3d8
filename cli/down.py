"""`headworks down`: stop the stack and wait until no process of it is left."""

import argparse
import os
import signal
import time
from collections.abc import Mapping

from cli.place import add_data_option, complain, layout_of
from local.state import is_running, read_state

# Gateways, workers, the control plane and the services, one after the other.
TIMEOUT_S = 180.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Only which stack."""
    parser = commands.add_parser("down", help="stop it; data stays")
    add_data_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Stopping what does not run is well."""
    layout = layout_of(arguments)
    state = read_state(layout)
    if state is None:
        return 0
    os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + TIMEOUT_S
    while is_running(layout):
        if time.monotonic() > deadline:
            complain(f"process {state.supervisor_pid} is still stopping after {TIMEOUT_S:.0f} s")
            return 1
        time.sleep(0.1)
    return 0
