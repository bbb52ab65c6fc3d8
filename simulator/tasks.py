"""Coroutines in virtual time: promises, tasks, processes that can be killed.

What asyncio is to the shells, without a thread, a socket or a clock of its own. A task moves
only inside an event of the clock. Invariant: a killed process never acts again.
"""

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from simulator.clock import Clock

T = TypeVar("T")
Work = Coroutine["Promise[Any]", None, T]


class Promise(Generic[T]):
    """A value that comes later, once; what comes after it is ignored."""

    __slots__ = ("_clock", "_followers", "_value", "done")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._followers: list[Callable[[], object]] = []
        self._value: T
        self.done = False

    def resolve(self, value: T) -> None:
        """Bring the value; those who wait go on within this event."""
        if self.done:
            return
        self.done = True
        self._value = value
        for follower in self._followers:
            self._clock.soon(follower)
        self._followers.clear()

    def then(self, follower: Callable[[], object]) -> None:
        """Call `follower` when the value is there."""
        if self.done:
            self._clock.soon(follower)
        else:
            self._followers.append(follower)

    @property
    def value(self) -> T:
        """What was brought."""
        assert self.done
        return self._value

    def __await__(self) -> Generator["Promise[Any]", None, T]:
        if not self.done:
            yield self
        return self.value


class Task(Generic[T]):
    """A coroutine on its way. `result` is its promise, which a stopped task never keeps."""

    def __init__(self, clock: Clock, work: Work[T]) -> None:
        self._work = work
        self._turn = 0
        self._ended = False
        self._clock = clock
        self.result: Promise[T] = Promise(clock)
        # The first stretch runs at once, so that there is always an await to interrupt it at.
        self._advance(None)

    def interrupt(self, error: Exception) -> None:
        """Raise `error` where the task waits. One that has ended is left alone."""
        if not self._ended:
            self._turn += 1
            self._clock.soon(lambda: self._advance(error))

    def stop(self) -> None:
        """End it where it waits, without another step of its own."""
        if not self._ended:
            self._ended = True
            self._work.close()

    def _resume_if(self, turn: int) -> Callable[[], None]:
        """A follower for this wait alone: an interrupted wait must not resume the next one."""

        def resume() -> None:
            if turn == self._turn:
                self._advance(None)

        return resume

    def _advance(self, error: Exception | None) -> None:
        if self._ended:
            return
        self._turn += 1
        try:
            waits_for = self._work.send(None) if error is None else self._work.throw(error)
        except StopIteration as end:
            self._ended = True
            self.result.resolve(end.value)
        else:
            waits_for.then(self._resume_if(self._turn))


class Process:
    """One life of something that can die. Its tasks die with it."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.alive = True
        self._tasks: dict[Task[Any], None] = {}

    def spawn(self, work: Work[T]) -> Task[T]:
        """Start a task of this process."""
        assert self.alive
        task = Task(self.clock, work)
        self._tasks[task] = None
        task.result.then(lambda: self._tasks.pop(task, None))
        return task

    def kill(self) -> None:
        """As `kill -9`: nothing is said, nothing is finished."""
        self.alive = False
        tasks, self._tasks = self._tasks, {}
        for task in tasks:
            task.stop()


def sleep(clock: Clock, delay_ms: int, label: str) -> Promise[None]:
    """Kept after a while."""
    promise: Promise[None] = Promise(clock)
    clock.after(delay_ms, label, lambda: promise.resolve(None))
    return promise


def within(clock: Clock, promise: Promise[T], limit_ms: int, label: str) -> Promise[T | None]:
    """The promise's value, or None when it does not come in time."""
    first: Promise[T | None] = Promise(clock)
    timer = clock.after(limit_ms, f"{label} timeout", lambda: first.resolve(None))

    def bring() -> None:
        timer.cancel()
        first.resolve(promise.value)

    promise.then(bring)
    return first
