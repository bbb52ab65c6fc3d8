"""What a launcher is asked for, and what it finds. Pure.

A launch is the wish, kept in the registry from before anything starts until it is gone. A place
is what runs for it, as the launcher itself finds it. Times are Unix milliseconds by the
database's clock.
"""

import msgspec

from core.worker_spec import LauncherKind, WorkerSpec


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One replica to start."""

    replica_id: str
    deployment: str
    region: str
    version: str
    worker: WorkerSpec


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that a launcher was asked to start. `home` is which launcher of its kind."""

    replica_id: str
    deployment: str
    launcher: LauncherKind
    home: str
    asked_ms: int
    started_ms: int | None = None
    failures: int = 0  # in a row
    last_failure: str = ""
    retry_ms: int | None = None
    stop_reason: str = ""
    stop_asked_ms: int | None = None
    stop_grace_ms: int = 0

    @property
    def is_wanted(self) -> bool:
        """Whether nobody has asked to stop it."""
        return self.stop_asked_ms is None


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher has for a replica id: at most one process, alive or ended."""

    replica_id: str
    alive: bool
    pid: int | None = None
    url: str = ""
    ended: str = ""  # how, as far as it is known
