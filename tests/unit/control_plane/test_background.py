"""Supervision of jobs: counted, bounded, and never the end of the process."""

import asyncio
import contextlib
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.background import Background, Job, pause_ms
from control_plane.metrics import Metrics

pytestmark = pytest.mark.anyio


@given(every_ms=st.integers(1, 60_000), failures=st.integers(1, 100), max_ms=st.integers(1, 60_000))
def test_pauses_grow_with_failures_and_have_a_bound(every_ms, failures, max_ms):
    assert pause_ms(every_ms, failures=0, max_ms=max_ms) == every_ms
    pause = pause_ms(every_ms, failures=failures, max_ms=max_ms)
    assert min(every_ms, max_ms) <= pause <= max_ms
    assert pause <= pause_ms(every_ms, failures=failures + 1, max_ms=max_ms)


def test_a_job_of_each_hour_that_failed_does_not_wait_for_the_next():
    assert pause_ms(3_600_000, failures=1, max_ms=30_000) == 30_000


def counted(metrics, job, outcome):
    return metrics.registry.get_sample_value(
        "headworks_control_plane_job_runs_total", {"job": job, "outcome": outcome}
    )


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - bounded by the timeout
            await asyncio.sleep(0.002)


async def test_a_failing_job_is_tried_again_and_stops_no_other(caplog):
    metrics = Metrics()
    runs = {"ill": 0, "well": 0}

    async def ill():
        runs["ill"] += 1
        raise ValueError("still ill")

    async def well():
        runs["well"] += 1

    background = Background(metrics, timeout_ms=1000, backoff_max_ms=4)
    with caplog.at_level(logging.CRITICAL):
        background.start(
            [Job(name="ill", every_ms=1, run=ill), Job(name="well", every_ms=1, run=well)]
        )
        await until(lambda: runs["ill"] >= 4 and runs["well"] >= 4)
        await background.close()
    assert counted(metrics, "ill", "failed") >= 4
    assert counted(metrics, "ill", "done") is None
    assert counted(metrics, "well", "done") >= 4


async def test_a_job_that_hangs_is_cut_and_tried_again(caplog):
    metrics = Metrics()

    async def hang():
        await asyncio.Event().wait()

    background = Background(metrics, timeout_ms=5, backoff_max_ms=4)
    with caplog.at_level(logging.CRITICAL):
        background.start([Job(name="hang", every_ms=1, run=hang)])
        await until(lambda: (counted(metrics, "hang", "failed") or 0) >= 2)
        await background.close()


async def test_closing_waits_for_what_runs():
    ended = asyncio.Event()

    async def run():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    background = Background(Metrics(), timeout_ms=10_000, backoff_max_ms=1)
    background.start([Job(name="run", every_ms=1, run=run)])
    await asyncio.sleep(0.01)
    await background.close()
    assert ended.is_set()


async def test_a_cancellation_that_is_lost_on_the_way_does_not_keep_us_from_closing():
    began = asyncio.Event()

    async def lose_it():
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    background = Background(Metrics(), timeout_ms=10_000, backoff_max_ms=1)
    background.start([Job(name="lose", every_ms=60_000, run=lose_it)])
    await began.wait()
    async with asyncio.timeout(5):
        await background.close()
