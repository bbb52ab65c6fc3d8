"""Sleep, wake and another version, on the real process: memory falls, answers stay the same."""

import asyncio

import pytest

from core.protocol import Failed, Finished, Nack, Started, Tokens
from tests.support.engine_requests import a_request
from tests.support.worker_process import a_worker, tiny_store

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
PROMPT = tuple(range(20, 60))


def ids(frames):
    assert isinstance(frames[-1], Finished), frames
    return [id_ for frame in frames if isinstance(frame, Tokens) for id_ in frame.ids]


def ask(version, prompt=PROMPT, **options):
    defaults = {"max_tokens": 12, "temperature": 0.8, "ignore_eos": True}
    return a_request(prompt, version=version, **(defaults | options))


async def answer(worker, version, **options):
    return ids(await worker.generate(ask(version, **options)))


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_memory_back_and_waking_changes_no_answer(tmp_path, level):
    # 100 MiB of weights, 130 MiB of KV.
    [version] = tiny_store(tmp_path, hidden=1024, intermediate=4096, layers=2)
    async with a_worker(tmp_path, version, kv_memory_mb=130, kv_blocks=0) as worker:
        await worker.until_ready()
        before, awake_bytes = await answer(worker, version), worker.resident_bytes
        asleep = await worker.post("/sleep", {"level": level})
        assert (asleep.status_code, asleep.json()["state"]) == (200, "asleep")
        freed = awake_bytes - worker.resident_bytes
        assert freed > (100 if level == 1 else 170) * MIB
        assert await worker.generate(ask(version)) == [Nack(reason="asleep")]
        assert await worker.generate(ask("other")) == [Nack(reason="wrong_version")]
        assert (await worker.client.get("/health/live")).status_code == 200
        ready = await worker.client.get("/health/ready")
        assert (ready.status_code, ready.json()["state"]) == (503, "asleep")
        text = (await worker.client.get("/metrics")).text
        assert 'headworks_worker_state{state="asleep"} 1.0' in text
        assert 'headworks_worker_kv_blocks{state="free"} 0.0' in text
        assert (await worker.post("/wake")).json()["state"] == "ready"
        frames = await worker.generate(ask(version))
        assert ids(frames) == before
        [started] = [frame for frame in frames if isinstance(frame, Started)]
        assert started.cached_tokens == 0, "a prefix of before the sleep"
        assert worker.resident_bytes < awake_bytes + 120 * MIB


async def test_sleep_waits_for_what_runs_and_no_longer_than_a_drain(tmp_path):
    [version] = tiny_store(tmp_path)
    async with a_worker(tmp_path, version, drain_timeout_s=1) as worker:
        await worker.until_ready()
        long = asyncio.create_task(worker.generate(ask(version, max_tokens=450)))
        short = asyncio.create_task(worker.generate(ask(version, max_tokens=3)))
        await worker.until_running()
        assert (await worker.post("/sleep", {"level": 1})).status_code == 200
        assert isinstance((await short)[-1], Finished)
        last = (await long)[-1]
        ended_by_us = isinstance(last, Failed) and (last.code, last.retryable) == (
            "shutting_down",
            True,
        )
        assert ended_by_us or isinstance(last, Finished)
        again = await worker.post("/sleep", {"level": 2})
        assert again.status_code == 200
        assert (await worker.post("/sleep", {"level": 1})).status_code == 409
        assert (await worker.post("/wake")).json()["state"] == "ready"
        assert (await worker.post("/wake")).json()["state"] == "ready"


