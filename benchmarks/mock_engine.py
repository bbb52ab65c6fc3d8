"""An engine that costs nothing: it answers in the worker's protocol, and in OpenAI's.

For what a gateway costs: `python -m benchmarks.mock_engine --port 8900`. An answer has the
tokens that its request asks for; `POST /pace` says how fast they come, to whom it may concern.
"""

import argparse
import asyncio
import json
from collections.abc import Iterator
from typing import cast

import msgspec
import uvloop

from core.protocol import Finished, Load, Started, Timings, Tokens, Usage, decode_generate
from core.protocol import encode_frame as frame

BOOT_ID = "boot_mock"
KV_BLOCKS = 1 << 30
WORD = " word"
HEAD_END = b"\r\n\r\n"
FRAMES = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-headworks-frames\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class Pace(msgspec.Struct, forbid_unknown_fields=True):
    """Milliseconds before the first token, and between two; all tokens at once for 0."""

    first_ms: float = 0.0
    interval_ms: float = 0.0


class Request(msgspec.Struct):
    """What of an OpenAI request is looked at."""

    max_tokens: int = 16
    stream: bool = False
    model: str = ""


class Connection(asyncio.Protocol):
    """One client's, kept open. Requests come one after the other."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._got = bytearray()
        self._transport: asyncio.Transport | None = None
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is its own class

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        """Whatever was being said is said to nobody."""
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._got += data
        while (end := self._got.find(HEAD_END)) >= 0:
            head = bytes(self._got[:end])
            size = _length(head)
            whole = end + len(HEAD_END) + size
            if len(self._got) < whole:
                return
            body = bytes(self._got[end + len(HEAD_END) : whole])
            del self._got[:whole]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path == b"/generate":
            self._say(FRAMES + CHUNKED, [chunk(piece) for piece in frames(body)])
        elif path == b"/pace":
            told = msgspec.json.decode(body, type=Pace)  # everybody's
            self._pace.first_ms, self._pace.interval_ms = told.first_ms, told.interval_ms
            self._write(whole_json({}))
        elif path.endswith(b"/chat/completions"):
            request = msgspec.json.decode(body, type=Request)
            if request.stream:
                self._say(EVENTS + CHUNKED, [chunk(piece) for piece in events(request)])
            else:
                self._later(whole_json(completion(request)))
        else:
            self._write(whole_json({"data": [{"id": "mock", "object": "model"}]}))

    def _later(self, answer: bytes) -> None:
        if self._pace.first_ms:
            asyncio.get_running_loop().call_later(self._pace.first_ms / 1000, self._write, answer)
        else:
            self._write(answer)

    def _say(self, head: bytes, pieces: list[bytes]) -> None:
        if not self._pace.first_ms and not self._pace.interval_ms:
            self._write(b"".join([head, *pieces, LAST_CHUNK]))
            return
        self._answering = asyncio.get_running_loop().create_task(self._paced(head, pieces))

    async def _paced(self, head: bytes, pieces: list[bytes]) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._pace.first_ms / 1000)
        due = clock()
        self._write(head)
        for piece in pieces:
            self._write(piece)
            due += self._pace.interval_ms / 1000
            await asyncio.sleep(max(0.0, due - clock()))
        self._write(LAST_CHUNK)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


def frames(body: bytes) -> Iterator[bytes]:
    """The answer to a `Generate`: started, a frame for each token, finished."""
    asked = decode_generate(body)
    count, read = asked.sampling.max_tokens, len(asked.prompt_ids)
    yield frame(Started(boot_id=BOOT_ID, prompt_tokens=read, cached_tokens=0))
    token = frame(Tokens(choice=0, ids=(100,), text=WORD))
    for _ in range(count - 1):
        yield token
    load = Load(
        boot_id=BOOT_ID, seq=1, kv_blocks_total=KV_BLOCKS, kv_blocks_free=KV_BLOCKS,
        running=1, waiting=0,
    )  # fmt: skip
    usage = Usage(prompt_tokens=read, output_tokens=count)
    yield b"".join(
        [
            frame(Tokens(choice=0, ids=(100,), text=WORD, finish="length")),
            frame(load),
            frame(Finished(cause="complete", usage=usage, timings=Timings(), journal_seq=1)),
        ]
    )


def events(request: Request) -> Iterator[bytes]:
    """The same as OpenAI's stream."""
    for index in range(request.max_tokens):
        last = index == request.max_tokens - 1
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": WORD},
            "finish_reason": "length" if last else None,
        }
        yield event({**head_of(request, "chat.completion.chunk"), "choices": [choice]})
    usage = usage_of(request)
    yield event({**head_of(request, "chat.completion.chunk"), "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def completion(request: Request) -> dict[str, object]:
    """The same as one body."""
    message = {"role": "assistant", "content": WORD * request.max_tokens}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = usage_of(request)
    return {**head_of(request, "chat.completion"), "choices": [choice], "usage": usage}


def head_of(request: Request, kind: str) -> dict[str, object]:
    """What every object begins with."""
    return {"id": "chatcmpl-mock", "object": kind, "created": 1_700_000_000, "model": request.model}


def usage_of(request: Request) -> dict[str, int]:
    """Counts, of a prompt that nobody read."""
    read, made = 10, request.max_tokens
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def event(body: dict[str, object]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def chunk(body: bytes) -> bytes:
    """One of HTTP's chunks."""
    return b"%x\r\n%s\r\n" % (len(body), body)


def whole_json(body: dict[str, object]) -> bytes:
    """A whole response."""
    text = json.dumps(body, separators=(",", ":")).encode()
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    return f"{head}{len(text)}\r\n\r\n".encode() + text


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _serve(port: int) -> None:
    pace = Pace()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(pace), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
