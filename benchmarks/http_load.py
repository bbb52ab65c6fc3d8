"""A closed-loop load generator for chat completions that costs next to nothing itself.

Requests are bytes made once; answers are read for their status, their end and the moments at
which events came, and not parsed. One connection for each client, kept open.
"""

import asyncio
import time
from typing import cast
from urllib.parse import urlsplit

import msgspec

EVENT = b"data: {"
DONE = b"data: [DONE]"
LAST_CHUNK = b"0\r\n\r\n"
HEAD_END = b"\r\n\r\n"
ANSWER_TIMEOUT_S = 60.0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asked. `url` ends in /v1."""

    name: str
    url: str
    key: str = "none"
    model: str = "mock"


class Seen(msgspec.Struct):
    """One answer, as its client saw it. Seconds."""

    total_s: float = 0.0
    first_s: float = 0.0  # until the first event
    gap_s: float = 0.0  # the longest between two reads of a stream
    events: int = 0


class AnswerError(Exception):
    """Not the answer that was to be timed."""


def request_of(target: Target, *, prompt: str, max_tokens: int, stream: bool) -> bytes:
    """One request's bytes."""
    body = msgspec.json.encode(
        {
            "model": target.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": stream,
        }
    )
    parts = urlsplit(target.url)
    head = (
        f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        f"authorization: Bearer {target.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client(asyncio.Protocol):
    """One connection. `ask` returns when the answer is whole."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._got = bytearray()
        self._need = 0  # bytes of a whole answer; 0: not known, it ends with the last chunk
        self._seen = Seen()
        self._sent_s = self._last_s = 0.0
        self._done: asyncio.Future[Seen] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is its own class

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        """An answer under way is lost."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(AnswerError("the connection was closed"))

    async def ask(self, request: bytes) -> Seen:
        """Raises AnswerError."""
        assert self._transport is not None
        self._got.clear()
        self._need, self._seen = 0, Seen()
        self._done = asyncio.get_running_loop().create_future()
        self._sent_s = self._last_s = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await self._done

    def close(self) -> None:
        """For good."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Note when it came, and whether it was the last of it."""
        now_s, seen = time.perf_counter(), self._seen
        fresh = data.count(EVENT)
        if fresh:
            if seen.events:
                seen.gap_s = max(seen.gap_s, now_s - self._last_s)
            else:
                seen.first_s = now_s - self._sent_s
            seen.events += fresh
            self._last_s = now_s
        self._got += data
        if not self._need and not self._begin():
            return
        if self._whole(data):
            seen.total_s = now_s - self._sent_s
            assert self._done is not None
            if not self._done.done():
                self._done.set_result(seen)

    def _begin(self) -> bool:
        end = self._got.find(HEAD_END)
        if end < 0:
            return False
        head = bytes(self._got[:end]).lower()
        if b" 200 " not in head[:16]:
            assert self._done is not None
            if not self._done.done():
                self._done.set_exception(
                    AnswerError(bytes(self._got[:400]).decode(errors="replace"))
                )
            return False
        self._need = -1
        for line in head.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self._need = end + len(HEAD_END) + int(line.partition(b":")[2])
        return True

    def _whole(self, data: bytes) -> bool:
        if self._need > 0:
            return len(self._got) >= self._need
        # A short last read may have the end of the last chunk alone.
        return self._got.endswith(LAST_CHUNK) and (DONE in self._got[-256:] or DONE in data)


async def closed(
    target: Target, request: bytes, *, clients: int, seconds: float = 0.0, requests: int = 0
) -> tuple[list[Seen], float]:
    """Each client asks again when it is answered, for so long or so often. And the time taken."""
    parts = urlsplit(target.url)
    where = (parts.hostname or "", parts.port or 80)
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(Client, *where) for _ in range(clients)]
    answers: list[Seen] = []
    until_s = time.perf_counter() + seconds

    async def work(client: Client) -> None:
        count = 0
        while (count < requests) if requests else (time.perf_counter() < until_s):
            answers.append(await client.ask(request))
            count += 1

    began_s = time.perf_counter()
    try:
        await asyncio.gather(*(work(client) for _, client in made))
    finally:
        for _, client in made:
            client.close()
    return answers, time.perf_counter() - began_s
