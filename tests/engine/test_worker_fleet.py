"""What the fleet hears of a worker's life: each boot, each state, every last word."""

import asyncio
import time

import pytest

from core.fleet import Beat, Journal, Register, ReplicaState
from core.protocol import Failed, Finished
from tests.support.engine_requests import a_request
from tests.support.fleet_listener import a_fleet_listener
from tests.support.worker_process import a_worker, tiny_store

pytestmark = pytest.mark.anyio


def last_words(fleet):
    return {
        entry.request_id: entry
        for message in fleet.of(Journal)
        for entry in message.entries
        if entry.final
    }


async def test_a_stop_waits_for_what_runs_and_tells_everything_before_it_ends(tmp_path):
    [version] = tiny_store(tmp_path)
    async with (
        a_fleet_listener() as fleet,
        a_worker(tmp_path, version, control_plane_url=fleet.url, drain_timeout_s=30) as worker,
    ):
        await worker.until_ready()
        requests = [a_request(version=version, max_tokens=n, ignore_eos=True) for n in (5, 200)]
        asked = [asyncio.create_task(worker.generate(request)) for request in requests]
        await worker.until_running()
        # As a spot machine's notice: a drain with a deadline, which the fleet hears of.
        notice = {"within_ms": 30_000, "reason": "spot"}
        answer = await worker.post("/drain", notice)
        assert (answer.status_code, answer.json()["within_ms"]) == (202, 30_000)
        assert (await worker.post("/drain", {"within_s": 1})).status_code == 400
        assert (await worker.load())["state"] in ("ready", "draining"), "it answers until the end"
        for frames, request in zip(await asyncio.gather(*asked), requests, strict=True):
            assert isinstance(frames[-1], Finished)
            assert frames[-1].usage.output_tokens == request.sampling.max_tokens
        assert await worker.end() == 0, worker.output
        told = last_words(fleet)
        assert {told[request.request_id].cause for request in requests} == {"complete"}
        states = [beat.state for beat in fleet.of(Beat)]
        assert states[-1] is ReplicaState.STOPPED
        assert ReplicaState.DRAINING in states
        assert {beat.drain_reason for beat in fleet.of(Beat)} == {"", "spot"}


async def test_a_stop_ends_what_outlasts_its_bound(tmp_path):
    [version] = tiny_store(tmp_path, context=8192, layers=4)
    async with (
        a_fleet_listener() as fleet,
        a_worker(
            tmp_path, version, control_plane_url=fleet.url, drain_timeout_s=1, kv_blocks=600
        ) as worker,
    ):
        await worker.until_ready()
        request = a_request(version=version, max_tokens=8000, ignore_eos=True)
        asked = asyncio.create_task(worker.generate(request))
        await worker.until_running()
        started = time.monotonic()
        worker.process.terminate()
        last = (await asked)[-1]
        assert isinstance(last, Failed)
        assert (last.code, last.retryable) == ("shutting_down", True)
        assert time.monotonic() - started >= 0.9, "it had its time"
        assert await worker.end() == 0, worker.output
        told = last_words(fleet)[request.request_id]
        assert (told.cause, told.usage) == ("failed", last.usage)


async def test_another_version_is_another_boot_and_the_old_ones_words_are_delivered(tmp_path):
    first, second = tiny_store(tmp_path, 0, 1)
    async with (
        a_fleet_listener() as fleet,
        a_worker(tmp_path, first, control_plane_url=fleet.url) as worker,
    ):
        await worker.until_ready()
        requests = [a_request(version=first, max_tokens=3) for _ in range(3)]
        await asyncio.gather(*map(worker.generate, requests))
        body = {"version": second, "deployment": "named-by-hand"}
        assert (await worker.post("/version", body)).status_code == 200
        await fleet.until(lambda: len({message.boot_id for message in fleet.of(Register)}) > 1)
        old, *_, new = fleet.of(Register)
        assert (old.version, new.version) == (first, second)
        assert new.deployment == "named-by-hand"
        assert old.boot_id != new.boot_id
        assert new.capacity.kv_blocks == 64
        await worker.generate(a_request(version=second, max_tokens=3))
        assert (await worker.post("/sleep", {"level": 2})).status_code == 200
        told = last_words(fleet)
        assert all(told[request.request_id].cause == "complete" for request in requests)
        await fleet.until(lambda: fleet.of(Beat)[-1].state is ReplicaState.SLEEPING)
        of_new = [beat for beat in fleet.of(Beat) if beat.boot_id == new.boot_id]
        assert [beat.seq for beat in of_new] == sorted(beat.seq for beat in of_new)
        steps = [beat.steps for beat in fleet.of(Beat)]
        assert steps == sorted(steps), "progress never goes back"
        assert (await worker.post("/wake")).status_code == 200
        await fleet.until(lambda: fleet.of(Beat)[-1].state is ReplicaState.READY)
