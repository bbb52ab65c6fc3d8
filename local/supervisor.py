"""Runs child processes: starts them, shows what they say, restarts what crashes, stops all.

Children get a session of their own, so that Ctrl-C reaches only us and we stop them in order;
and the kernel ends them if we are killed, so that no run leaves a process behind.
"""

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO

from local.process import ProcessSpec
from local.state import ProcessReport, ProcessState

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
STABLE_AFTER_S = 20.0
READY_POLL_S = 0.1
LINE_BYTES_MAX = 1024 * 1024
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)

Show = Callable[[str, str], None]


class StartFailedError(Exception):
    """A process ended or stayed unready while it was being started; the message says which."""


class Supervised:
    """One child through all its lives."""

    def __init__(
        self, spec: ProcessSpec, log: Path, show: Show, changed: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.report = ProcessReport(state=ProcessState.STARTING)
        self._log_path = log
        self._show = show
        self._changed = changed
        self._child: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stop_asked = asyncio.Event()

    async def start(self) -> None:
        """Start the first life, and watch over it from now on."""
        self._child = await self._spawn()
        self._watching = asyncio.create_task(self._watch())

    async def wait_ready(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Raises StartFailedError when it crashes or takes too long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await ready():
            if self.report.restarts:
                tail = "\n".join(last_lines(self._log_path, 15))
                raise StartFailedError(f"{self.spec.name} ended while starting:\n{tail}")
            if asyncio.get_running_loop().time() > deadline:
                raise StartFailedError(f"{self.spec.name} was not ready within {timeout_s:.0f} s")
            await asyncio.sleep(READY_POLL_S)
        self._become(ProcessState.RUNNING)

    async def stop(self) -> None:
        """Ask kindly, wait, then insist. Returns when the process is gone."""
        self._stop_asked.set()
        child = self._child
        if child is not None and child.returncode is None:
            child.send_signal(self.spec.stop_signal)
            try:
                await asyncio.wait_for(child.wait(), self.spec.stop_timeout_s)
            except TimeoutError:
                self._show(self.spec.name, "did not stop in time; killed")
                _kill_group(child.pid)
        if self._watching is not None:
            await self._watching
        self._become(ProcessState.STOPPED)

    async def _watch(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while True:
            assert self._child is not None
            started = asyncio.get_running_loop().time()
            await self._relay_output(self._child)
            code = await self._child.wait()
            if self._stop_asked.is_set():
                return
            if asyncio.get_running_loop().time() - started > STABLE_AFTER_S:
                backoff_s = BACKOFF_FIRST_S
            self.report.restarts += 1
            self.report.last_exit = code
            self._become(ProcessState.BACKOFF)
            self._show(self.spec.name, f"ended with {code}; starting again in {backoff_s:g} s")
            try:
                await asyncio.wait_for(self._stop_asked.wait(), backoff_s)
            except TimeoutError:
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
            else:
                return
            self._child = await self._spawn()
            self._become(ProcessState.RUNNING)

    async def _spawn(self) -> asyncio.subprocess.Process:
        child = await asyncio.create_subprocess_exec(
            *self.spec.argv,
            cwd=self.spec.cwd,
            env=dict(self.spec.env),
            user=self.spec.user,
            group=self.spec.group,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            limit=LINE_BYTES_MAX,
        )
        self.report.pid = child.pid
        self._changed()
        return child

    async def _relay_output(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        with self._log_path.open("ab", buffering=0) as log:
            while line := await _next_line(child.stdout):
                _append(log, line)
                self._show(self.spec.name, line.decode(errors="replace").rstrip())

    def _become(self, state: ProcessState) -> None:
        self.report.state = state
        if state is ProcessState.STOPPED:
            self.report.pid = None
        self._changed()


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log file, reading a bounded piece of it."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count * 2000))
        return file.read().decode(errors="replace").splitlines()[-count:]


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:
        # A line over the limit: take what is there and go on, rather than lose the child.
        return await stream.read(LINE_BYTES_MAX)


def _append(log: IO[bytes], line: bytes) -> None:
    try:
        log.write(line)
    except OSError as error:
        # A full disk must not take the children down with it.
        _log.warning("cannot write a log", extra={"facts": {"reason": str(error)}})


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _die_with_parent() -> None:
    # Runs in the child after setuid, which would have cleared it. Postgres takes SIGINT as a
    # fast shutdown, the others as an ordinary end.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT)