async def test_another_version_answers_as_itself_under_a_new_boot(tmp_path):
    first, second = tiny_store(tmp_path, 0, 1)
    async with a_worker(tmp_path, first) as worker:
        await worker.until_ready()
        boot = (await worker.load())["boot_id"]
        from_first = await answer(worker, first)
        assert await worker.generate(ask(second)) == [Nack(reason="wrong_version")]
        # sglang PR 12107: dropping the cache with live requests crashed the scheduler.
        live = [asyncio.create_task(worker.generate(ask(first, max_tokens=300))) for _ in range(12)]
        changing = asyncio.create_task(worker.post("/version", {"version": second}))
        refused = set()
        while not changing.done():
            for version in (first, second):
                [*_, last] = await worker.generate(ask(version, max_tokens=1))
                if isinstance(last, Nack):
                    refused.add((version, last.reason))
        assert (await changing).json()["state"] == "ready"
        assert (second, "wrong_version") in refused
        assert refused <= {
            (version, reason)
            for version in (first, second)
            for reason in ("wrong_version", "asleep", "draining", "full")
        }
        for frames in await asyncio.gather(*live):
            assert sum(isinstance(f, Finished | Failed | Nack) for f in frames) == 1
        load = await worker.load()
        assert load["version"] == second
        assert load["boot_id"] != boot
        assert await worker.generate(ask(first)) == [Nack(reason="wrong_version")]
        from_second = await answer(worker, second)
        assert from_second != from_first
        assert (await worker.post("/version", {"version": first})).status_code == 200
        assert await answer(worker, first) == from_first


async def test_a_version_that_does_not_load_leaves_the_one_before(tmp_path):
    first, second = tiny_store(tmp_path, 0, 1)
    async with a_worker(tmp_path, first) as worker:
        await worker.until_ready()
        before = await answer(worker, first)
        unknown = await worker.post("/version", {"version": "no such"})
        assert unknown.status_code == 404
        for file in (tmp_path / "models" / "versions" / second).glob("*.safetensors"):
            file.unlink()
            file.write_bytes(b"no weights")
        failed = await worker.post("/version", {"version": second})
        assert failed.status_code == 503
        assert f"it serves {first} again" in failed.json()["error"]
        assert (await worker.load())["version"] == first
        assert await answer(worker, first) == before


async def test_what_is_no_change_is_refused(tmp_path):
    [version] = tiny_store(tmp_path)
    async with a_worker(tmp_path, version) as worker:
        await worker.until_ready()
        for path, body in (
            ("/sleep", {"level": 3}),
            ("/sleep", {"depth": 1}),
            ("/version", {}),
            ("/version", {"version": 5}),
        ):
            assert (await worker.post(path, body)).status_code == 400
        assert (await worker.client.post("/sleep")).status_code == 401
        # What runs holds the first one up, so that the second is beside it.
        running = asyncio.create_task(
            worker.generate(a_request((3, 4), version=version, max_tokens=400, ignore_eos=True))
        )
        await worker.until_running()
        both = await asyncio.gather(*(worker.post("/sleep") for _ in range(2)))
        assert sorted(each.status_code for each in both) == [200, 409]
        await running
        worker.process.terminate()
        assert await worker.end() == 0, worker.output


async def test_a_stop_during_a_change_ends_the_worker_in_good_order(tmp_path):
    first, second = tiny_store(tmp_path, 0, 1)
    for delay_s in (0.0, 0.1):
        async with a_worker(tmp_path, first, drain_timeout_s=1) as worker:
            await worker.until_ready()
            live = asyncio.create_task(worker.generate(ask(first, max_tokens=400)))
            await worker.until_running()
            changing = asyncio.create_task(worker.post("/version", {"version": second}))
            await asyncio.sleep(delay_s)
            worker.process.terminate()
            [*_, last] = await live
            assert isinstance(last, Finished | Failed)
            assert (await changing).status_code in (200, 409, 503)
            assert await worker.end() == 0, worker.output
            assert "Traceback" not in worker.output


async def test_whoever_asked_for_a_change_may_leave(tmp_path):
    first, second = tiny_store(tmp_path, 0, 1)
    async with a_worker(tmp_path, first) as worker:
        await worker.until_ready()
        changing = asyncio.create_task(worker.post("/version", {"version": second}))
        await asyncio.sleep(0.02)
        changing.cancel()
        async with asyncio.timeout(30):
            while (await worker.load())["version"] != second:  # noqa: ASYNC110 - bounded
                await asyncio.sleep(0.05)
        await worker.until_ready()
        assert await answer(worker, second)
