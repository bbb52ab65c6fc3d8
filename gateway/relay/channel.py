"""The bounded queue between a request's task and the response that reads it.

One writer, one reader. Each event carries the tokens it brings, so that the reader can say
how many were written to the client. Only the last event may pass the bound.
"""

import asyncio
from collections import deque

from gateway.conversation import StreamEvent


class Channel:
    """Events in order. `events_max` bounds what waits to be read."""

    def __init__(self, events_max: int) -> None:
        self._events_max = events_max
        self._events: deque[tuple[StreamEvent, int]] = deque()
        self._reader: asyncio.Future[bool] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.ended = False

    def push(self, event: StreamEvent, tokens: int = 0) -> None:
        """Add an event now; `room` then says when to go on."""
        assert not self.ended
        self._events.append((event, tokens))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(True)

    def end(self, event: StreamEvent, tokens: int = 0) -> None:
        """Add the last event."""
        self.push(event, tokens)
        self.ended = True

    async def room(self) -> None:
        """Wait until the reader has caught up."""
        while len(self._events) >= self._events_max:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    async def take(self, within_s: float) -> list[tuple[StreamEvent, int]]:
        """Every event at hand; none if none came in time."""
        if not self._events:
            await self._wait(within_s)
        events = list(self._events)
        self._events.clear()
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        return events

    async def _wait(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._reader = reader = loop.create_future()
        timer = loop.call_later(within_s, _give_up, reader)
        try:
            await reader
        finally:
            timer.cancel()
            self._reader = None


def _give_up(reader: "asyncio.Future[bool]") -> None:
    if not reader.done():
        reader.set_result(False)
