"""Workers as processes of this machine, which outlive us and are found again.

    <directory>/home                      who we are, made once
    <directory>/<home>/places/<replica>/  lock   held by the process for as long as it lives
                                          pid    written by itself, before it becomes the worker
                                          place.json   what it was started as
    <directory>/journal/<replica>/  logs/<replica>.log

The kernel knows whether a process lives: it inherits the lock and cannot lose it. So two control
planes, or one that was killed between any two lines, never start a second process for an id, and
never signal a process that is not ours: a pid is believed only while its lock is held. What a
process started has the lock too, and is ended with it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from control_plane.launchers.base import LauncherError
from control_plane.launchers.ports import is_free
from core.launch import LaunchSpec, Place
from core.worker_spec import LauncherKind, spec_environment

LOG_BYTES_MAX = 64 * 1024 * 1024  # then it becomes <name>.log.1 at the next start
TAKE_LOCK_S = 0.3
POLL_S = 0.01
# The shell writes its pid and becomes the worker: no moment in which it is not known.
WRITE_PID = 'echo $$ > "$0" && exec "$@"'
# Ours to hand over on purpose, or not at all: a worker touches neither Postgres nor Valkey.
NOT_INHERITED = ("HEADWORKS_", "DATABASE_URL", "REDIS_URL")


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How workers are started here."""

    directory: Path
    models_dir: Path
    command: tuple[str, ...]
    cwd: Path
    host: str
    port: int
    places_max: int
    control_plane_url: str
    internal_secret: str
    log_level: str = "INFO"


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    replica_id: str
    deployment: str
    version: str
    port: int


