"""How far a pull has come, for a progress bar."""

from collections.abc import Callable
from typing import Literal

import msgspec

Stage = Literal["download", "unpack", "store"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute bytes within one stage; `bytes_total` is None where it is not known."""

    stage: Stage
    bytes_done: int
    bytes_total: int | None


Report = Callable[[Progress], None]


class Meter:
    """Adds up bytes of one stage and reports the sum."""

    def __init__(self, report: Report, stage: Stage, bytes_total: int | None) -> None:
        self._report, self._stage, self._total = report, stage, bytes_total
        self._done = 0
        self.advance(0)

    def advance(self, size: int) -> None:
        """`size` more bytes."""
        self._done += size
        self._say()

    def reach(self, done: int) -> None:
        """`done` bytes in all, never told to go back."""
        if done > self._done:
            self._done = done
            self._say()

    def _say(self) -> None:
        progress = Progress(stage=self._stage, bytes_done=self._done, bytes_total=self._total)
        self._report(progress)
