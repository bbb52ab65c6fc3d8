"""The served journal: what this worker has produced, on its own disk, until Postgres has it.

One file for each life of the process (a boot), in segments. A record is written before the
frames it speaks of leave the process, so that delivered <= metered holds through a kill -9; a
background thread makes it durable against power loss within `SYNC_INTERVAL_S`.

    <dir>/<boot id>.<segment>.journal     records: length, crc32, msgpack JournalEntry
    <dir>/<boot id>.acked                 last sequence the control plane has taken

Records hold absolute totals of one attempt, so only an attempt's newest one matters.
"""

import logging
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from core.fleet import JournalEntry
from core.protocol import Timings, Usage
from worker.journal_segments import Segments

SYNC_INTERVAL_S = 0.5
RECORD_BYTES_MAX = 1024 * 1024
BATCH_ENTRIES_MAX = 500

_HEAD = 8  # 4-byte length, 4-byte crc32, big-endian

Attempt = tuple[str, int]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JournalEntry)

_log = logging.getLogger(__name__)


def encode_record(entry: JournalEntry) -> bytes:
    """One record, self-checking."""
    body = _encoder.encode(entry)
    return len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def decode_records(data: bytes) -> Iterator[JournalEntry]:
    """Every whole record from the start. A torn, damaged or foreign one ends the reading."""
    start = 0
    while start + _HEAD <= len(data):
        size = int.from_bytes(data[start : start + 4], "big")
        # A power cut may leave a tail of zeros, and nothing at all has the checksum zero.
        if not 0 < size <= RECORD_BYTES_MAX:
            return
        body = data[start + _HEAD : start + _HEAD + size]
        crc = int.from_bytes(data[start + 4 : start + _HEAD], "big")
        if len(body) < size or zlib.crc32(body) != crc:
            return
        try:
            entry = _decoder.decode(body)
        except msgspec.DecodeError as error:
            _log.warning("a journal record cannot be read", extra={"facts": {"reason": str(error)}})
            return
        yield entry
        start += _HEAD + size


