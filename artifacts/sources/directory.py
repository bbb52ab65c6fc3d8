"""A model that already lies on this machine. It is copied: what others own may change."""

import hashlib
import re
from pathlib import Path

import msgspec

from artifacts.progress import Report
from artifacts.sources.base import Fetched


class DirectorySource(msgspec.Struct, frozen=True):
    """A directory in Hugging Face layout, or a GGUF file."""

    path: Path
    sha256s: frozenset[str] | None = None

    @property
    def name(self) -> str:
        """The last part of the path, in letters that a name may have."""
        return re.sub(r"[^a-z0-9._-]+", "-", self.path.stem.lower()).lstrip("-.") or "model"

    @property
    def key(self) -> str:
        """By path."""
        return "directory-" + hashlib.sha256(str(self.path).encode()).hexdigest()[:16]

    def fetch(self, workspace: Path, report: Report) -> Fetched:  # noqa: ARG002 - the interface
        """Nothing to bring."""
        return Fetched(path=self.path, source=str(self.path), owned=False)
