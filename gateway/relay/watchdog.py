"""Ends a request that brings no first token, or no next one, in time.

The deadline of the whole is the exchange's own; these two are about silence. What counts is
what the engine produced, not what was passed on: text may be held back for good reasons. One
timer for each request, set again when it rings.
"""

import asyncio
from typing import Protocol

from core.errors import Code, Refusal
from core.money import EndCause
from gateway.patience import Patience


class Watched(Protocol):
    """An exchange, as far as this looks."""

    @property
    def last_token_s(self) -> float:
        """When the engine produced last, on the loop's clock; 0 before it did."""

    @property
    def is_written_to(self) -> bool:
        """Whether the client is at the moment taking what there is."""

    def cancel(self, cause: EndCause, refusal: Refusal | None = None) -> None:
        """End it now."""


class Watchdog:
    """Of one exchange, from `received_s` on."""

    def __init__(self, watched: Watched, patience: Patience, received_s: float) -> None:
        self._watched = watched
        self._patience = patience
        self._received_s = received_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_at(self._wakes_s(), self._look)

    def stop(self) -> None:
        """It has ended."""
        self._timer.cancel()

    def _due_s(self) -> float:
        last_s = self._watched.last_token_s
        if last_s:
            return last_s + self._patience.idle_ms / 1000
        return self._received_s + self._patience.first_token_ms / 1000

    def _wakes_s(self) -> float:
        """Until there is a token, often enough to see in time that the next is missing."""
        return min(self._due_s(), self._loop.time() + self._patience.idle_ms / 1000)

    def _look(self) -> None:
        now_s = self._loop.time()
        if self._watched.is_written_to:
            # Nobody reads on while a client takes nothing: that has a bound of its own.
            self._timer = self._loop.call_at(now_s + self._patience.idle_ms / 1000, self._look)
        elif now_s < self._due_s():
            self._timer = self._loop.call_at(self._wakes_s(), self._look)
        else:
            self._watched.cancel(EndCause.EXPIRED, self._refusal())

    def _refusal(self) -> Refusal:
        if self._watched.last_token_s:
            message = f"The model produced nothing for {self._patience.idle_ms} ms."
        else:
            message = f"There was no token within {self._patience.first_token_ms} ms."
        return Refusal(code=Code.TIMEOUT, message=message)
