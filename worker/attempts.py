"""The attempts this worker is running: engine events in, journalled frames out.

The engine's thread calls `Attempt.emit`; the event loop reads `Attempt.frames`. Totals are
journalled here, before a frame can reach a socket. An attempt's queue holds at most the
frames of its own bounded output, and is dropped with it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from core.protocol import (
    Failed,
    Finished,
    Frame,
    Generate,
    Nack,
    Started,
    Tokens,
    Usage,
)
from worker.handover import Handover
from worker.journal import Journal
from worker.metrics import Metrics

Key = tuple[str, int]


def wall_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


class Attempt:
    """One attempt's way from the engine's thread to the response."""

    def __init__(
        self,
        key: Key,
        journal: Journal,
        handover: Handover,
        on_end: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._opened_s = time.monotonic()
        self._last_s: dict[int, float] = {}  # by choice, of its newest token
        self.key = key
        self._journal = journal
        self._handover = handover
        self._on_end = on_end
        self._usage = Usage()
        self._frames: list[Frame] = []
        self._ready = asyncio.Event()
        self._ended = False

    def emit(self, events: Sequence[Frame]) -> None:
        """Called on the engine's thread. Journals, then hands over to the loop."""
        if self._ended:
            return
        frames = [self._journalled(event) for event in events]
        self._ended = any(isinstance(frame, Finished | Failed) for frame in frames)
        self._handover.put(self._deliver, frames)

    async def next_frames(self) -> list[Frame]:
        """Everything that came since the last call; waits for at least one."""
        await self._ready.wait()
        self._ready.clear()
        frames, self._frames = self._frames, []
        return frames

    def _deliver(self, frames: list[Frame]) -> None:
        self._frames += frames
        self._ready.set()
        if frames and isinstance(frames[-1], Finished | Failed):
            self._on_end()

    def _journalled(self, event: Frame) -> Frame:
        match event:
            case Started():
                self._usage = Usage(
                    prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens
                )
                self._write()
            case Tokens() if event.ids:
                self._time(event.choice)
                produced = self._usage.output_tokens + len(event.ids)
                self._usage = msgspec.structs.replace(self._usage, output_tokens=produced)
                self._write()
            case Finished():
                seq = self._journal.append(
                    self.key,
                    event.usage,
                    at_ms=wall_ms(),
                    cause=event.cause,
                    timings=event.timings,
                )
                return msgspec.structs.replace(event, journal_seq=seq)
            case Failed():
                usage = event.usage if event.usage != Usage() else self._usage
                self._journal.append(self.key, usage, at_ms=wall_ms(), cause="failed")
                return msgspec.structs.replace(event, usage=usage)
            case _:
                pass
        return event

    def _time(self, choice: int) -> None:
        now_s = time.monotonic()
        if not self._last_s:
            self._metrics.first_token_seconds.observe(now_s - self._opened_s)
        if choice in self._last_s:
            self._metrics.inter_token_seconds.observe(now_s - self._last_s[choice])
        self._last_s[choice] = now_s

    def _write(self) -> None:
        self._journal.append(self.key, self._usage, at_ms=wall_ms())


class Attempts:
    """All of them, by (request id, attempt)."""

    def __init__(self, journal: Journal, metrics: Metrics) -> None:
        self._journal = journal
        self._metrics = metrics
        self._handover: Handover | None = None  # made on the loop, with the first attempt
        self._running: dict[Key, Attempt] = {}
        self.placed_seq = 0  # highest placement accepted

    def __len__(self) -> int:
        return len(self._running)

    def open(
        self, request: Generate, submit: Callable[[Generate, Attempt], Nack | None]
    ) -> Attempt | Nack:
        """Register and submit; a refused one leaves nothing behind. On the event loop."""
        key = (request.request_id, request.attempt)
        if key in self._running:
            return Nack(reason="duplicate")
        if self._journal.full:
            return Nack(reason="journal_full")
        self._handover = self._handover or Handover()
        attempt = Attempt(
            key, self._journal, self._handover, lambda: self._forget(key), self._metrics
        )
        self._running[key] = attempt
        refused = submit(request, attempt)
        if refused is not None:
            self._forget(key)
            return refused
        self.placed_seq = max(self.placed_seq, request.placement)
        return attempt

    def _forget(self, key: Key) -> None:
        self._running.pop(key, None)