class Journal:
    """The journal of this boot. `append` is called by the engine's thread; the rest by others."""

    def __init__(self, directory: Path, boot_id: str, *, bytes_max: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.boot_id = boot_id
        self._directory = directory
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._seq = 0
        self._acked = 0
        self._pending: dict[Attempt, JournalEntry] = {}  # newest unacknowledged of each attempt
        self._open: dict[Attempt, int] = {}  # attempts without a last word -> their newest seq
        self._unwritten: dict[Attempt, JournalEntry] = {}  # newest ones that the disk refused
        self._segments = Segments(directory, boot_id)
        self._dirty = False
        self._sync_failed = False
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync_loop, name="journal-sync", daemon=True)
        self._syncer.start()

    @property
    def full(self) -> bool:
        """Whether new work must be refused: at its bound, or broken."""
        return self.broken or self._segments.size >= self._bytes_max

    @property
    def broken(self) -> bool:
        """Totals that the disk did not take are still to be written, or made durable."""
        return bool(self._unwritten) or self._sync_failed

    @property
    def unacked(self) -> int:
        """Attempts whose newest totals the control plane does not have."""
        return len(self._pending)

    def append(
        self,
        attempt: Attempt,
        usage: Usage,
        *,
        at_ms: int,
        cause: str = "",
        timings: Timings | None = None,
    ) -> int:
        """Write an attempt's totals so far; a `cause` makes it the last word. Returns its seq.

        A full disk does not stop what runs: the gateway is a witness too. It stops new work.
        """
        with self._lock:
            self._seq += 1
            entry = JournalEntry(
                seq=self._seq,
                request_id=attempt[0],
                attempt=attempt[1],
                usage=usage,
                final=bool(cause),
                cause=cause,
                timings=timings or Timings(),
                at_ms=at_ms,
            )
            self._write(attempt, entry)
            self._pending[attempt] = entry
            if cause:
                self._open.pop(attempt, None)
            else:
                self._open[attempt] = entry.seq
            return entry.seq

    def batch(self) -> tuple[JournalEntry, ...]:
        """Unacknowledged totals, oldest first, a bounded number."""
        with self._lock:
            entries = sorted(self._pending.values(), key=lambda entry: entry.seq)
        return tuple(entries[:BATCH_ENTRIES_MAX])

    def acknowledge(self, entries: tuple[JournalEntry, ...]) -> None:
        """These are in Postgres. Segments that nothing needs any more are deleted."""
        with self._lock:
            for entry in entries:
                attempt = (entry.request_id, entry.attempt)
                if self._pending.get(attempt) == entry:
                    del self._pending[attempt]
            oldest = min((e.seq for e in self._pending.values()), default=self._seq + 1)
            self._acked = oldest - 1
            _write_acked(self._directory, self.boot_id, self._acked)
            self._trim()

    def sync(self) -> None:
        """One round: write what the disk refused before, then make all of it durable.

        A failure is told by `broken` until a later round succeeds.
        """
        with self._lock:
            for attempt, entry in list(self._unwritten.items()):
                self._write(attempt, entry)
            if not self._dirty:
                return
            self._dirty = False
        try:
            self._fsync()
        except OSError as error:
            if not self._sync_failed:
                _log.exception(
                    "the journal is not durable", extra={"facts": {"reason": str(error)}}
                )
            self._sync_failed = self._dirty = True
        else:
            self._sync_failed = False

    def close(self) -> None:
        """Make everything durable. With nothing left to tell, leave no files."""
        self._closing.set()
        self._syncer.join()
        with self._lock:
            for attempt, entry in list(self._unwritten.items()):
                self._write(attempt, entry)
            self._segments.close()
            if not self._pending and not self._open:
                remove_boot(self._directory, self.boot_id)

    def _write(self, attempt: Attempt, entry: JournalEntry) -> None:
        try:
            durable = self._segments.write(encode_record(entry), entry.seq)
        except OSError as error:
            if not self._unwritten:
                _log.exception("the disk takes no more", extra={"facts": {"reason": str(error)}})
            self._unwritten[attempt] = entry
            return
        self._unwritten.pop(attempt, None)
        self._dirty = True
        self._sync_failed = self._sync_failed or not durable

    def _fsync(self) -> None:
        # Outside the lock: the engine's thread must not wait for the disk.
        with self._lock:
            file = self._segments.duplicate()
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def _trim(self) -> None:
        # An open attempt's newest totals stay on disk even when acknowledged: if we are
        # killed, the next life must know that the attempt was open, and at how many tokens.
        needed = min(self._open.values(), default=self._seq + 1)
        self._segments.trim(min(needed, self._acked + 1))

    def _sync_loop(self) -> None:
        while not self._closing.wait(SYNC_INTERVAL_S):
            self.sync()


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier life left untold: last words, and attempts it never ended as `lost`."""

    boot_id: str
    entries: tuple[JournalEntry, ...]


def left_behind(directory: Path, *, now_ms: int) -> list[LeftBehind]:
    """Read earlier lives' journals. Their attempts without a last word get cause `lost`.

    Call before this life's own Journal is opened. Reading twice gives the same entries, so a
    crash while they are delivered is harmless.
    """
    boots = sorted({path.name.split(".")[0] for path in directory.glob("*.journal")})
    return [_left_by(directory, boot, now_ms) for boot in boots]


def remove_boot(directory: Path, boot_id: str) -> None:
    """Everything this boot had to tell is in Postgres. What cannot be deleted stays."""
    for path in directory.glob(f"{boot_id}.*"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # The next life tells it once more, which is harmless.
            _log.warning("a journal stays", extra={"facts": {"reason": str(error)}})


def _left_by(directory: Path, boot_id: str, now_ms: int) -> LeftBehind:
    newest: dict[Attempt, JournalEntry] = {}
    for path in sorted(directory.glob(f"{boot_id}.*.journal"), key=_segment_number):
        for entry in decode_records(path.read_bytes()):
            newest[entry.request_id, entry.attempt] = entry
    acked = _read_acked(directory, boot_id)
    untold = [entry for entry in newest.values() if entry.seq > acked and entry.final]
    seq = max((entry.seq for entry in newest.values()), default=0)
    for entry in newest.values():
        if not entry.final:
            seq += 1
            lost = {"final": True, "cause": "lost", "seq": seq, "at_ms": now_ms}
            untold.append(msgspec.structs.replace(entry, **lost))
    return LeftBehind(boot_id=boot_id, entries=tuple(sorted(untold, key=lambda e: e.seq)))


def _segment_number(path: Path) -> int:
    return int(path.name.split(".")[1])


def _acked_path(directory: Path, boot_id: str) -> Path:
    return directory / f"{boot_id}.acked"


def _write_acked(directory: Path, boot_id: str, seq: int) -> None:
    # Losing this costs a second delivery, which is harmless: no fsync, and a full disk is
    # no reason to stop delivering.
    temporary = _acked_path(directory, boot_id).with_suffix(".acked-new")
    try:
        temporary.write_text(str(seq))
        temporary.replace(_acked_path(directory, boot_id))
    except OSError as error:
        _log.info("an acknowledgement is not kept", extra={"facts": {"reason": str(error)}})


def _read_acked(directory: Path, boot_id: str) -> int:
    path = _acked_path(directory, boot_id)
    text = path.read_text() if path.exists() else ""
    return int(text) if text.isdigit() else 0
