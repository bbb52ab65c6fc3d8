"""Model versions on disk, each file kept once under its own hash.

    root/blobs/<sha256>                 bytes
    root/versions/<hash>/manifest.json  with a link to a blob for every file
    root/names/<name>                   the version a name means now
    root/stamps/<hash>.json             size, time and inode of files found intact
    root/incoming/                      of pulls in progress; root/locks/

A version's directory appears in one rename, after its blobs, so it is whole or absent; it
is given out only after its bytes were checked.
"""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from artifacts.errors import CorruptError, UnknownModelError
from artifacts.files import sha256_of, sync_folder, write_atomic
from artifacts.lock import file_lock
from artifacts.manifest import MANIFEST_NAME, FileEntry, Manifest, contents_of, version_hash

_Stamps = dict[str, tuple[int, int, int]]  # path: size, mtime in ns, inode


class ModelStore:
    """The versions under one root. Safe for several processes; a reader needs no write access."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = root / "blobs"
        self._versions = root / "versions"
        self._names = root / "names"
        self._stamps = root / "stamps"
        self._checked: dict[str, _Stamps] = {}

    def prepare(self) -> None:
        """Make the folders, for a process that will write."""
        for name in ("blobs", "versions", "names", "stamps", "incoming", "locks"):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    def versions(self) -> list[Manifest]:
        """Every version whose manifest reads, the newest first."""
        found = [self._manifest(path.name) for path in self._versions.glob("*/")]
        whole = [manifest for manifest in found if manifest is not None]
        return sorted(whole, key=lambda manifest: (-manifest.created_ms, manifest.version))

    def find(self, name_or_hash: str) -> Manifest | None:
        """By name (its latest version) or by whole hash."""
        if Path(name_or_hash).name != name_or_hash:
            return None
        manifest = self._manifest(name_or_hash)
        if manifest is not None:
            return manifest
        pointer = self._names / name_or_hash
        if not pointer.is_file():
            return None
        named = self._manifest(pointer.read_text().strip())
        return named and msgspec.structs.replace(named, name=name_or_hash)

    def directory(self, version: str) -> Path:
        """Where the version's files are, checked against their hashes.

        The check reads every byte once; later calls compare size, time and inode only.
        Raises UnknownModelError, CorruptError (naming the file).
        """
        manifest = self.find(version)
        if manifest is None:
            raise UnknownModelError(f"{self.root} holds no model version {version!r}")
        folder = self._versions / manifest.version
        if version_hash(contents_of(manifest)) != manifest.version:
            raise CorruptError(f"{folder / MANIFEST_NAME} does not match its version's hash")
        known = self._checked.get(manifest.version) or self._read_stamps(manifest.version)
        stamps = {entry.path: self._check(folder, entry, known) for entry in manifest.files}
        if stamps != known:
            self._write_stamps(manifest.version, stamps)
        self._checked[manifest.version] = stamps
        return folder

    def add(self, manifest: Manifest, workspace: Path) -> Manifest:
        """Register a version whose blobs are all here, and let its name point to it.

        `workspace` is a folder in this store that is the caller's to clear. Returns the
        manifest as recorded: of equal contents the first stays, so that its time and source
        do not change under a reader.
        """
        folder = self._versions / manifest.version
        # Under a lock: what looks broken may be what another process is about to make whole.
        with file_lock(self.root / "locks" / f"version-{manifest.version}"):
            if self._manifest(manifest.version) is None:
                shutil.rmtree(folder, ignore_errors=True)
                self._publish(manifest, folder, workspace)
        write_atomic(self._names / manifest.name, manifest.version.encode())
        found = self.find(manifest.name)
        assert found is not None, "a version just added is found"
        return found

    def _publish(self, manifest: Manifest, folder: Path, workspace: Path) -> None:
        made = Path(tempfile.mkdtemp(dir=workspace, prefix="version-"))
        try:
            for entry in manifest.files:
                (made / entry.path).symlink_to(Path("..", "..", "blobs", entry.sha256))
            write_atomic(made / MANIFEST_NAME, msgspec.json.format(msgspec.json.encode(manifest)))
            made.chmod(0o755)
            made.rename(folder)
            sync_folder(self._versions)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if self._manifest(manifest.version) is None:  # else another process was faster
                raise

    def _manifest(self, version: str) -> Manifest | None:
        try:
            body = (self._versions / version / MANIFEST_NAME).read_bytes()
            manifest = msgspec.json.decode(body, type=Manifest)
        except (OSError, msgspec.MsgspecError):
            return None
        return manifest if manifest.version == version else None

    def _check(self, folder: Path, entry: FileEntry, known: _Stamps) -> tuple[int, int, int]:
        path = folder / entry.path
        try:
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            if known.get(entry.path) == stamp:
                return stamp
            if stat.st_size == entry.bytes and sha256_of(path) == entry.sha256:
                return stamp
        except OSError as error:
            raise CorruptError(f"{path} cannot be read: {error}") from error
        raise CorruptError(f"{path} is corrupt: its bytes are not those of sha256 {entry.sha256}")

    def _read_stamps(self, version: str) -> _Stamps:
        try:
            return msgspec.json.decode(self._stamp_file(version).read_bytes(), type=_Stamps)
        except (OSError, msgspec.MsgspecError):
            return {}

    def _write_stamps(self, version: str, stamps: _Stamps) -> None:
        # A store on a read-only volume is checked anew by every process instead.
        if os.access(self._stamps, os.W_OK):
            write_atomic(self._stamp_file(version), msgspec.json.encode(stamps))

    def _stamp_file(self, version: str) -> Path:
        return self._stamps / f"{version}.json"
