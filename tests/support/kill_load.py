"""Tenants that ask all the time, stay or leave, and remember what they were told.

Every choice comes from one seeded generator. A request's moments (asked, head, chunk, end) can
be waited for, so that a kill hits the step which follows them.
"""

import asyncio
import json
import random
from typing import Any

import msgspec

from tests.support.gateway_world import MODEL, Caller
from tests.support.kill_worker import LENGTH_MAX, length, letter

CLIENTS = 14
PATIENCE_S = 4.0  # a client that hears nothing for so long leaves
WORDS = ("the", "headworks", "of", "a", "waterway", "divert", "its", "flow", "to", "turbines")

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = "/v1/messages"

MOMENTS = ("asked", "head", "chunk", "end")


class Asked(msgspec.Struct):
    """One request, and all that its client saw of it."""

    gateway: str
    tenant_id: str
    path: str
    body: dict[str, Any]
    stage: str = "connecting"
    raw: bytes = b""
    left: bool = False  # the client closed the connection
    sent: bool = False

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0]

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1]) if b"\r\n\r\n" in self.raw else 0

    @property
    def request_id(self) -> str:
        for line in self.head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b": ")
            if name.lower() == b"x-request-id":
                return value.decode()
        return ""


class Told(msgspec.Struct):
    """A whole answer."""

    texts: list[str]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None  # None: the dialect's stream did not say


