"""The bounded queue between a request's task and the response that reads it.

One writer, one reader. Each event carries the tokens it brings, so that the reader can say
how many were written to the client. Only the last event may pass the bound.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gateway.conversation import Broke, Opened, StreamEvent


class Screen(Protocol):
    """What an answer's events go through before anybody may read them."""

    @property
    def filtered(self) -> bool:
        """Whether it has ended a choice."""

    @property
    def over(self) -> bool:
        """Whether every choice has ended, by itself or otherwise."""

    @property
    def waits(self) -> bool:
        """Whether `settle` should be called before more comes."""

    def take(self, event: StreamEvent) -> list[StreamEvent]:
        """What may be told now of this event and of those before it."""

    async def settle(self, *, final: bool) -> list[StreamEvent]:
        """What may be told after asking whoever has to be asked."""


class Channel:
    """Events in order. `events_max` bounds what waits to be read."""

    def __init__(self, events_max: int) -> None:
        self._events_max = events_max
        self._events: deque[tuple[StreamEvent, int]] = deque()
        self._reader: asyncio.Future[bool] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.begun = False  # some of an answer was heard: no other model may answer now
        self.head_waits = False  # that an answer was opened is told with what comes next
        self._head: tuple[StreamEvent, int] | None = None
        self._held_tokens = 0
        self.ended = False
        self.screen: Screen | None = None  # set before the first event
        self.on_first: Callable[[], object] | None = None
        self.heard: Callable[[StreamEvent, int], None] | None = None  # all, before the screen

    @property
    def filtered(self) -> bool:
        """Whether the screen has ended a choice."""
        return self.screen is not None and self.screen.filtered

    @property
    def cut(self) -> bool:
        """Whether the screen has ended all that was still to come."""
        return self.screen is not None and self.screen.filtered and self.screen.over

    def push(self, event: StreamEvent, tokens: int = 0) -> None:
        """Add an event now; `room` then says when to go on."""
        if not self.begun:
            if self.head_waits and isinstance(event, Opened):
                self._head = (event, tokens)
                return
            self._begin()
        self._pass(event, tokens)

    def forget_head(self) -> None:
        """Whoever opened an answer did not go on with it."""
        self._head = None

    def _pass(self, event: StreamEvent, tokens: int) -> None:
        if self.heard is not None:
            self.heard(event, tokens)
        if self.screen is None:
            self._push(event, tokens)
            return
        self._held_tokens += tokens
        for told in self.screen.take(event):
            self._push(told, self._held_tokens)
            self._held_tokens = 0

    def _push(self, event: StreamEvent, tokens: int) -> None:
        assert not self.ended
        self._events.append((event, tokens))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(True)

    def _begin(self) -> None:
        self.begun = True
        if self.on_first is not None:
            self.on_first()
        if self._head is not None:
            self._pass(*self._head)
            self._head = None

    def end(self, event: StreamEvent, tokens: int = 0) -> None:
        """Add the last event. What a screen still holds is told to nobody."""
        if self._head is not None and not isinstance(event, Broke):
            self._begin()
        if self.heard is not None:
            self.heard(event, tokens)
        self._push(event, tokens + self._held_tokens)
        self.ended = True

    async def settle(self, *, final: bool) -> None:
        """Tell what the screen holds and, having asked, lets pass."""
        if self.screen is not None:
            for told in await self.screen.settle(final=final):
                self._push(told, self._held_tokens)
                self._held_tokens = 0

    async def room(self) -> None:
        """Wait until the reader has caught up, and the screen with what it has to ask."""
        if self.screen is not None and self.screen.waits:
            await self.settle(final=False)
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
