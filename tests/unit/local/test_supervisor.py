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