class Load:
    """`start` the clients, `pause` them between two requests, and read `asked`."""

    def __init__(self, rng: random.Random, ports: dict[str, int], callers: list[Caller]) -> None:
        self._rng = rng
        self._ports = ports
        self._callers = callers
        self._keys = {caller.tenant_id: caller.key for caller in callers}
        self._tasks: list[asyncio.Task[None]] = []
        self._pausing = False
        self._moments: dict[str, list[asyncio.Future[str]]] = {moment: [] for moment in MOMENTS}
        self.asked: list[Asked] = []
        self._under_way: list[Asked] = []

    @property
    def waiting(self) -> int:
        """Requests sent, and not yet answered or given up."""
        return sum(1 for asked in self._under_way if asked.sent)

    def start(self) -> None:
        self._pausing = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]

    async def pause(self) -> None:
        """Ask nothing more; returns when every request has its answer, or its client has left."""
        self._pausing = True
        await asyncio.gather(*self._tasks)

    async def moment(self, name: str, within_s: float) -> str | None:
        """The gateway at which a request next comes to this moment."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._moments[name].append(future)
        try:
            async with asyncio.timeout(within_s):
                return await future
        except TimeoutError:
            return None

    async def _client(self) -> None:
        while not self._pausing:
            asked = self._next()
            self._under_way.append(asked)
            try:
                await self._ask(asked)
            finally:
                self._under_way.remove(asked)
            if asked.sent:
                self.asked.append(asked)
            else:
                await asyncio.sleep(0.02)
            await asyncio.sleep(self._rng.uniform(0, 0.1))

    def _next(self) -> Asked:
        rng = self._rng
        caller = rng.choice(self._callers)
        path = rng.choice((CHAT, CHAT, COMPLETION, MESSAGES))
        return Asked(
            gateway=rng.choice(list(self._ports)),
            tenant_id=caller.tenant_id,
            path=path,
            body=a_body(rng, path),
        )

    async def _ask(self, asked: Asked) -> None:
        leave_s = PATIENCE_S
        if self._rng.random() < 0.2:
            leave_s = self._rng.choice((0.0, 0.01, 0.05, self._rng.uniform(0, 0.4)))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[asked.gateway])
        except OSError:
            return
        try:
            writer.write(_request(asked, self._keys[asked.tenant_id]))
            asked.sent = True
            self._pass(asked, "asked")
            async with asyncio.timeout(leave_s):
                await self._read(asked, reader)
        except TimeoutError:
            asked.left = True
        except OSError:
            pass  # its gateway was killed
        finally:
            writer.close()

    async def _read(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65_536):
            first = not asked.raw
            asked.raw += data
            if is_whole(asked.raw):
                self._pass(asked, "end")
                return
            self._pass(asked, "head" if first else "chunk")

    def _pass(self, asked: Asked, moment: str) -> None:
        asked.stage = moment
        for future in self._moments[moment]:
            if not future.done():
                future.set_result(asked.gateway)
        self._moments[moment].clear()


def a_body(rng: random.Random, path: str) -> dict[str, Any]:
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.randint(1, LENGTH_MAX),
        "stream": rng.random() < 0.7,
    }
    if path == COMPLETION:
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    if path != MESSAGES:
        body["seed"] = rng.getrandbits(32)
        body["n"] = rng.choice((1, 1, 1, 2))
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
    return body


def _request(asked: Asked, key: str) -> bytes:
    payload = json.dumps(asked.body).encode()
    auth = f"authorization: Bearer {key}"
    if asked.path == MESSAGES:
        auth = f"x-api-key: {key}\r\nanthropic-version: 2023-06-01"
    head = (
        f"POST {asked.path} HTTP/1.1\r\nhost: gateway\r\n{auth}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + payload


# Reading answers.


def is_whole(raw: bytes) -> bool:
    """Whether a response has come to its end."""
    head, end, body = raw.partition(b"\r\n\r\n")
    if not end:
        return False
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        return body.endswith(b"0\r\n\r\n")
    size = int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return len(body) >= size


def told(asked: Asked) -> Told | None:
    """The answer, if the client got all of it and it is no error."""
    if asked.status != 200 or not is_whole(asked.raw):
        return None
    body = asked.raw.partition(b"\r\n\r\n")[2]
    if not asked.body["stream"]:
        answer = json.loads(body)
        return _message(answer) if asked.path == MESSAGES else _completion(answer)
    data = _unchunked(body)
    events = [
        json.loads(line[6:])
        for line in data.decode().split("\n")
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    if asked.path == MESSAGES:
        return _message_stream(events)
    return _completion_stream(events) if data.endswith(b"data: [DONE]\n\n") else None


def check_texts(asked: Asked, answer: Told, *, may_be_short: bool) -> None:
    """Every letter is the one that belongs there, and none is missing before the end.

    A tenant whose budget is used up may get less than it asked for.
    """
    seed = asked.body.get("seed")
    if seed is None:
        return
    for choice, text in enumerate(answer.texts):
        most = min(asked.body["max_tokens"], length(seed, choice))
        whole = "".join(letter(seed, choice, index) for index in range(most))
        assert whole.startswith(text) if may_be_short else text == whole, (whole, asked)


def _completion(answer: dict[str, Any]) -> Told:
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
    return Told(texts, **_usage(answer["usage"]))


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    }


def _completion_stream(events: list[dict[str, Any]]) -> Told | None:
    parts: dict[int, str] = {}
    usage = None
    for event in events:
        if "error" in event:
            return None
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            parts[choice["index"]] = parts.get(choice["index"], "") + (text or "")
    assert usage is not None, events
    return Told([parts[index] for index in sorted(parts)], **_usage(usage))


def _message(answer: dict[str, Any]) -> Told:
    usage = answer["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    text = "".join(block["text"] for block in answer["content"])
    return Told([text], usage["input_tokens"] + cached, usage["output_tokens"], cached)


def _message_stream(events: list[dict[str, Any]]) -> Told | None:
    if not events or events[-1]["type"] != "message_stop":
        return None
    usage: dict[str, Any] = {}
    text = ""
    for event in events:
        usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
        text += event.get("delta", {}).get("text") or ""
    cached = usage.get("cache_read_input_tokens") or 0
    return Told([text], usage["input_tokens"] + cached, usage["output_tokens"], cached)


def _unchunked(body: bytes) -> bytes:
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        data += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return data
