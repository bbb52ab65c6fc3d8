"""Replicas that somebody else starts: they register themselves, and end when they are drained."""

from control_plane.launchers.base import LauncherError
from core.launch import LaunchSpec, Place
from core.worker_spec import LauncherKind


class ExternalLauncher:
    """See `Launcher`. It has no places, and starts nothing."""

    kind = LauncherKind.EXTERNAL
    home = ""
    places_max = 0

    def start(self, spec: LaunchSpec) -> Place:
        """See `Launcher`."""
        raise LauncherError(f"{spec.replica_id} is started elsewhere")

    def places(self) -> tuple[Place, ...]:
        """See `Launcher`."""
        return ()

    def stop(self, replica_id: str, *, grace_ms: int) -> None:
        """See `Launcher`. It hears of its drain with its next beat."""

    def forget(self, replica_id: str) -> None:
        """See `Launcher`."""
