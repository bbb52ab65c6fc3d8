"""The worker over real HTTP: frames, aborts, disconnects, drains, and a journal that agrees.

The engine is real; only the model under it is a chained hash, so that it is quick and exact.
"""

import asyncio
import time
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
import uvicorn

from core import internal_token
from core.fleet import ReplicaState
from core.protocol import (
    Choice,
    Failed,
    Finished,
    FrameReader,
    Load,
    Nack,
    Started,
    Tokens,
    encode_generate,
)
from tests.support.engine_requests import VERSION, FakeText, a_request
from tests.support.fake_runner import FakeRunner, expected
from worker.engine import Engine, EngineConfig
from worker.journal import Journal
from worker.lifecycle import Lifecycle
from worker.metrics import Metrics
from worker.server import Server

pytestmark = pytest.mark.anyio

SECRET = b"an internal secret"
STEP_S = 0.004


def bearer(audience="worker", secret=SECRET, life_ms=60_000):
    expires = time.time_ns() // 1_000_000 + life_ms
    token = internal_token.sign(secret, audience=audience, subject="gw_1", expires_ms=expires)
    return {"authorization": f"Bearer {token}"}


class Fixture:
    """A served worker, and a client to ask it with."""

    def __init__(self, directory, step_s):
        self.lifecycle = Lifecycle()
        self.journal = Journal(directory, "boot_a", bytes_max=1 << 30)
        self.server = Server(
            secret=SECRET,
            boot_id="boot_a",
            journal=self.journal,
            lifecycle=self.lifecycle,
            metrics=Metrics(),
            request_bytes_max=1 << 20,
        )
        runner = FakeRunner(64, 4, before=lambda _plan: time.sleep(step_s))
        config = EngineConfig(
            version=VERSION, boot_id="boot_a", kv_blocks=64, block_tokens=4, context_tokens=300
        )
        self.engine = Engine(runner=runner, text=FakeText(), config=config)

    async def generate(self, request, *, headers=None):
        """All frames but the load reports, which may come anywhere."""
        frames = [frame async for frame in self.frames(request, headers=headers)]
        return [frame for frame in frames if not isinstance(frame, Load)]

    async def frames(self, request, *, headers=None):
        reader = FrameReader()
        async with self.client.stream(
            "POST", "/generate", content=encode_generate(request), headers=headers or bearer()
        ) as response:
            assert response.status_code == 200, await response.aread()
            async for data in response.aiter_raw():
                for frame in reader.feed(data):
                    yield frame
        assert not reader.mid_frame

    def last_words(self):
        return {(e.request_id, e.attempt): e for e in self.journal.batch() if e.final}

    async def idle(self):
        async with asyncio.timeout(5):
            while len(self.server.attempts) or self.engine.load().kv_blocks_in_use:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(directory, *, ready=True, step_s=STEP_S):
    fixture = Fixture(directory, step_s)
    config = uvicorn.Config(fixture.server, port=0, lifespan="off", log_config=None)
    http = uvicorn.Server(config)
    http.capture_signals = _no_signals
    task = asyncio.create_task(http.serve())
    while not http.started:  # noqa: ASYNC110 - a flag
        await asyncio.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    fixture.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20)
    if ready:
        fixture.engine.start()
        fixture.server.engine = fixture.engine
        fixture.lifecycle.advance(ReplicaState.READY)
    try:
        yield fixture
    finally:
        await fixture.client.aclose()
        http.should_exit = True
        await task
        fixture.engine.stop(5)
        fixture.journal.close()


class _no_signals:  # noqa: N801 - stands where a function did
    def __enter__(self):
        return None

    def __exit__(self, *_exc):
        return None


async def test_frames_come_in_order_and_the_journal_has_the_same_totals(tmp_path):
    async with serving(tmp_path) as worker:
        request = a_request(prompt=range(1, 20), max_tokens=12, ignore_eos=True)
        started, *tokens, finished = await worker.generate(request)
        assert isinstance(started, Started)
        assert started.prompt_tokens == 19
        assert all(isinstance(frame, Tokens) for frame in tokens)
        ids = [i for frame in tokens for i in frame.ids]
        assert ids == expected(request.prompt_ids, request.sampling, 0, 12)
        assert "".join(frame.text for frame in tokens) == FakeText().decode(ids)
        assert isinstance(finished, Finished)
        entry = worker.last_words()[request.request_id, 1]
        assert (entry.usage, entry.seq, entry.cause) == (
            finished.usage,
            finished.journal_seq,
            "complete",
        )


async def test_several_at_once_do_not_disturb_each_other(tmp_path):
    async with serving(tmp_path) as worker:
        requests = [
            a_request(prompt=[n, *range(1, 5 + n)], max_tokens=9, ignore_eos=True)
            for n in range(1, 9)
        ]
        answers = await asyncio.gather(*map(worker.generate, requests))
        for request, frames in zip(requests, answers, strict=True):
            ids = [i for frame in frames if isinstance(frame, Tokens) for i in frame.ids]
            assert ids == expected(request.prompt_ids, request.sampling, 0, 9)
        await worker.idle()


