"""What a launcher is: it starts a worker for a replica id, finds what runs, and stops it.

Every call may be repeated, and may have been made by a control plane that died since: a launcher
keeps what it must know where its processes are, not in our memory. Two starts of one replica id
never make two processes; the second is refused.
"""

from typing import Protocol

from core.launch import LaunchSpec, Place
from core.worker_spec import LauncherKind


class LauncherError(Exception):
    """It could not be done; the message says why, for an operator."""


class Launcher(Protocol):
    """One way to start workers. Calls may block for a moment: they are made in a thread."""

    @property
    def kind(self) -> LauncherKind:
        """Of which deployments."""

    @property
    def home(self) -> str:
        """Where its places are: they are seen from there alone."""

    @property
    def places_max(self) -> int:
        """How many may be alive at once."""

    def start(self, spec: LaunchSpec) -> Place:
        """Start it. Raises LauncherError, also when one of that id is alive."""

    def places(self) -> tuple[Place, ...]:
        """Everything it has, alive or ended, whoever started it. Raises LauncherError."""

    def stop(self, replica_id: str, *, grace_ms: int) -> None:
        """Ask it to end; past the grace since it was first asked, end it. Does not wait."""

    def forget(self, replica_id: str) -> None:
        """Drop what is kept of one that has ended; its journal stays. Raises LauncherError."""
