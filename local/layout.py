"""Where one stack keeps its things: everything is under one data directory.

.local/
  secrets.json  admin_token  demo_key        0600
  postgres/ valkey/ models/ spool/ journal/<replica>/
  logs/<process>.log
  run/lock      held by the supervisor while it lives
  run/state.json    what the supervisor last said
"""

from pathlib import Path

import msgspec


class Layout(msgspec.Struct, frozen=True):
    """Paths under `root`. Stacks may share one model store: its content is verified."""

    root: Path
    models_dir: Path | None = None

    @property
    def postgres(self) -> Path:
        """The cluster."""
        return self.root / "postgres"

    @property
    def valkey(self) -> Path:
        """Password and configuration."""
        return self.root / "valkey"

    @property
    def models(self) -> Path:
        """The content-addressed model store."""
        return self.models_dir or self.root / "models"

    @property
    def spool(self) -> Path:
        """Settlements that wait for Postgres."""
        return self.root / "spool"

    @property
    def logs(self) -> Path:
        """One file for each process."""
        return self.root / "logs"

    @property
    def secrets(self) -> Path:
        """What our processes share and nobody else may read."""
        return self.root / "secrets.json"

    @property
    def admin_token(self) -> Path:
        """The operator's token."""
        return self.root / "admin_token"

    @property
    def demo_key(self) -> Path:
        """The demo tenant's API key."""
        return self.root / "demo_key"

    @property
    def lock(self) -> Path:
        """Held while a supervisor lives; the kernel lets go of it however that ends."""
        return self.root / "run" / "lock"

    @property
    def state(self) -> Path:
        """The supervisor's last word on its processes."""
        return self.root / "run" / "state.json"

    def journal(self, replica_id: str) -> Path:
        """One worker's served journal."""
        return self.root / "journal" / replica_id

    def log(self, process: str) -> Path:
        """One process's output, every life of it."""
        return self.logs / f"{process}.log"

    def make(self) -> None:
        """Create the directories that processes write to."""
        for path in (self.root, self.models, self.spool, self.logs, self.lock.parent):
            path.mkdir(parents=True, exist_ok=True)
