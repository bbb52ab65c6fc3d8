"""`headworks up`: start the whole system here; Ctrl-C or `headworks down` stops it."""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from artifacts.errors import ArtifactError
from artifacts.manifest import Manifest
from cli import summary
from cli.models import pull_with_progress
from cli.output import Output
from cli.place import ROOT, add_data_option, complain
from local.layout import Layout
from local.options import Options
from local.ports import PortTakenError
from local.postgres import PostgresError
from local.pulling import Stopped
from local.secrets import SecretsError
from local.seed import SeedError
from local.stack import DatabaseError, DiskFullError, Stack, StopFailedError, root_cause
from local.state import AlreadyRunningError, read_state, take_lock
from local.supervisor import StartFailedError, last_lines

DETACHED_TIMEOUT_S = 900.0
EXPECTED = (
    StartFailedError,
    PortTakenError,
    DiskFullError,
    SecretsError,
    PostgresError,
    DatabaseError,
    SeedError,
    ArtifactError,
    OSError,
    httpx.HTTPError,
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Every choice has a default that works."""
    parser = commands.add_parser("up", help="start everything on this machine")
    add_data_option(parser)
    parser.add_argument("--models", type=lambda text: Path(text).resolve(), metavar="DIR")
    parser.add_argument("--detach", action="store_true", help="return when it is ready")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--gateway-port", type=int, default=8000)
    parser.add_argument("--control-plane-port", type=int, default=8001)
    parser.add_argument("--worker-port", type=int, default=8100, help="the first worker's")
    parser.add_argument("--gateways", type=int, default=1, help="each ten ports above the last")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="to compute in (default: what this machine is faster in)",
    )
    parser.add_argument("--lease-ms", type=int, help="before HEADWORKS_LEASE_MS")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Start in the foreground or, detached, in a process of its own."""
    layout = Layout(arguments.data)
    if arguments.detach:
        return _detach(layout, environ)
    try:
        lock = take_lock(layout)
    except AlreadyRunningError:
        return _already_running(layout)
    with lock:
        return asyncio.run(_serve(_options(arguments, environ), environ))


def _options(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    return Options(
        data=arguments.data,
        models=arguments.models,
        host=arguments.host,
        gateway_port=arguments.gateway_port,
        control_plane_port=arguments.control_plane_port,
        worker_port=arguments.worker_port,
        gateways=arguments.gateways,
        workers=arguments.workers,
        model=arguments.model,
        dtype=arguments.dtype,
        lease_ms=arguments.lease_ms,
        database_url=environ.get("DATABASE_URL", ""),
        redis_url=environ.get("REDIS_URL", ""),
    )


async def _serve(options: Options, environ: Mapping[str, str]) -> int:
    layout = Layout(options.data, options.models)
    output = Output()
    asked_to_stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, asked_to_stop.set)

    def pull(stopped: Stopped) -> Manifest:
        return pull_with_progress(
            options.model, layout.models, output, dtype=options.dtype, stopped=stopped
        )

    stack = Stack(options, environ, output.line, pull)
    failure = ""
    try:
        await _until_asked(stack, layout, asked_to_stop)
    except Exception as error:  # noqa: BLE001 - whatever it is: a sentence, and an orderly end
        failure = _sentence(root_cause(error))
        _complain_if_heard(failure)
    finally:
        failure = await _down(stack, failure)
    return 1 if failure else 0


async def _until_asked(stack: Stack, layout: Layout, asked_to_stop: asyncio.Event) -> None:
    """Start, and stay until a signal asks to stop, during the start or after it."""
    starting = asyncio.create_task(stack.up())
    stopping = asyncio.create_task(asked_to_stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            summary.show(layout, stack.gateway_urls[0], stack.control_plane_url)
            await stopping
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


async def _down(stack: Stack, failure: str) -> str:
    """Stop everything; the first failure, of the start or of this."""
    try:
        await stack.down(failure)
    except StopFailedError as error:
        _complain_if_heard(str(error))
        return failure or str(error)
    return failure


def _sentence(error: BaseException) -> str:
    """Ours speak for themselves; of another's, its kind is a part of the message."""
    text = str(error).strip()
    return text if isinstance(error, EXPECTED) and text else f"{type(error).__name__}: {text}"


def _complain_if_heard(sentence: str) -> None:
    with contextlib.suppress(OSError):
        # Standard error may be a file on a full disk.
        complain(sentence)


def _already_running(layout: Layout) -> int:
    state = read_state(layout)
    holder = f" (process {state.supervisor_pid})" if state else ""
    complain(f"a stack already runs in {layout.root}{holder}; `headworks down` stops it")
    return 1


def _detach(layout: Layout, environ: Mapping[str, str]) -> int:
    """Start ourselves again in the background and wait until it is ready or has failed."""
    layout.make()
    if read_state(layout) is not None:
        return _already_running(layout)
    log = layout.log("supervisor")
    arguments = [word for word in sys.argv[1:] if word != "--detach"]
    with log.open("ab") as output:
        child = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", "cli", *arguments],
            cwd=ROOT,
            env={**environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + DETACHED_TIMEOUT_S
    while time.monotonic() < deadline:
        state = read_state(layout)
        if state is not None and state.phase == "up":
            summary.show(layout, state.gateway_urls[0], state.control_plane_url)
            return 0
        if child.poll() is not None:
            complain("the stack did not start:\n" + "\n".join(last_lines(log, 20)))
            return 1
        time.sleep(0.1)
    os.kill(child.pid, signal.SIGTERM)
    complain(f"the stack was not ready within {DETACHED_TIMEOUT_S:.0f} s; see {log}")
    return 1
