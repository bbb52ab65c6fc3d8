"""Virtual time: order of events, promises, interrupts, and what death stops."""

import pytest

from simulator.clock import START_MS, Clock
from simulator.tasks import Process, Promise, Task, sleep, within


class StopItError(Exception):
    pass


def run_out(clock):
    labels = []
    while (label := clock.step()) is not None:
        labels.append((clock.now_ms - START_MS, label))
    return labels


def nothing():
    pass


def test_events_come_by_time_and_then_in_the_order_they_were_planned():
    clock = Clock()
    clock.after(5, "late", nothing)
    clock.after(1, "first", nothing)
    clock.after(1, "second", nothing)
    clock.after(3, "never", nothing).cancel()
    assert run_out(clock) == [(1, "first"), (1, "second"), (5, "late")]


def test_a_promise_is_kept_once():
    clock = Clock()
    promise = Promise(clock)
    promise.resolve(1)
    promise.resolve(2)
    assert promise.value == 1


def test_a_task_sleeps_in_virtual_time():
    clock = Clock()

    async def work():
        await sleep(clock, 10, "nap")
        return clock.now_ms - START_MS

    task = Task(clock, work())
    run_out(clock)
    assert task.result.value == 10


def test_waiting_ends_with_the_value_or_with_the_limit():
    clock = Clock()
    slow = sleep(clock, 100, "slow")
    promise = Promise(clock)
    in_time, late = within(clock, promise, 50, "one"), within(clock, slow, 50, "other")
    clock.after(49, "bring", lambda: promise.resolve("it"))
    run_out(clock)
    assert (in_time.value, late.value) == ("it", None)


def test_an_interrupted_wait_does_not_resume_the_next_one():
    clock = Clock()
    first, second = Promise(clock), Promise(clock)
    seen = []

    async def work():
        try:
            seen.append(await first)
        except StopItError:
            seen.append("stopped")
        seen.append(await second)

    task = Task(clock, work())
    clock.after(1, "interrupt", lambda: (task.interrupt(StopItError()), first.resolve(1)))
    clock.after(2, "second", lambda: second.resolve(2))
    run_out(clock)
    assert seen == ["stopped", 2]


def test_an_ended_task_is_not_interrupted():
    clock = Clock()

    async def work():
        return 1

    task = Task(clock, work())
    task.interrupt(StopItError())
    task.stop()
    clock.after(0, "event", nothing)
    run_out(clock)
    assert task.result.value == 1


def test_what_a_task_raises_comes_out_of_the_event():
    clock = Clock()

    async def work():
        await sleep(clock, 1, "nap")
        raise StopItError

    Task(clock, work())
    with pytest.raises(StopItError):
        run_out(clock)


def test_a_killed_process_does_nothing_more():
    clock = Clock()
    process, seen = Process(clock, "it"), []

    async def work():
        await sleep(clock, 10, "nap")
        seen.append("woke")

    process.spawn(work())
    clock.after(5, "kill", process.kill)
    run_out(clock)
    assert seen == []
    assert not process.alive
