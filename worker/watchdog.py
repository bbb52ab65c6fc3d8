"""Notices an engine that makes no progress, and turns it into failed requests and a restart.

A thread of its own: the engine's may be inside a call that never returns. It measures by its
own ticks, so that time in which the whole process was stopped is nobody's.

    a turn over its bound ─► everyone gets a last word ─► `on_stuck` ─► grace ─► guard.end
"""

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from worker.engine import Engine
from worker.patience import Turn

TICK_S = 0.25
# For the streams to be told and the journal to be delivered, once the engine is given up.
GRACE_S = 15.0
EXIT_STUCK = 4

_log = logging.getLogger(__name__)


class Guard(Protocol):
    """What can still be done when no Python runs any more, or only this thread's."""

    def expect_life(self, within_s: float) -> None:
        """Unless called again within that time, the process ends."""

    def rest(self) -> None:
        """Expect nothing more."""

    def end(self, status: int) -> None:
        """End the process now."""


class NoGuard:
    """For an engine that is not its process's only purpose."""

    def expect_life(self, within_s: float) -> None:
        """See `Guard`."""

    def rest(self) -> None:
        """See `Guard`."""

    def end(self, status: int) -> None:
        """See `Guard`."""


class ProcessGuard:
    """A step that holds the interpreter's lock for ever is noticed by a thread without Python."""

    def expect_life(self, within_s: float) -> None:
        """See `Guard`. The process would end with status 1, and every thread's stack on stderr."""
        faulthandler.dump_traceback_later(within_s, exit=True)

    def rest(self) -> None:
        """See `Guard`."""
        faulthandler.cancel_dump_traceback_later()

    def end(self, status: int) -> None:
        """See `Guard`."""
        logging.shutdown()
        os._exit(status)


class Watchdog:
    """Over one engine. `on_stuck` is called at most once, on the watchdog's thread."""

    def __init__(
        self, engine: Engine, *, on_stuck: Callable[[], None], guard: Guard, tick_s: float = TICK_S
    ) -> None:
        self._engine = engine
        self._on_stuck = on_stuck
        self._guard = guard
        self._tick_s = tick_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look, once each tick. Life is expected from now on, not from the first one."""
        self._guard.expect_life(self._engine.patience.bound_s(0) + GRACE_S)
        self._thread.start()

    def stop(self) -> None:
        """The engine is about to be stopped by someone else."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(2 * self._tick_s)

    def _watch(self) -> None:
        seen: Turn | None = None
        elapsed_s, last_s = 0.0, time.monotonic()
        while not self._stopped.wait(self._tick_s):
            now_s = time.monotonic()
            passed_s = min(now_s - last_s, 2 * self._tick_s)
            last_s = now_s
            turn = self._engine.turn
            elapsed_s = elapsed_s + passed_s if turn is not None and turn is seen else 0.0
            seen = turn
            bound_s = self._engine.patience.bound_s(turn.tokens if turn else 0)
            if turn is not None and elapsed_s > bound_s:
                self._give_up(turn, elapsed_s)
                return
            self._guard.expect_life(bound_s + GRACE_S)
        # Here, and not in `stop`: this thread may have been about to expect life once more.
        self._guard.rest()

    def _give_up(self, turn: Turn, elapsed_s: float) -> None:
        facts = {
            "seconds": round(elapsed_s, 1),
            "tokens": turn.tokens,
            "stack": _stack_of(self._engine.thread_id),
        }
        _log.critical("the engine is stuck; its requests fail", extra={"facts": facts})
        self._guard.expect_life(2 * GRACE_S)
        self._engine.give_up("internal", "a step did not end")
        self._on_stuck()
        # Whoever heard that ends the process in good order. If not even that goes on:
        if not self._stopped.wait(GRACE_S):
            self._guard.end(EXIT_STUCK)


def _stack_of(thread_id: int | None) -> list[str]:
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001 - the documented way to another thread's stack
    return traceback.format_stack(frame)[-12:] if frame is not None else []
