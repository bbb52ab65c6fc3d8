"""The worker hop against a server whose every byte is scripted."""

import asyncio
import time

import pytest

from core.internal_token import verify
from core.protocol import (
    Choice,
    Failed,
    Finished,
    Frame,
    Generate,
    Load,
    Nack,
    Sampling,
    Started,
    Timings,
    Tokens,
    Usage,
    decode_generate,
    encode_frame,
)
from gateway.worker_client import (
    ConnectFailedError,
    CutError,
    FrameStream,
    Heard,
    WorkerClient,
    WorkerLimits,
    WorkerRefusedError,
)
from tests.support.raw_server import (
    FRAMES_HEAD,
    LAST_CHUNK,
    Handler,
    RawServer,
    chunk,
    read_request,
    reset,
)
from tests.support.services import free_port

pytestmark = pytest.mark.anyio

SECRET = b"a-secret-of-enough-length"
STARTED = Started(boot_id="boot_1", prompt_tokens=3, cached_tokens=0)
FINISHED = Finished(
    cause="complete",
    usage=Usage(prompt_tokens=3, output_tokens=2),
    timings=Timings(),
    journal_seq=1,
)
HAPPY: tuple[Frame, ...] = (
    STARTED,
    Tokens(choice=0, ids=(5,), text="a"),
    Load(boot_id="boot_1", seq=1, kv_blocks_total=9, kv_blocks_free=8, running=1, waiting=0),
    Tokens(choice=0, ids=(6,), text="é", finish="stop"),
    FINISHED,
)


def a_generate() -> Generate:
    return Generate(
        request_id="req_local_0",
        attempt=1,
        version="v",
        prompt_ids=(1, 2, 3),
        choices=(Choice(index=0),),
        sampling=Sampling(seed=1, max_tokens=4),
        tenant_salt=b"salt",
    )


def a_client(limits: WorkerLimits | None = None) -> WorkerClient:
    return WorkerClient(
        secret=SECRET,
        subject="gw_1",
        limits=limits or WorkerLimits(),
        now_ms=lambda: time.time_ns() // 1_000_000,
    )


def wire(frames: tuple[Frame, ...]) -> bytes:
    return b"".join(chunk(encode_frame(frame)) for frame in frames)