class LocalLauncher:
    """See `Launcher`. `environ` is passed on, but for what is the control plane's own."""

    kind = LauncherKind.LOCAL

    def __init__(
        self,
        config: LocalConfig,
        environ: Mapping[str, str],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._environ = {
            name: value for name, value in environ.items() if not name.startswith(NOT_INHERITED)
        }
        self._clock_s = clock_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # of this life of ours
        self._asked_s: dict[str, float] = {}  # when each was first asked to end, by us
        self.home = self._read_home()
        self._root = config.directory / self.home / "places"
        self._root.mkdir(parents=True, exist_ok=True)

    @property
    def places_max(self) -> int:
        """See `Launcher`."""
        return self._config.places_max

    def start(self, spec: LaunchSpec) -> Place:
        """See `Launcher`."""
        try:
            return self._start(spec)
        except (OSError, subprocess.SubprocessError) as error:
            raise LauncherError(f"{spec.replica_id} cannot be started: {error}") from error

    def places(self) -> tuple[Place, ...]:
        """See `Launcher`."""
        try:
            return tuple(self._place(path) for path in sorted(self._root.iterdir()))
        except OSError as error:
            raise LauncherError(f"{self._root} cannot be read: {error}") from error

    def stop(self, replica_id: str, *, grace_ms: int) -> None:
        """See `Launcher`."""
        now_s = self._clock_s()
        first_s = self._asked_s.get(replica_id)
        if first_s is None:
            if self._signal(replica_id, signal.SIGTERM):
                self._asked_s[replica_id] = now_s
        elif now_s - first_s > grace_ms / 1000:
            self._signal(replica_id, signal.SIGKILL)

    def forget(self, replica_id: str) -> None:
        """See `Launcher`."""
        directory = self._root / replica_id
        if directory.is_dir():
            with self._locked(directory):
                shutil.rmtree(directory, ignore_errors=True)
        self._children.pop(replica_id, None)
        self._asked_s.pop(replica_id, None)

    def _start(self, spec: LaunchSpec) -> Place:
        directory = self._root / spec.replica_id
        directory.mkdir(parents=True, exist_ok=True)
        with self._locked(directory) as lock:
            (directory / "pid").unlink(missing_ok=True)
            port = self._free_port()
            record = _Record(
                replica_id=spec.replica_id,
                deployment=spec.deployment,
                version=spec.version,
                port=port,
            )
            _write(directory / "place.json", msgspec.json.encode(record))
            with self._open_log(spec.replica_id) as log:
                self._children[spec.replica_id] = subprocess.Popen(  # noqa: S603 - the operator's own command
                    ["/bin/sh", "-c", WRITE_PID, str(directory / "pid"), *self._config.command],
                    cwd=self._config.cwd,
                    env=self._environment(spec, port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(lock.fileno(),),
                )
        self._asked_s.pop(spec.replica_id, None)
        return self._place(directory)

    def _environment(self, spec: LaunchSpec, port: int) -> dict[str, str]:
        config = self._config
        own = {
            "INTERNAL_SECRET": config.internal_secret,
            "DEPLOYMENT": spec.deployment,
            "REPLICA_ID": spec.replica_id,
            "MODELS_DIR": str(config.models_dir),
            "MODEL_VERSION": spec.version,
            "JOURNAL_DIR": str(config.directory / "journal" / spec.replica_id),
            "CONTROL_PLANE_URL": config.control_plane_url,
            "REGION": spec.region,
            "LOG_LEVEL": config.log_level,
            "WORKER_HOST": config.host,
            "WORKER_PORT": str(port),
        }
        return {
            "OMP_WAIT_POLICY": "passive",  # several workers share these cores
            "PYTHONUNBUFFERED": "1",
            **self._environ,
            **{f"HEADWORKS_{name}": value for name, value in own.items()},
            **spec_environment(spec.worker),
        }

    def _place(self, directory: Path) -> Place:
        name = directory.name
        alive = self._is_alive(directory)
        record = _read_record(directory)
        return Place(
            replica_id=name,
            alive=alive,
            pid=_read_pid(directory) if alive else None,
            url=f"http://{self._config.host}:{record.port}" if record else "",
            ended="" if alive else self._how_it_ended(name),
        )

    def _is_alive(self, directory: Path) -> bool:
        child = self._children.get(directory.name)
        if child is not None:
            child.poll()  # else it would stay a zombie of ours
        try:
            with (directory / "lock").open() as file:
                return not _try_lock(file, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def _how_it_ended(self, name: str) -> str:
        child = self._children.get(name)
        if child is None or child.poll() is None:
            return "ended; how is not known, it was not this process's child"
        return f"ended with {child.returncode}"

    def _signal(self, name: str, number: signal.Signals) -> bool:
        """Whether there was a process to signal."""
        directory = self._root / name
        pid = _read_pid(directory)
        if pid is None:
            return False
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return self._signal_rest(directory, pid, number)
        try:
            # Only now is it certain that this pid is the lock's holder and not its successor.
            if not self._is_alive(directory) or _read_pid(directory) != pid:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _signal_rest(self, directory: Path, group: int, number: signal.Signals) -> bool:
        """Those that it started and left behind, such as the worker of a script that is gone.

        The kernel gives a number to nobody else while a group of that number has members.
        """
        if not self._is_alive(directory):
            return False
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return False
        return True

    @contextlib.contextmanager
    def _locked(self, directory: Path) -> Iterator[IO[str]]:
        """Raises LauncherError while a process lives there, or while another start is under way."""
        with (directory / "lock").open("a+") as file:
            deadline_s = time.monotonic() + TAKE_LOCK_S
            # Whoever looks whether one lives holds a share of the lock for a moment.
            while not _try_lock(file, fcntl.LOCK_EX):
                if time.monotonic() > deadline_s:
                    raise LauncherError(f"a process for {directory.name} is alive")
                time.sleep(POLL_S)
            yield file

    def _free_port(self) -> int:
        """Raises LauncherError."""
        config = self._config
        taken = set()
        for path in self._root.iterdir():
            record = _read_record(path)
            if record is not None and self._is_alive(path):
                taken.add(record.port)
        last = config.port + config.places_max
        for port in range(config.port, last):
            if port not in taken and is_free(config.host, port):
                return port
        raise LauncherError(f"no port from {config.port} to {last - 1} is free")

    def _open_log(self, name: str) -> IO[bytes]:
        path = self._config.directory / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_suffix(".log.1"))
        return path.open("ab")

    def _read_home(self) -> str:
        """The directory's own name, and whose workers they are: stacks may share a directory."""
        path = self._config.directory / "home"
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            temporary = path.with_name(f".home.{os.getpid()}")
            _write(temporary, os.urandom(16).hex().encode())
            try:
                os.link(temporary, path)  # the first of several wins
            finally:
                temporary.unlink()
        whose = f"{path.read_text()}:{self._config.internal_secret}"
        return hashlib.sha256(whose.encode()).hexdigest()[:16]


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(directory: Path) -> int | None:
    """None until the process has written it."""
    try:
        text = (directory / "pid").read_text().strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None


def _read_record(directory: Path) -> _Record | None:
    try:
        return msgspec.json.decode((directory / "place.json").read_bytes(), type=_Record)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None  # a start that was cut short


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)
