"""Runs child processes: starts them, shows what they say, restarts what crashes, stops all.

Children get a session of their own, so that Ctrl-C reaches only us and we stop them in order;
and the kernel ends them if we are killed, so that no run leaves a process behind.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO

from local.process import ProcessSpec
from local.state import ProcessReport, ProcessState

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
STABLE_AFTER_S = 20.0
READY_POLL_S = 0.1
KILL_TIMEOUT_S = 5.0
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
        self._signal_stop()
        if self._watching is not None:
            await self._outlive(self._watching)
        self._become(ProcessState.STOPPED)

    def _signal_stop(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(self.spec.stop_signal)

    async def _outlive(self, watching: asyncio.Task[None]) -> None:
        """Wait for the end of the last life, which a stop may have found being born."""
        done, _ = await asyncio.wait({watching}, timeout=self.spec.stop_timeout_s)
        if not done:
            self._say("did not stop in time; killed")
            if self._child is not None:
                _kill_group(self._child.pid)
            done, _ = await asyncio.wait({watching}, timeout=KILL_TIMEOUT_S)
        if not done:
            # Somebody outside the group holds its output open: nothing of ours is left.
            watching.cancel()
            await asyncio.wait({watching})
        elif error := watching.exception():
            raise error

    async def _watch(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while True:
            started = asyncio.get_running_loop().time()
            ended = await self._end_of_life()
            if self._stop_asked.is_set():
                return
            if asyncio.get_running_loop().time() - started > STABLE_AFTER_S:
                backoff_s = BACKOFF_FIRST_S
            self.report.restarts += 1
            self._become(ProcessState.BACKOFF)
            self._say(f"{ended}; starting again in {backoff_s:g} s")
            try:
                await asyncio.wait_for(self._stop_asked.wait(), backoff_s)
            except TimeoutError:
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
            else:
                return
            await self._live_again()

    async def _end_of_life(self) -> str:
        """Waits for it; says in words how it was."""
        if self._child is None:
            return "could not be started"
        await self._relay_output(self._child)
        code = await self._child.wait()
        self.report.last_exit = code
        return f"ended with {code}"

    async def _live_again(self) -> None:
        self._child = None
        try:
            self._child = await self._spawn()
        except (OSError, subprocess.SubprocessError) as error:
            # No memory, no descriptors, a full disk: all of them may pass.
            self.report.pid = None
            self._say(f"cannot be started: {error}")
            return
        self._become(ProcessState.RUNNING)
        if self._stop_asked.is_set():
            # The stop came while this life was being born, and signalled nobody.
            self._signal_stop()

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
        with contextlib.ExitStack() as closing:
            log = _open_log(self._log_path)
            if log is not None:
                closing.enter_context(log)
            while line := await _next_line(child.stdout):
                if log is not None:
                    _append(log, line)
                self._say(line.decode(errors="replace").rstrip())

    def _say(self, text: str) -> None:
        try:
            self._show(self.spec.name, text)
        except OSError as error:
            # Our own output may lie on a full disk, or have lost its reader.
            _warn("cannot show a line", error)

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


def _open_log(path: Path) -> IO[bytes] | None:
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        _warn("cannot open a log", error)
        return None


def _append(log: IO[bytes], line: bytes) -> None:
    try:
        log.write(line)
    except OSError as error:
        # A full disk must not take the children down with it.
        _warn("cannot write a log", error)


def _warn(what: str, error: OSError) -> None:
    _log.warning(what, extra={"facts": {"reason": str(error)}})


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _die_with_parent() -> None:
    # Runs in the child after setuid, which would have cleared it. Postgres takes SIGINT as a
    # fast shutdown, the others as an ordinary end.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT)
