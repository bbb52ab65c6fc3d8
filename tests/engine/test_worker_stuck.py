"""The real process with a runner that never returns: its streams end, and so does it."""

import asyncio

import httpx
import pytest

from core.protocol import Failed, Tokens
from tests.support.engine_requests import a_request
from tests.support.stuck_worker import ALONE, STUCK
from tests.support.worker_process import a_worker, tiny_store
from worker.journal import left_behind
from worker.watchdog import EXIT_STUCK

pytestmark = pytest.mark.anyio

OPTIONS = {"module": "tests.support.stuck_worker", "step_timeout_s": 1}


async def test_a_step_that_never_returns_fails_its_streams_and_ends_the_process(tmp_path):
    # vllm 45388, vllm-ascend 16315: stuck for ever, with an open port and a fine health check.
    [version] = tiny_store(tmp_path)
    async with a_worker(tmp_path, version, **OPTIONS) as worker:
        await worker.until_ready()

        async def ask(prompt, **options):
            request = a_request(prompt, version=version, **options)
            return request.request_id, await worker.generate(request)

        good = asyncio.create_task(ask((3, 4, 5), max_tokens=400, ignore_eos=True))
        await worker.until_running()
        bad = asyncio.create_task(ask((3, STUCK, 5)))
        for name, frames in await asyncio.gather(good, bad):
            last = frames[-1]
            assert isinstance(last, Failed), name
            assert (last.code, last.retryable) == ("internal", True)
            assert sum(isinstance(frame, Failed) for frame in frames) == 1
            produced = sum(len(f.ids) for f in frames if isinstance(f, Tokens))
            assert last.usage.output_tokens == produced
        assert await worker.end() == EXIT_STUCK
        assert "the engine is stuck" in worker.output
        assert "stuck_worker" in worker.output, "the stack is told"
        [left] = left_behind(tmp_path / "journal", now_ms=0)
        told = {entry.request_id: entry for entry in left.entries}
        for name, frames in (good.result(), bad.result()):
            assert told[name].cause == "failed"
            assert told[name].usage == frames[-1].usage


async def test_a_step_that_lets_no_thread_run_ends_the_process_too(tmp_path):
    [version] = tiny_store(tmp_path)
    async with a_worker(tmp_path, version, **OPTIONS) as worker:
        await worker.until_ready()
        with pytest.raises(httpx.TransportError):
            await worker.generate(a_request((3, ALONE, 5), version=version))
        assert await worker.end() == 1
        assert "Timeout" in worker.output
        [left] = left_behind(tmp_path / "journal", now_ms=0)
        assert [entry.cause for entry in left.entries] == ["lost"]
