"""What the ledger could not be told, kept on disk until it can.

One folder for each incarnation of a gateway, locked while it lives; a later incarnation
adopts the folders of dead ones. Records are replayed in the order they were written, and
everything in them is idempotent, so a replay cut short is simply done again. What the ledger
will never take goes to `<name>.rejected` beside the folder, for a person. Invariant: when
`append` or `set_aside` returns, the record survives the machine losing power.
"""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.spool_file import (
    UNREADABLE_SUFFIX,
    Record,
    add_line,
    create,
    framed,
    locked,
    read_records,
    retire,
    sync_folder,
    write,
)

__all__ = ["Apply", "Record", "Spool", "SpoolError"]

REPLAY_RECORDS = 256  # handed to `apply` at a time
SEGMENT_BYTES = 1_048_576  # a replay that is cut short begins again with at most as much
END_BYTES = 2_048  # room kept for each end still owed: one of eight attempts takes less
SUFFIX = ".spool"
REJECTED_SUFFIX = ".rejected"


class SpoolError(Exception):
    """The record is not on disk: the spool is full, or the disk refused."""


class _Pending(NamedTuple):
    data: bytes
    request_id: str
    written: asyncio.Future[None]


Apply = Callable[[Sequence[Record]], Awaitable[None]]

_json = msgspec.json.Encoder()


