"""A worker's served journal in virtual time: what `worker.journal` keeps in files, as data.

A disk outlives the lives that write to it. Killing a process loses nothing of it; losing
power loses what was not yet synced. Invariant: as in the original, records hold absolute
totals, and an attempt's newest one is the one that counts.
"""

import msgspec

from core.fleet import JournalEntry
from core.protocol import Timings, Usage

SYNC_INTERVAL_MS = 500
BATCH_ENTRIES_MAX = 50

Key = tuple[str, int]  # request id, attempt


class LeftBehind(msgspec.Struct, frozen=True):
    """What a life left untold, with `lost` for attempts it did not end."""

    boot_id: str
    entries: tuple[JournalEntry, ...]


class Journal:
    """One life's."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self._seq = 0
        self._acked = 0
        self._synced = 0
        self._records: list[JournalEntry] = []
        self._pending: dict[Key, JournalEntry] = {}

    @property
    def unacked(self) -> int:
        """Attempts whose newest totals the control plane does not have."""
        return len(self._pending)

    def append(
        self, key: Key, usage: Usage, *, at_ms: int, cause: str = "", timings: Timings | None = None
    ) -> int:
        """Write an attempt's totals so far; a `cause` makes it the last word. Returns its seq."""
        self._seq += 1
        entry = JournalEntry(
            seq=self._seq,
            request_id=key[0],
            attempt=key[1],
            usage=usage,
            final=bool(cause),
            cause=cause,
            timings=timings or Timings(),
            at_ms=at_ms,
        )
        self._records.append(entry)
        self._pending[key] = entry
        return entry.seq

    def sync(self) -> None:
        """Everything so far survives a loss of power."""
        self._synced = self._seq

    def batch(self) -> tuple[JournalEntry, ...]:
        """Unacknowledged totals, oldest first, a bounded number."""
        entries = sorted(self._pending.values(), key=lambda entry: entry.seq)
        return tuple(entries[:BATCH_ENTRIES_MAX])

    def acknowledge(self, entries: tuple[JournalEntry, ...]) -> None:
        """These are in Postgres."""
        for entry in entries:
            key = (entry.request_id, entry.attempt)
            if self._pending.get(key) == entry:
                del self._pending[key]
        oldest = min((entry.seq for entry in self._pending.values()), default=self._seq + 1)
        self._acked = oldest - 1

    def lose_power(self) -> set[Key]:
        """Forget what was not synced; returns the attempts that lost a record."""
        lost = {(e.request_id, e.attempt) for e in self._records if e.seq > self._synced}
        self._records = [entry for entry in self._records if entry.seq <= self._synced]
        return lost

    def left_behind(self, now_ms: int) -> LeftBehind:
        """As the next life reads it. Reading twice gives the same."""
        newest = {(entry.request_id, entry.attempt): entry for entry in self._records}
        untold = [entry for entry in newest.values() if entry.seq > self._acked and entry.final]
        seq = max((entry.seq for entry in newest.values()), default=0)
        for entry in newest.values():
            if not entry.final:
                seq += 1
                lost = {"final": True, "cause": "lost", "seq": seq, "at_ms": now_ms}
                untold.append(msgspec.structs.replace(entry, **lost))
        return LeftBehind(self.boot_id, tuple(sorted(untold, key=lambda entry: entry.seq)))


class Disk:
    """A machine's, with the journal of each life that has not been delivered to the end."""

    def __init__(self) -> None:
        self.journals: dict[str, Journal] = {}

    def open(self, boot_id: str) -> Journal:
        """A new life's journal."""
        journal = self.journals[boot_id] = Journal(boot_id)
        return journal

    def left_behind(self, now_ms: int) -> list[LeftBehind]:
        """Of all earlier lives."""
        return [journal.left_behind(now_ms) for journal in self.journals.values()]

    def remove(self, boot_id: str) -> None:
        """Everything this life had to tell is in Postgres."""
        del self.journals[boot_id]
