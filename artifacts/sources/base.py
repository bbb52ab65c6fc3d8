"""What a source gives to a pull."""

from pathlib import Path
from typing import Protocol

import msgspec

from artifacts.progress import Report


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """Files ready to be taken. `owned` says they lie in the workspace and never change."""

    path: Path  # a GGUF file or a directory
    source: str  # for the manifest: where exactly they came from
    owned: bool


class Source(Protocol):
    """A model that can be fetched."""

    @property
    def name(self) -> str:
        """The model's name, if the operator gives none."""

    @property
    def key(self) -> str:
        """Two pulls of the same thing have the same key, and take turns."""

    @property
    def sha256s(self) -> frozenset[str] | None:
        """The digests of all its files, where they are known beforehand."""

    def fetch(self, workspace: Path, report: Report) -> Fetched:
        """Bring the files; `workspace` may hold what an earlier, killed call left.

        Raises ArtifactError.
        """