async def test_an_abort_ends_the_stream_with_the_totals_so_far(tmp_path):
    async with serving(tmp_path) as worker:
        request = a_request(prompt=(1, 2, 3), max_tokens=150, ignore_eos=True)
        seen = []
        async for frame in worker.frames(request):
            if isinstance(frame, Load):
                continue
            seen.append(frame)
            if len(seen) == 4:
                path = f"/abort/{request.request_id}:1"
                answer = await worker.client.post(path, headers=bearer())
                assert answer.json() == {"aborted": True}
                # Who lost a connection tells by it whether the worker is still the same.
                assert answer.headers["x-headworks-boot"] == seen[0].boot_id
        assert isinstance(seen[-1], Finished)
        assert seen[-1].cause == "aborted"
        produced = sum(len(f.ids) for f in seen if isinstance(f, Tokens))
        assert seen[-1].usage.output_tokens == produced < 20
        again = await worker.client.post(path, headers=bearer())
        assert again.json() == {"aborted": False}
        await worker.idle()


async def test_a_peer_that_leaves_aborts_and_is_journalled(tmp_path):
    async with serving(tmp_path) as worker:
        request = a_request(prompt=(1, 2, 3), max_tokens=180, ignore_eos=True)
        async for frame in worker.frames(request):
            if isinstance(frame, Tokens):
                break
        await worker.idle()
        entry = worker.last_words()[request.request_id, 1]
        assert entry.cause == "aborted"
        assert 0 < entry.usage.output_tokens < 150


async def test_a_resumed_attempt_goes_on_where_the_first_stopped(tmp_path):
    async with serving(tmp_path) as worker:
        request = a_request(
            prompt=(5, 6, 7), max_tokens=10, ignore_eos=True, temperature=1.0, request_id="r"
        )
        whole = [f for f in await worker.generate(request) if isinstance(f, Tokens)]
        ids = [i for frame in whole for i in frame.ids]
        for cut in range(10):
            released = "".join(frame.text for frame in whole[:cut])
            choice = Choice(index=0, output_ids=tuple(ids[:cut]), released_chars=len(released))
            resumed = msgspec.structs.replace(request, attempt=2 + cut, choices=(choice,))
            frames = await worker.generate(resumed)
            tokens = [f for f in frames if isinstance(f, Tokens)]
            assert [i for f in tokens for i in f.ids] == ids[cut:]
            assert released + "".join(f.text for f in tokens) == FakeText().decode(ids)
            assert frames[-1].usage.output_tokens == 10 - cut


async def test_what_cannot_be_served_is_refused_before_it_costs_anything(tmp_path):
    async with serving(tmp_path) as worker:
        assert await worker.generate(a_request(version="other")) == [Nack(reason="wrong_version")]
        for tokens in (270, 310):  # over the pool, over the context
            huge = a_request(prompt=[1] * tokens)
            [nack] = await worker.generate(huge)
            assert (nack.reason, nack.fits_never) == ("fits_never", True)
        worker.journal._bytes_max = 0
        assert await worker.generate(a_request()) == [Nack(reason="journal_full")]
        assert worker.journal.batch() == ()


async def test_a_worker_that_is_loading_takes_nothing_and_says_so(tmp_path):
    async with serving(tmp_path, ready=False) as worker:
        assert await worker.generate(a_request()) == [Nack(reason="draining")]
        assert (await worker.client.get("/health/live")).status_code == 200
        ready = await worker.client.get("/health/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)


async def test_a_stopping_engine_ends_streams_as_retryable(tmp_path):
    async with serving(tmp_path) as worker:
        request = a_request(max_tokens=180, ignore_eos=True)
        frames = []
        async for frame in worker.frames(request):
            frames.append(frame)
            if isinstance(frame, Tokens) and not worker.engine.load().draining:
                worker.engine.drain()
                assert await worker.generate(a_request()) == [Nack(reason="draining")]
                await asyncio.to_thread(worker.engine.stop, 5)
        assert isinstance(frames[-1], Failed)
        assert (frames[-1].code, frames[-1].retryable) == ("shutting_down", True)
        produced = sum(len(f.ids) for f in frames if isinstance(f, Tokens))
        assert worker.last_words()[request.request_id, 1].usage.output_tokens == produced


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": ""},
        {"authorization": "Bearer nonsense"},
        bearer(audience="control-plane"),
        bearer(secret=b"another secret of ours"),
        bearer(life_ms=-1),
    ],
    ids=["none", "nonsense", "another audience", "forged", "out of date"],
)
async def test_a_bad_token_opens_nothing(tmp_path, headers):
    async with serving(tmp_path) as worker:
        for method, path in (("POST", "/generate"), ("POST", "/abort/r:1"), ("GET", "/load")):
            answer = await worker.client.request(method, path, headers=headers)
            assert answer.status_code == 401


async def test_bodies_and_paths_that_are_none(tmp_path):
    async with serving(tmp_path) as worker:
        post = worker.client.post
        for body in (b"", b"\xc1", b"{}", msgspec.msgpack.encode({"request_id": "r"})):
            assert (await post("/generate", content=body, headers=bearer())).status_code == 400
        big = await post("/generate", content=b"x" * (2 << 20), headers=bearer())
        assert big.status_code == 413
        assert (await post("/abort/nonsense", headers=bearer())).status_code == 404
        assert (await post("/frobnicate", headers=bearer())).status_code == 404


async def test_metrics_count_what_was_served(tmp_path):
    async with serving(tmp_path) as worker:
        await worker.generate(a_request(prompt=(1, 2, 3), max_tokens=5, ignore_eos=True))
        text = (await worker.client.get("/metrics")).text
        assert 'headworks_worker_attempts_total{end="complete"} 1.0' in text
        assert "headworks_worker_output_tokens_total 5.0" in text
        load = (await worker.client.get("/load", headers=bearer())).json()
        assert load["integrity"] is True
        assert load["kv_blocks_free"] == load["kv_blocks_total"] == 64
