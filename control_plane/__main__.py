"""`python -m control_plane`: read the environment, build, serve until SIGTERM."""

import os
import sys

import uvicorn

from control_plane.app import create_app
from control_plane.launchers.choose import choose_launcher
from control_plane.settings import ControlPlaneSettings, checked
from core import log
from core.settings import SettingsError, read_settings

PROCESS = "control-plane"


def main() -> int:
    """1 with the reason when a setting is bad."""
    try:
        settings = checked(read_settings(ControlPlaneSettings, os.environ))
        launcher = choose_launcher(settings, os.environ)
    except (SettingsError, OSError) as error:
        print(f"control plane: {error}", file=sys.stderr)
        return 1
    log.configure(PROCESS, settings.log_level)
    uvicorn.run(
        create_app(settings, launcher),
        host=settings.control_plane_host,
        port=settings.control_plane_port,
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, settings.shutdown_ms // 1000),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
