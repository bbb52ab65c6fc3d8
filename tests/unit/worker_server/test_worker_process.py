"""A life of the worker: only being fenced, or being told to stop, ends it."""

import asyncio
import threading
import time

import httpx
import msgspec
import pytest

from core.fleet import Beat, BeatReply, Register, ReplicaState
from tests.support.engine_requests import VERSION, FakeText
from tests.support.fake_runner import FakeRunner
from worker.engine import Engine, EngineConfig
from worker.process import EXIT_FENCED, Worker
from worker.settings import WorkerSettings
from worker.warming import WarmUpError

pytestmark = pytest.mark.anyio


class QuietHTTP:
    """What the worker needs of an HTTP server that nobody asks anything."""

    def __init__(self):
        self.should_exit = False

    async def serve(self):
        while not self.should_exit:  # noqa: ASYNC110 - a flag, as uvicorn's is
            await asyncio.sleep(0.005)


class FakeModel:
    """A model that is a hash, of whatever version it is asked for."""

    def __init__(self, settings):
        self.version = settings.model_version

    def open(self, boot_id, observer):
        config = EngineConfig(
            version=self.version, boot_id=boot_id, kv_blocks=8, block_tokens=4, context_tokens=30
        )
        runner = FakeRunner(8, 4)
        return Engine(runner=runner, text=FakeText(), config=config, on_step=observer.step)

    def close(self):
        pass


@pytest.fixture
def worker(tmp_path, plane):
    settings = WorkerSettings(
        internal_secret="x" * 16,
        replica_id="r1",
        models_dir=tmp_path,
        model_version=VERSION,
        journal_dir=tmp_path,
        control_plane_url="http://plane.invalid",
    )
    return Worker(settings, boot_id="boot_a", load=FakeModel)


async def test_a_fenced_worker_ends_with_its_own_status(worker, plane):
    plane.answer = lambda _path, _entries: httpx.Response(409, text="an older life")
    async with asyncio.timeout(10):
        assert await worker.run(QuietHTTP()) == EXIT_FENCED


async def test_a_broken_link_is_no_fence_and_the_worker_goes_on(worker, plane):
    def answer(_path, _entries):
        raise ZeroDivisionError

    plane.answer = answer
    http = QuietHTTP()
    life = asyncio.create_task(worker.run(http))
    async with asyncio.timeout(10):
        while len(plane.calls) < 3:  # noqa: ASYNC110 - bounded
            await asyncio.sleep(0.005)
        assert not http.should_exit
        assert worker._lifecycle.state is ReplicaState.READY
        plane.answer = lambda _path, _entries: None
        http.should_exit = True
        assert await life == 0


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - bounded
            await asyncio.sleep(0.005)


async def test_it_registers_before_it_loads_and_again_with_what_it_holds(worker, plane):
    loading = threading.Event()
    load = worker._serving._load

    def slow(settings):
        assert loading.wait(20)
        return load(settings)

    worker._serving._load = slow
    life = asyncio.create_task(worker.run(QuietHTTP()))
    await until(lambda: ReplicaState.LOADING in plane.states())
    [first] = [message for message in plane.messages if isinstance(message, Register)]
    assert (first.state, first.capacity.kv_blocks) == (ReplicaState.LOADING, 0)
    assert first.age_ms > 0
    loading.set()
    await until(lambda: ReplicaState.READY in plane.states())
    *_, last = [message for message in plane.messages if isinstance(message, Register)]
    assert last.capacity.kv_blocks == 8
    assert worker.server.engine.load().steps > 0, "it has generated"
    worker.end()
    assert await life == 0
    assert plane.states()[-2:] == [ReplicaState.DRAINING, ReplicaState.STOPPED]


async def test_an_engine_that_cannot_generate_never_becomes_ready(worker, plane):
    async def fail():
        raise WarmUpError

    worker._serving.warm = fail
    with pytest.raises(WarmUpError):
        await worker.run(QuietHTTP())
    assert ReplicaState.READY not in plane.states()
    assert plane.states()[-1] is ReplicaState.STOPPED


async def test_a_reclaim_notice_is_a_drain_with_a_deadline_that_the_fleet_hears(worker, plane):
    life = asyncio.create_task(worker.run(QuietHTTP()))
    await until(lambda: ReplicaState.READY in plane.states())
    left_ms = worker.end("the machine is taken back", 120_000)
    assert 119_000 < left_ms <= 120_000
    assert worker.end() <= 10_000, "SIGTERM's own bound is the earlier"
    assert await life == 0
    told_last = [message for message in plane.messages if isinstance(message, Beat)][-1]
    assert told_last.drain_reason == "its process was asked to end"
    assert 0 < told_last.drain_ms <= 10_000


async def test_a_drain_of_the_fleets_is_within_the_time_that_the_fleet_gives(worker, plane):
    life = asyncio.create_task(worker.run(QuietHTTP()))
    await until(lambda: ReplicaState.READY in plane.states())
    reply = msgspec.json.encode(BeatReply(known=True, drain=True, drain_ms=60_000))
    plane.answer = lambda path, _: (
        httpx.Response(200, content=reply) if path == "/fleet/beat" else None
    )
    assert await life == 0
    assert 50_000 < worker._ending.left_ms(time.monotonic_ns() // 1_000_000) <= 60_000
    assert plane.messages[-1].drain_ms is None, "it was the fleet's own wish"
