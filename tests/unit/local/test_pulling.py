"""A pull beside the start: it hears the wish to stop, and when stuck is left behind."""

import asyncio
import gc
import threading
import time

import pytest

from artifacts.errors import SourceAwayError
from local import pulling
from local.pulling import Pulling, PullStoppedError

pytestmark = pytest.mark.anyio


def until_stopped(stopped):
    while not stopped():
        time.sleep(0.001)
    raise PullStoppedError


def fail(_stopped):
    raise SourceAwayError("no network")


async def test_its_result_and_its_failure_are_its_callers():
    assert await Pulling(lambda stopped: not stopped()).result() is True
    with pytest.raises(SourceAwayError, match="no network"):
        await Pulling(fail).result()


async def test_asked_to_stop_it_stops_at_once(caplog):
    under_way = Pulling(until_stopped)
    waiting = asyncio.create_task(under_way.result())
    await asyncio.sleep(0)
    waiting.cancel()
    async with asyncio.timeout(2):
        await under_way.stop()
    assert waiting.cancelled()
    gc.collect()
    await asyncio.sleep(0)
    assert not caplog.records, "what nobody waits for is no failure to report"


async def test_one_that_is_stuck_is_left_behind(monkeypatch):
    monkeypatch.setattr(pulling, "STOP_TIMEOUT_S", 0.05)
    release = threading.Event()
    under_way = Pulling(lambda _stopped: release.wait())
    async with asyncio.timeout(2):
        await under_way.stop()
    release.set()
    assert await under_way.result() is True
