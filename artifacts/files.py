"""Writing and checking single files: atomic, durable, hashed on the way.

A file written here is either whole under its final name or absent; what a killed process
leaves is a temporary file in a folder that the next pull clears.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO

from artifacts.errors import CorruptError, DiskFullError

CHUNK_BYTES = 1 << 20
# Room left for everything else on the disk: the database, logs, journals.
SPARE_BYTES = 256 << 20


def sha256_of(path: Path) -> str:
    """Hex digest of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path`, durably."""
    with _temporary(path.parent) as (file, temporary):
        file.write(data)
        _seal(file, temporary, path)


def copy_checked(
    source: IO[bytes], target: Path, *, sha256: str, label: str, advance: Callable[[int], None]
) -> None:
    """Copy into `target`, telling `advance` each chunk's bytes.

    Raises CorruptError, naming `label`, when the digest is not `sha256`; nothing is left then.
    """
    digest = hashlib.sha256()
    with _temporary(target.parent) as (file, temporary):
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            advance(len(chunk))
        if digest.hexdigest() != sha256:
            raise CorruptError(f"{label} has sha256 {digest.hexdigest()}, expected {sha256}")
        _seal(file, temporary, target)


def move_durable(source: Path, target: Path) -> None:
    """Rename on one file system, with the bytes on disk before the name is."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raises DiskFullError unless `needed_bytes` fit with SPARE_BYTES to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + SPARE_BYTES:
        raise DiskFullError(
            f"{folder} needs {_mebibytes(needed_bytes + SPARE_BYTES)} free "
            f"({_mebibytes(SPARE_BYTES)} of it spare) and has {_mebibytes(free)}"
        )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn the system's "no space left" into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"the disk of {folder} is full") from error
        raise


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    handle, name = tempfile.mkstemp(dir=folder, prefix=".partial-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file, temporary
    finally:
        temporary.unlink(missing_ok=True)


def _seal(file: BinaryIO, temporary: Path, final: Path) -> None:
    file.flush()
    os.fchmod(file.fileno(), 0o644)  # mkstemp makes files for the owner alone
    os.fsync(file.fileno())
    temporary.replace(final)
    sync_folder(final.parent)


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
