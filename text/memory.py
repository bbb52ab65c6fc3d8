"""What a tokenizer need not do again: the ids of texts that it has lately encoded.

A run of a prompt stands between two control tokens, so that it is encoded the same whatever is
around it: of a chat's next prompt, all but its last turns have been seen. Whoever shares a
memory can tell by the time of an answer what the others sent: a memory is one tenant's, and one
version's.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

ENTRY_BYTES = 250  # what a text and its ids take beside their contents, in dictionary and all
WIDE_CHAR_BYTES = 4
LARGEST_PART = 4  # a run of more than this part of a memory would leave too little of the rest


class RunMemory:
    """Runs and their ids, the latest used of them, within `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._known: OrderedDict[tuple[bool, str], array[int]] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def recall(self, *, first: bool, run: str) -> Sequence[int] | None:
        """The ids, where they are known; `first` is the run that a prompt begins with."""
        key = (first, run)
        with self._lock:
            ids = self._known.get(key)
            if ids is not None:
                self._known.move_to_end(key)
        return ids

    def keep(self, ids: Sequence[int], *, first: bool, run: str) -> None:
        """Remember them, in the place of those that were not asked for the longest."""
        kept = array("I", ids)
        size = _size(run, kept)
        if size * LARGEST_PART > self._bytes_max:
            return
        with self._lock:
            old = self._known.pop((first, run), None)
            self.bytes += size - (0 if old is None else _size(run, old))
            self._known[first, run] = kept
            while self.bytes > self._bytes_max:
                (_, text), gone = self._known.popitem(last=False)
                self.bytes -= _size(text, gone)


def _size(run: str, ids: "array[int]") -> int:
    chars = len(run) if run.isascii() else WIDE_CHAR_BYTES * len(run)
    return ENTRY_BYTES + chars + ids.itemsize * len(ids)
