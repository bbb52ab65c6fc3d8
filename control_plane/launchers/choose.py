"""Which launcher this control plane has."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from control_plane.launchers.base import Launcher
from control_plane.launchers.external import ExternalLauncher
from control_plane.launchers.local import LocalConfig, LocalLauncher
from control_plane.settings import ControlPlaneSettings

ROOT = Path(__file__).parents[2]


def choose_launcher(settings: ControlPlaneSettings, environ: Mapping[str, str]) -> Launcher:
    """Local processes where a directory is given for them, else none. Raises OSError."""
    if not settings.launcher_dir:
        return ExternalLauncher()
    directory = Path(settings.launcher_dir).resolve()
    models = Path(settings.launcher_models_dir) if settings.launcher_models_dir else None
    url = f"http://{settings.control_plane_host}:{settings.control_plane_port}"
    config = LocalConfig(
        directory=directory,
        models_dir=models.resolve() if models else directory / "models",
        command=tuple(shlex.split(settings.launcher_command)) or (sys.executable, "-m", "worker"),
        cwd=ROOT,
        host=settings.launcher_host,
        port=settings.launcher_port,
        places_max=settings.launcher_replicas_max,
        control_plane_url=settings.launcher_control_plane_url or url,
        internal_secret=settings.internal_secret,
        log_level=settings.log_level,
    )
    return LocalLauncher(config, environ)
