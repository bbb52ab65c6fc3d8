"""The supervisor on real children: restarts with back-off, relays output, leaves nobody."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from local import supervisor
from local.process import ProcessSpec
from local.state import ProcessState
from local.supervisor import StartFailedError, Supervised, last_lines

pytestmark = pytest.mark.anyio


async def yes():
    return True


async def no():
    return False


def spec(code, **changes):
    fields = {
        "name": "child",
        "argv": (sys.executable, "-c", code),
        "cwd": Path("/"),
        "env": {"PYTHONUNBUFFERED": "1"},
    }
    return ProcessSpec(**fields | changes)


@pytest.fixture
def supervised(tmp_path):
    said = []

    def make(code, **changes):
        child = Supervised(
            spec(code, **changes),
            tmp_path / "child.log",
            lambda name, text: said.append(text),
            lambda: None,
        )
        child.said = said
        return child

    return make


async def until(condition, within_s=10.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_output_is_shown_and_kept(supervised, tmp_path):
    child = supervised("print('hello'); import time; time.sleep(60)")
    await child.start()
    await child.wait_ready(yes, 5)
    await until(lambda: "hello" in child.said)
    assert (tmp_path / "child.log").read_text() == "hello\n"
    await child.stop()
    assert child.report.state is ProcessState.STOPPED


async def test_a_crash_is_answered_by_a_new_life(supervised, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    child = supervised("import time; time.sleep(60)")
    await child.start()
    await child.wait_ready(yes, 5)
    first = child.report.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.report.pid != first)
    assert (child.report.restarts, child.report.last_exit) == (1, -signal.SIGKILL)
    await child.stop()


async def test_waits_between_lives_grow(supervised, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    child = supervised("raise SystemExit(4)")
    await child.start()
    await until(lambda: child.report.restarts >= 4)
    await child.stop()
    waits = [text.rsplit("in ", 1)[1] for text in child.said if "starting again" in text]
    assert waits[:4] == ["0.01 s", "0.02 s", "0.04 s", "0.08 s"]


async def test_stopping_does_not_wait_for_the_back_off(supervised):
    child = supervised("raise SystemExit(4)")
    await child.start()
    await until(lambda: child.report.state is ProcessState.BACKOFF)
    async with asyncio.timeout(0.4):
        await child.stop()


async def test_a_crash_while_starting_says_what_it_said(supervised):
    child = supervised("print('no such model'); raise SystemExit(1)")
    await child.start()
    with pytest.raises(StartFailedError, match=r"(?s)child ended while starting.*no such model"):
        await child.wait_ready(no, 10)
    await child.stop()


async def test_a_start_that_takes_too_long_is_a_failure(supervised):
    child = supervised("import time; time.sleep(60)")
    await child.start()
    with pytest.raises(StartFailedError, match="not ready within"):
        await child.wait_ready(no, 0.2)
    await child.stop()


async def test_one_that_ignores_the_signal_is_killed(supervised):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    child = supervised(code, stop_timeout_s=0.2)
    await child.start()
    await until(lambda: "deaf" in child.said)
    pid = child.report.pid
    await child.stop()
    assert not psutil.pid_exists(pid)


async def test_a_life_born_during_the_stop_is_stopped_too(supervised, monkeypatch):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    child = supervised("import time; time.sleep(60)")
    await child.start()
    born, go_on = asyncio.Event(), asyncio.Event()
    spawn = child._spawn

    async def slow_spawn():
        process = await spawn()
        born.set()
        await go_on.wait()
        return process

    monkeypatch.setattr(child, "_spawn", slow_spawn)
    os.kill(child.report.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await born.wait()
        second = child.report.pid
        stopping = asyncio.create_task(child.stop())
        await asyncio.sleep(0)
        go_on.set()
        await stopping
    assert not psutil.pid_exists(second)
    assert child.report.state is ProcessState.STOPPED


async def test_a_life_that_cannot_be_started_is_tried_again(supervised, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    child = supervised("", argv=(str(program), "-c", "import time; time.sleep(60)"))
    await child.start()
    first = child.report.pid
    program.unlink()
    os.kill(first, signal.SIGKILL)
    await until(lambda: any("cannot be started" in text for text in child.said))
    program.symlink_to(sys.executable)
    await until(lambda: child.report.state is ProcessState.RUNNING and child.report.pid != first)
    await child.stop()


async def test_a_log_that_cannot_be_opened_does_not_stop_the_relay(supervised, tmp_path):
    (tmp_path / "child.log").mkdir()
    child = supervised("print('hello'); import time; time.sleep(60)")
    await child.start()
    await until(lambda: "hello" in child.said)
    await child.stop()
    assert child.report.state is ProcessState.STOPPED


async def test_output_that_cannot_be_shown_does_not_stop_the_watch(tmp_path):
    def full(_name, _text):
        raise OSError(28, "No space left on device")

    log = tmp_path / "child.log"
    code = "print('one'); print('two'); import time; time.sleep(60)"
    child = Supervised(spec(code), log, full, lambda: None)
    await child.start()
    await until(lambda: log.exists() and log.read_text() == "one\ntwo\n")
    await child.stop()


async def test_who_holds_the_output_open_does_not_hold_the_stop(supervised, monkeypatch):
    monkeypatch.setattr(supervisor, "KILL_TIMEOUT_S", 0.1)
    code = (
        "import subprocess, sys, time\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "print(subprocess.Popen(sleeper, start_new_session=True).pid, flush=True)\n"
        "time.sleep(60)"
    )
    child = supervised(code, stop_timeout_s=0.1)
    await child.start()
    await until(lambda: child.said)
    stranger = int(child.said[0])
    try:
        async with asyncio.timeout(5):
            await child.stop()
    finally:
        os.kill(stranger, signal.SIGKILL)
    await until(child._child._transport.is_closing)


async def test_a_line_of_two_megabytes_does_not_stop_the_relay(supervised):
    code = "print('x' * 2_000_000); print('after'); import time; time.sleep(60)"
    child = supervised(code)
    await child.start()
    await until(lambda: any(text.endswith("after") for text in child.said))
    await child.stop()


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert last_lines(log, 3) == []
    log.write_text("\n".join(str(n) for n in range(100_000)))
    assert last_lines(log, 3) == ["99997", "99998", "99999"]