def answering(*writes: bytes, pause_s: float = 0.0) -> Handler:
    """Answers every request on the connection with the same bytes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for data in writes:
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(pause_s)

    return handler


async def read_all(stream: FrameStream) -> list[Frame]:
    frames: list[Frame] = []
    async with asyncio.timeout(5):
        while not frames or not isinstance(frames[-1], Nack | Finished | Failed):
            frames += await stream.read()
    return frames


async def read_until_error(stream: FrameStream) -> tuple[list[Frame], Exception]:
    frames: list[Frame] = []
    async with asyncio.timeout(5):
        while True:
            try:
                frames += await stream.read()
            except (CutError, WorkerRefusedError, ConnectFailedError) as error:
                return frames, error


async def test_request_carries_the_message_and_a_token_for_workers() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(FRAMES_HEAD + wire(HAPPY) + LAST_CHUNK)

    async with RawServer(handler) as server:
        client = a_client()
        await read_all(await client.generate(server.url, a_generate()))
        await client.close()
    (head, body) = seen[0]
    assert head.startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")
    assert decode_generate(body) == a_generate()
    token = head.split(b"authorization: Bearer ")[1].split(b"\r\n")[0].decode()
    assert verify(SECRET, token, audience="worker", now_ms=time.time_ns() // 10**6) == "gw_1"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
async def test_frames_survive_any_split(size: int) -> None:
    data = FRAMES_HEAD + wire(HAPPY) + LAST_CHUNK
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    async with RawServer(answering(*pieces)) as server:
        client = a_client()
        assert tuple(await read_all(await client.generate(server.url, a_generate()))) == HAPPY
        await client.close()


async def test_frames_in_one_chunk_and_one_frame_in_many_chunks() -> None:
    body = b"".join(encode_frame(frame) for frame in HAPPY)
    one = FRAMES_HEAD + chunk(body) + LAST_CHUNK
    many = FRAMES_HEAD + b"".join(chunk(body[i : i + 1]) for i in range(len(body))) + LAST_CHUNK
    for data in (one, many):
        async with RawServer(answering(data)) as server:
            client = a_client()
            stream = await client.generate(server.url, a_generate())
            assert tuple(await read_all(stream)) == HAPPY
            await client.close()


async def test_cut_at_any_byte_is_told_and_never_an_end() -> None:
    data = FRAMES_HEAD + wire(HAPPY)
    whole = len(data) - len(b"\r\n")  # the last frame is whole before its chunk's line end
    cut_at = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(data[:cut_at])
        await writer.drain()

    async with RawServer(handler) as server:
        client = a_client()
        for cut_at in range(whole):
            stream = await client.generate(server.url, a_generate())
            frames, error = await read_until_error(stream)
            assert tuple(frames) == HAPPY[: len(frames)]
            assert isinstance(error, CutError)
            assert error.unanswered == (cut_at == 0)
        cut_at = whole
        assert tuple(await read_all(await client.generate(server.url, a_generate()))) == HAPPY
        await client.close()


async def test_reset_mid_stream_is_a_cut() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(FRAMES_HEAD + wire(HAPPY[:2]))
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with RawServer(handler) as server:
        client = a_client()
        frames, error = await read_until_error(await client.generate(server.url, a_generate()))
        assert tuple(frames) == HAPPY[:2]
        assert isinstance(error, CutError)
        await asyncio.sleep(0.01)
        assert client.connections == 0


async def test_clean_end_of_the_message_without_a_terminal_frame_is_a_cut() -> None:
    async with RawServer(answering(FRAMES_HEAD + wire(HAPPY[:3]) + LAST_CHUNK)) as server:
        client = a_client()
        frames, error = await read_until_error(await client.generate(server.url, a_generate()))
        assert len(frames) == 3
        assert "before a terminal frame" in str(error)
        await client.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: twelve\r\n\r\n",
        FRAMES_HEAD + b"zz\r\n",
        FRAMES_HEAD + chunk(b"\xff\xff\xff\xff"),
        FRAMES_HEAD + chunk((3).to_bytes(4, "big") + b"abc"),
        FRAMES_HEAD + wire((HAPPY[1],)),  # tokens before started
        FRAMES_HEAD + wire((STARTED, STARTED)),
        FRAMES_HEAD + wire((STARTED, Nack(reason="full"))),
        b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    ],
)
async def test_garbage_is_refused_and_costs_the_connection_or_the_answer(garbage: bytes) -> None:
    async with RawServer(answering(garbage)) as server:
        client = a_client(WorkerLimits(head_s=0.5, first_frame_s=0.5, idle_s=0.5))
        _, error = await read_until_error(await client.generate(server.url, a_generate()))
        assert isinstance(error, CutError | WorkerRefusedError)
        await client.close()


@pytest.mark.parametrize(
    ("written", "waited_for"),
    [
        (b"", "response head"),
        (b"HTTP/1.1 200 OK\r\n", "response head"),
        (FRAMES_HEAD, "first frame"),
        (FRAMES_HEAD + wire((STARTED,)), "next frame"),
        (FRAMES_HEAD + wire(HAPPY[:2]) + b"1f", "next frame"),
    ],
)
async def test_silence_is_bounded_at_every_stage(written: bytes, waited_for: str) -> None:
    async with RawServer(answering(written)) as server:
        client = a_client(WorkerLimits(head_s=0.15, first_frame_s=0.15, idle_s=0.15))
        began = time.monotonic()
        _, error = await read_until_error(await client.generate(server.url, a_generate()))
        assert waited_for in str(error)
        assert time.monotonic() - began < 3
        await asyncio.sleep(0.01)
        assert client.connections == 0


async def test_load_after_a_refusal_is_harmless() -> None:
    refused = (Nack(reason="full"), HAPPY[2])
    async with RawServer(answering(FRAMES_HEAD + wire(refused) + LAST_CHUNK)) as server:
        client = a_client()
        for _ in range(2):
            stream = await client.generate(server.url, a_generate())
            assert await stream.read() == [Nack(reason="full")]
            await asyncio.sleep(0.02)
        assert server.accepted == 1
        await client.close()


async def test_slow_but_living_answer_is_not_cut() -> None:
    writes = [FRAMES_HEAD, *(wire((frame,)) for frame in HAPPY), LAST_CHUNK]
    async with RawServer(answering(*writes, pause_s=0.1)) as server:
        client = a_client(WorkerLimits(head_s=0.4, first_frame_s=0.4, idle_s=0.4))
        assert tuple(await read_all(await client.generate(server.url, a_generate()))) == HAPPY
        await client.close()


async def test_nobody_listening_is_connect_failed() -> None:
    client = a_client()
    with pytest.raises(ConnectFailedError):
        await client.generate(f"http://127.0.0.1:{free_port()}", a_generate())


@pytest.mark.parametrize("status", [400, 401, 404, 500, 503])
async def test_other_status_is_refused_and_keeps_the_connection(status: int) -> None:
    answer = b"HTTP/1.1 %d X\r\ncontent-length: 4\r\n\r\nbusy" % status
    async with RawServer(answering(answer)) as server:
        client = a_client()
        for _ in range(3):
            stream = await client.generate(server.url, a_generate())
            _, error = await read_until_error(stream)
            assert isinstance(error, WorkerRefusedError)
            assert error.status == status
            stream.close()
            await asyncio.sleep(0.02)
        assert server.accepted == 1
        await client.close()


async def test_connections_are_kept_and_bounded() -> None:
    whole = FRAMES_HEAD + wire(HAPPY) + LAST_CHUNK
    async with RawServer(answering(b"", whole, pause_s=0.05)) as server:
        client = a_client(WorkerLimits(idle_per_worker=2))
        for _ in range(3):
            await read_all(await client.generate(server.url, a_generate()))
        assert server.accepted == 1
        streams = [await client.generate(server.url, a_generate()) for _ in range(4)]
        for stream in streams:
            await read_all(stream)
        await asyncio.sleep(0.05)
        assert server.accepted == 4
        assert client.connections == 2
        await client.close()


async def test_kept_connection_that_went_stale_is_replaced() -> None:
    served = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await read_request(reader)
        writer.write(FRAMES_HEAD + wire(HAPPY) + LAST_CHUNK)
        served += 1
        await read_request(reader)  # and close without a byte

    async with RawServer(handler) as server:
        client = a_client()
        for _ in range(3):
            stream = await client.generate(server.url, a_generate())
            assert tuple(await read_all(stream)) == HAPPY
        assert served == 3
        await client.close()


async def test_fresh_connection_closed_without_an_answer_is_not_sent_again() -> None:
    requests = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await read_request(reader)
        requests += 1

    async with RawServer(handler) as server:
        client = a_client()
        _, error = await read_until_error(await client.generate(server.url, a_generate()))
        assert isinstance(error, CutError)
        assert error.unanswered
        assert requests == 1


async def test_lagging_reader_stops_the_worker_and_loses_nothing() -> None:
    count = 20_000
    wrote = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal wrote
        await read_request(reader)
        writer.write(FRAMES_HEAD + wire((STARTED,)))
        for i in range(count):
            writer.write(wire((Tokens(choice=0, ids=(i,), text="x" * 2000),)))
            await writer.drain()
            wrote += 1
        writer.write(wire((FINISHED,)) + LAST_CHUNK)
        await writer.drain()

    async with RawServer(handler) as server:
        client = a_client(WorkerLimits(idle_s=0.2))
        stream = await client.generate(server.url, a_generate())
        frames = await stream.read()
        assert frames[0] == STARTED
        await asyncio.sleep(0.6)  # longer than idle_s: the lag is ours, so nothing is cut
        stalled = wrote
        await asyncio.sleep(0.1)
        assert wrote == stalled < count
        frames += await read_all(stream)
        ids = [frame.ids[0] for frame in frames if isinstance(frame, Tokens)]
        assert ids == list(range(count))
        await client.close()


async def test_cancelled_read_loses_nothing() -> None:
    writes = [FRAMES_HEAD, *(wire((frame,)) for frame in HAPPY), LAST_CHUNK]
    async with RawServer(answering(*writes, pause_s=0.05)) as server:
        client = a_client()
        stream = await client.generate(server.url, a_generate())
        frames: list[Frame] = []
        while not frames or frames[-1] != FINISHED:
            try:
                async with asyncio.timeout(0.02):
                    frames += await stream.read()
            except TimeoutError:
                continue
        assert tuple(frames) == HAPPY
        await client.close()


async def test_closing_a_stream_cuts_only_its_own_connection() -> None:
    async with RawServer(answering(FRAMES_HEAD + wire(HAPPY[:2]))) as server:
        client = a_client()
        first = await client.generate(server.url, a_generate())
        second = await client.generate(server.url, a_generate())
        await first.read()
        await second.read()
        first.close()
        await asyncio.sleep(0.05)
        assert client.connections == 1
        await client.close()
        await asyncio.sleep(0.05)
        assert client.connections == 0


async def test_abort_says_whether_the_worker_heard() -> None:
    seen: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await read_request(reader)
            seen.append(head.split(b" ")[1])
            known = head.startswith(b"POST /abort/req_1:2 ")
            status = b"200 OK" if known else b"404 Not Found"
            writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")

    async with RawServer(handler) as server:
        client = a_client()
        assert (await client.abort(server.url, "req_1", 2)).ended
        assert not (await client.abort(server.url, "req_1", 3)).ended
        assert seen == [b"/abort/req_1:2", b"/abort/req_1:3"]
        await client.close()


async def test_abort_raises_nothing_when_the_worker_is_gone_or_silent() -> None:
    client = a_client(WorkerLimits(abort_s=0.1))
    assert await client.abort(f"http://127.0.0.1:{free_port()}", "req_1", 1) == Heard(refused=True)
    async with RawServer(answering(b"")) as server:
        assert await client.abort(server.url, "req_1", 1) == Heard()
        await client.close()


async def test_unsolicited_bytes_on_a_kept_connection_cost_it() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(FRAMES_HEAD + wire(HAPPY) + LAST_CHUNK)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await asyncio.sleep(1)

    async with RawServer(handler) as server:
        client = a_client()
        await read_all(await client.generate(server.url, a_generate()))
        await asyncio.sleep(0.15)
        assert client.connections == 0
