"""Pictures of the fleet's last minutes, shared by all who watch through this control plane."""

import asyncio
import time

import msgspec

from store.postgres import Postgres, StoreAwayError
from store.pulse import PulsePoint, pulse

# Points are asked for at most once in so long, however many people watch.
FRESH_S = 2.0
QUERY_S_MAX = 3.0
POINTS = 60
PICTURES_MAX = 64


class PulseList(msgspec.Struct, frozen=True, kw_only=True):
    """From `from_ms` on in steps of `step_ms`; steps in which nothing ended are left out."""

    points: list[PulsePoint]
    from_ms: int
    step_ms: int
    as_of_ms: int


class Pulse:
    """Pictures by (minutes, model), each taken by whoever asks first and shared by the others."""

    def __init__(self, books: Postgres) -> None:
        self._books = books
        self._taken: dict[tuple[int, str], tuple[float, asyncio.Task[PulseList]]] = {}

    async def read(self, minutes: int, model: str) -> PulseList:
        """Raises StoreAwayError, also for a fleet too busy to be looked at so."""
        key = (minutes, model)
        began, task = self._taken.get(key, (0.0, None))
        if task is None or time.monotonic() - began > FRESH_S:
            if len(self._taken) >= PICTURES_MAX:
                self._taken.clear()
            task = asyncio.create_task(_picture(self._books, minutes, model))
            self._taken[key] = (time.monotonic(), task)
        # One who leaves does not take the picture from the others.
        return await asyncio.shield(task)


async def _picture(books: Postgres, minutes: int, model: str) -> PulseList:
    now_ms = time.time_ns() // 1_000_000
    step_ms = minutes * 60_000 // POINTS
    from_ms = (now_ms - minutes * 60_000) // step_ms * step_ms
    try:
        async with asyncio.timeout(QUERY_S_MAX), books.connection() as conn:
            points = await pulse(conn, from_ms=from_ms, step_ms=step_ms, model=model)
    except TimeoutError as error:
        raise StoreAwayError("too much ends for a picture of it") from error
    return PulseList(points=points, from_ms=from_ms, step_ms=step_ms, as_of_ms=now_ms)
