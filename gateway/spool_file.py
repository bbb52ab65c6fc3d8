"""A spool's files: framed records, appended and fsynced, read up to where they stop making sense.

Everything here waits for the disk and is called from a thread. Invariant: a write that fails
leaves nothing behind, or something torn at the very end, which no reader takes for a record.
"""

import fcntl
import logging
import os
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec

from core.metering import Reserve, Settle, Witness

_log = logging.getLogger(__name__)

HEADER_BYTES = 8  # length and CRC-32, both 4 bytes big-endian
RECORD_BYTES_MAX = 1_048_576
LOCK_NAME = "lock"
UNREADABLE_SUFFIX = ".unreadable"


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One word to the ledger: exactly one field is set."""

    reserve: Reserve | None = None
    settle: Settle | None = None
    witness: Witness | None = None

    @property
    def request_id(self) -> str:
        """Which request it is about."""
        word = self.reserve or self.settle or self.witness
        assert word is not None
        return word.request_id


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def framed(record: Record) -> bytes:
    """As it is on disk."""
    body = _encoder.encode(record)
    assert len(body) <= RECORD_BYTES_MAX
    return len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def read_records(data: bytes) -> tuple[list[Record], int]:
    """Records from the start of `data`, and where they stop making sense: its end, or a tear."""
    records: list[Record] = []
    at = 0
    while len(data) - at >= HEADER_BYTES:
        length = int.from_bytes(data[at : at + 4], "big")
        crc = int.from_bytes(data[at + 4 : at + HEADER_BYTES], "big")
        body = data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        if not 0 < length <= RECORD_BYTES_MAX or len(body) < length or zlib.crc32(body) != crc:
            break
        try:
            records.append(_decoder.decode(body))
        except msgspec.MsgspecError:
            break
        at += HEADER_BYTES + length
    return records, at


def retire(path: Path, rest: bytes) -> None:
    """Remove a file that was replayed; `rest` is what did not make sense at its end."""
    if _is_torn_tail(rest):
        path.unlink()
        return
    # Not the mark of a crash: keep the bytes for a person to look at.
    path.rename(path.with_suffix(UNREADABLE_SUFFIX))
    facts = {"path": str(path), "bytes": len(rest)}
    _log.error("spool records are unreadable", extra={"facts": facts})


def _is_torn_tail(rest: bytes) -> bool:
    """Whether this is what a crash leaves at the end: part of one record, or zeros."""
    if len(rest) < HEADER_BYTES or not rest.strip(b"\0"):
        return True
    length = int.from_bytes(rest[:4], "big")
    return 0 < length <= RECORD_BYTES_MAX and len(rest) <= HEADER_BYTES + length


def create(path: Path) -> int:
    """Open a file for appending, sure to be there after a crash. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        sync_folder(path.parent)
    except OSError:
        os.close(file)
        raise
    return file


def add_line(path: Path, line: bytes, bytes_max: int) -> None:
    """Raises OSError when the line is not on disk: the disk's own, or for a full file."""
    file = create(path)
    try:
        if os.fstat(file).st_size + len(line) > bytes_max:
            raise OSError(f"{path} holds its {bytes_max} bytes")
        write(file, line)
    finally:
        os.close(file)


def write(file: int, data: bytes) -> None:
    """Append, and wait until it is on disk. Raises OSError, and then the data is not there."""
    before = os.fstat(file).st_size
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fdatasync(file)
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, before)  # its caller is told that it is not kept
        raise


def locked(folder: Path) -> int | None:
    """The lock's file, held until it is closed; None when somebody else has it."""
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None  # the folder has just been removed
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def sync_folder(folder: Path) -> None:
    """What was made in it is there after a crash. Raises OSError."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
