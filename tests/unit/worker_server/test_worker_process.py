"""A life of the worker: only being fenced, or being told to stop, ends it."""

import asyncio

import httpx
import pytest

from core.fleet import ReplicaState
from tests.support.engine_requests import VERSION, FakeText
from tests.support.fake_runner import FakeRunner
from worker.engine import Engine, EngineConfig
from worker.process import EXIT_FENCED, Worker
from worker.settings import WorkerSettings

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
