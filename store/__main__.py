"""`python -m store`: bring the database up to date, then end. For containers and pipelines."""

import os
import sys

from core.settings import SettingsError, read_settings
from store.migrate import MigrationSettings, upgrade


def main() -> int:
    """The exit status: 2 for a bad setting."""
    try:
        settings = read_settings(MigrationSettings, os.environ)
    except SettingsError as error:
        print(f"store: {error}", file=sys.stderr)
        return 2
    upgrade(settings.database_url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
