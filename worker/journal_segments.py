"""The files of one boot's journal: records appended whole or not at all, rotated, trimmed.

Not thread-safe: the journal holds its lock around every call. The invariant: what a reader
finds behind the last whole record of a segment is never followed by another record there.
"""

import logging
import os
from pathlib import Path

SEGMENT_BYTES = 4 * 1024 * 1024

_log = logging.getLogger(__name__)


class _Segment:
    """One file, and what must be acknowledged before it may go."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self.bytes = 0  # of whole records
        self.seq_last = 0


class Segments:
    """Opens the first one at once. Raises OSError when it cannot be."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._directory = directory
        self._boot_id = boot_id
        self._torn = False
        self._file, first = self._opened(0)
        self._segments = [first]

    @property
    def size(self) -> int:
        """Bytes on disk, in whole records."""
        return sum(segment.bytes for segment in self._segments)

    def write(self, record: bytes, seq: int) -> bool:
        """Append. False: an earlier segment that was closed for this could not be made durable.

        Raises OSError when the disk did not take the record; none of it is left then.
        """
        durable = True
        if self._torn or self._segments[-1].bytes >= SEGMENT_BYTES:
            durable = self._rotate()
        segment = self._segments[-1]
        try:
            _write_whole(self._file, record)
        except OSError:
            self._cut_back(segment)
            raise
        segment.bytes += len(record)
        segment.seq_last = max(segment.seq_last, seq)
        return durable

    def duplicate(self) -> int:
        """A descriptor of the current file, for a sync that holds no lock. Raises OSError."""
        return os.dup(self._file)

    def trim(self, needed_seq: int) -> None:
        """Delete the oldest segments that hold nothing from `needed_seq` on."""
        while len(self._segments) > 1 and self._segments[0].seq_last < needed_seq:
            try:
                self._segments[0].path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("a segment stays", extra={"facts": {"reason": str(error)}})
                return
            del self._segments[0]

    def close(self) -> bool:
        """Whether the current file is durable."""
        return _closed_durably(self._file)

    def _rotate(self) -> bool:
        try:
            file, segment = self._opened(self._segments[-1].number + 1)
        except OSError:
            if self._torn:
                raise
            return True  # the old one goes on; the next record tries again
        old, self._file = self._file, file
        self._segments.append(segment)
        self._torn = False
        return _closed_durably(old)

    def _opened(self, number: int) -> tuple[int, _Segment]:
        path = self._directory / f"{self._boot_id}.{number}.journal"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            sync_directory(self._directory)
        except OSError:
            os.close(file)
            raise
        return file, _Segment(path, number)

    def _cut_back(self, segment: _Segment) -> None:
        # A reader stops at a torn record: what came behind it would be lost to the next life.
        try:
            os.ftruncate(self._file, segment.bytes)
        except OSError as error:
            self._torn = True
            _log.warning("a segment is torn", extra={"facts": {"reason": str(error)}})


def sync_directory(directory: Path) -> None:
    """Make a new file's name durable; syncing the file does not. Raises OSError."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_whole(file: int, record: bytes) -> None:
    view = memoryview(record)
    while view:
        view = view[os.write(file, view) :]


def _closed_durably(file: int) -> bool:
    try:
        os.fsync(file)
    except OSError as error:
        _log.error("a segment is not durable", extra={"facts": {"reason": str(error)}})
        return False
    finally:
        os.close(file)
    return True
