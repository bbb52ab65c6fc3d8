"""What a supervisor says of itself, so that other commands can find and judge it.

The lock tells whether one lives: the kernel releases it however the holder ends, so a killed
run leaves nothing stale. The state file is only read while the lock is held.
"""

import fcntl
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import IO

import msgspec

from local.layout import Layout

TAKE_LOCK_S = 1.0
TAKE_LOCK_POLL_S = 0.005


class ProcessState(StrEnum):
    """Of one supervised process."""

    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPED = "stopped"


class ProcessReport(msgspec.Struct, kw_only=True):
    """One process as the supervisor sees it."""

    state: ProcessState
    pid: int | None = None
    restarts: int = 0
    last_exit: int | None = None


class StackState(msgspec.Struct, kw_only=True):
    """The state file. `phase` is starting, up, stopping or failed."""

    supervisor_pid: int
    phase: str
    gateway_urls: list[str]
    control_plane_url: str
    worker_urls: list[str]
    database_url: str
    redis_url: str
    processes: dict[str, ProcessReport] = {}
    failure: str = ""


class AlreadyRunningError(Exception):
    """Another supervisor holds this data directory."""


def take_lock(layout: Layout) -> IO[str]:
    """Hold the data directory until the file is closed. Raises AlreadyRunningError.

    Tries for TAKE_LOCK_S: whoever asks `is_running` holds a share of the lock for a moment.
    """
    layout.lock.parent.mkdir(parents=True, exist_ok=True)
    file = layout.lock.open("a+")
    deadline = time.monotonic() + TAKE_LOCK_S
    while not _try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            file.close()
            raise AlreadyRunningError(str(layout.root))
        time.sleep(TAKE_LOCK_POLL_S)
    return file


def is_running(layout: Layout) -> bool:
    """Whether a supervisor holds this data directory."""
    try:
        file = layout.lock.open()
    except FileNotFoundError:
        return False
    with file:
        # Shared, so that any number may ask at once.
        return not _try_lock(file, fcntl.LOCK_SH)


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_state(layout: Layout) -> StackState | None:
    """The live supervisor's last word, or None when there is none, or no word of it yet."""
    if not layout.state.exists() or not is_running(layout):
        return None
    state = msgspec.json.decode(layout.state.read_bytes(), type=StackState)
    # A killed run's file is there until its successor has written its own.
    return state if _lives(state.supervisor_pid) else None


def write_state(path: Path, state: StackState) -> None:
    """Replace the state file in one step. It holds passwords, so it is its owner's alone."""
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state)))
    temporary.replace(path)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