class Spool:
    """One incarnation's spool."""

    def __init__(
        self, root: Path, name: str, *, bytes_max: int, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._root = root
        self._folder = root / name
        self._bytes_max = bytes_max
        self._segment_bytes = segment_bytes
        self._lock_file = -1
        self._file = -1
        self._segment = 0
        self._sizes: dict[int, int] = {}  # bytes by segment
        self._requests: dict[int, list[str]] = {}  # each record's, by segment
        self._held: Counter[str] = Counter()  # records by request, those being written too
        self._owed: set[str] = set()  # requests begun here, whose ends may still come here
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._writer: asyncio.Task[None] | None = None
        self._setting_aside = asyncio.Lock()
        self.adopted: set[str] = set()  # dead incarnations of which nothing is left

    def open(self) -> None:
        """Make and lock the folder. Raises OSError."""
        self._root.mkdir(parents=True, exist_ok=True)
        lock = locked(self._folder) if self._folder.exists() else _make_locked(self._folder)
        if lock is None:
            raise OSError(f"{self._folder} is in use by another process")
        self._lock_file = lock
        sync_folder(self._root)

    async def close(self) -> None:
        """Finish writing. An empty spool leaves nothing behind."""
        if self._writer is not None:
            await self._writer
        self._end_segment()
        if not self._sizes:
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock_file)

    @property
    def size_bytes(self) -> int:
        """On disk and about to be."""
        return sum(self._sizes.values()) + self._pending_bytes

    @property
    def empty(self) -> bool:
        """Whether everything ever appended has been replayed."""
        return not self._sizes and self._writer is None

    @property
    def takes_new_work(self) -> bool:
        """Whether one more request may begin here.

        There is room for the ends of all that did, and a third besides for the ends of requests
        that began while the ledger was there.
        """
        owed_bytes = len(self._owed) * END_BYTES
        return self.size_bytes + owed_bytes < self._bytes_max - self._bytes_max // 3

    def holds(self, request_id: str) -> bool:
        """Whether words about this request wait here: a later one must not overtake them."""
        return request_id in self._held

    async def append(self, record: Record) -> None:
        """Returns when it is on disk. Raises SpoolError."""
        data = framed(record)
        if self.size_bytes + len(data) > self._bytes_max:
            raise SpoolError(f"the spool holds its {self._bytes_max} bytes")
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(data, record.request_id, written))
        self._pending_bytes += len(data)
        self._held[record.request_id] += 1
        if record.reserve is not None:
            self._owed.add(record.request_id)
        elif record.settle is not None:
            self._owed.discard(record.request_id)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_pending())
        await written

    async def set_aside(self, record: Record, reason: str) -> None:
        """Keep it for a person, as a line of JSON; a record may be there more than once.

        Raises SpoolError when it is not on disk: `bytes_max` bounds this file too.
        """
        line = _json.encode({"reason": reason, "record": record}) + b"\n"
        path = self._root / (self._folder.name + REJECTED_SUFFIX)
        async with self._setting_aside:
            try:
                await asyncio.to_thread(add_line, path, line, self._bytes_max)
            except OSError as error:
                raise SpoolError(f"a rejected record cannot be kept: {error}") from error

    async def replay(self, apply: Apply) -> int:
        """Hand every record to `apply`, in order; forget a segment when it has taken all of it.

        Returns how many. What `apply` raises ends the replay and loses nothing.
        """
        count = 0
        for segment in self._rotate():
            path = self._path(segment)
            count += await _replay_file(path, apply)
            del self._sizes[segment]
            self._forget(self._requests.pop(segment))
        return count

    async def adopt(self, apply: Apply) -> int:
        """Replay and remove what dead incarnations left in the same root. Returns how many."""
        count = 0
        for folder in sorted(self._root.iterdir()):
            if folder == self._folder or folder.name.startswith(".") or not folder.is_dir():
                continue
            lock = locked(folder)
            if lock is None:
                continue  # its owner lives, or another has adopted it
            try:
                for path in sorted(folder.glob(f"*{SUFFIX}")):
                    count += await _replay_file(path, apply)
                if not any(folder.glob(f"*{UNREADABLE_SUFFIX}")):
                    shutil.rmtree(folder, ignore_errors=True)
                    self.adopted.add(folder.name)
            finally:
                os.close(lock)
        return count

    async def _write_pending(self) -> None:
        """One write and one fsync for all that came while the last was under way."""
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await self._write_batch(batch)
            except OSError as error:
                self._forget([pending.request_id for pending in batch])
                _tell(batch, SpoolError(f"the spool cannot be written: {error}"))
            else:
                _tell(batch, None)
        self._writer = None

    async def _write_batch(self, batch: list[_Pending]) -> None:
        data = b"".join(pending.data for pending in batch)
        try:
            if self._file < 0:
                await self._begin_segment()
            await asyncio.to_thread(write, self._file, data)
        except OSError:
            self._end_segment()  # whatever is at its end now, nothing shall come after it
            raise
        finally:
            self._pending_bytes -= len(data)
        self._sizes[self._segment] += len(data)
        self._requests[self._segment] += [pending.request_id for pending in batch]
        if self._sizes[self._segment] >= self._segment_bytes:
            self._end_segment()

    async def _begin_segment(self) -> None:
        self._file = await asyncio.to_thread(create, self._path(self._segment + 1))
        self._segment += 1
        self._sizes[self._segment] = 0
        self._requests[self._segment] = []

    def _end_segment(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._held[request_id] -= 1
            if not self._held[request_id]:
                del self._held[request_id]
                self._owed.discard(request_id)

    def _rotate(self) -> list[int]:
        """Segments nothing is written to any more, oldest first."""
        if self._writer is None:
            self._end_segment()
        writing = self._segment if self._writer is not None else None
        return sorted(segment for segment in self._sizes if segment != writing)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}{SUFFIX}"


async def _replay_file(path: Path, apply: Apply) -> int:
    data = await asyncio.to_thread(path.read_bytes)
    records, end = read_records(data)
    for start in range(0, len(records), REPLAY_RECORDS):
        await apply(records[start : start + REPLAY_RECORDS])
    await asyncio.to_thread(retire, path, data[end:])
    return len(records)


def _tell(batch: list[_Pending], error: SpoolError | None) -> None:
    for pending in batch:
        if pending.written.done():
            continue  # its caller left
        if error is None:
            pending.written.set_result(None)
        else:
            pending.written.set_exception(error)


def _make_locked(folder: Path) -> int | None:
    """Seen by its name only once it is locked: else another would adopt and remove it."""
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir(exist_ok=True)
    lock = locked(hidden)
    if lock is not None:
        hidden.rename(folder)
    return lock
